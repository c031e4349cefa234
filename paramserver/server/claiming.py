"""Advice to workers that have time, as a shard gives it: checks the question, and asks the core."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from paramserver import errors
from paramserver.core.claims import Ask, Claims
from paramserver.core.consistency import Mode
from paramserver.core.names import Name, SyncName
from paramserver.core.shard import ShardState
from paramserver.v1 import shard_pb2

# More slices than any step has; a larger number would only cost time here.
_MAX_SLICES = 100_000


class ClaimDesk:
    """Belongs to one shard. Nothing that happens here changes what counts."""

    def __init__(self) -> None:
        self._claims = Claims()

    def published(self, version: int, names: Iterable[Name]) -> None:
        """``version`` was made of the contributions of these names: the next step begins."""
        of = next((name.of for name in names if isinstance(name, SyncName)), 0)
        self._claims.begin(version, time.monotonic(), of)

    def keep(self, workers: Iterable[int]) -> None:
        """These are the workers that are left."""
        self._claims.keep(workers)

    def taken(self, version: int) -> tuple[int, ...]:
        """Slices of the step that made ``version`` which were given to others than their owners."""
        return self._claims.taken(version)

    def answer(self, request: shard_pb2.ClaimRequest, state: ShardState) -> shard_pb2.ClaimResponse:
        """The slice to compute, if there is one. Raises ProtocolError for a question that makes no sense."""
        ask = _checked(request)
        if request.timeline != state.timeline:
            raise errors.FencedError(
                f"the question is of timeline {request.timeline}, this shard is on timeline {state.timeline}"
            )
        missing = state.missing()
        if state.consistency.mode is not Mode.SYNC or request.step != state.version or missing is None:
            return shard_pb2.ClaimResponse(complete=request.step <= state.version)
        if missing.of not in (0, ask.of):
            raise errors.ProtocolError(f"the question is of a step of {ask.of} slices, this one has {missing.of}")
        gaps = missing.slices if missing.of else ((0, ask.of),)
        return shard_pb2.ClaimResponse(slice=self._claims.ask(ask, gaps, time.monotonic()))


def _checked(request: shard_pb2.ClaimRequest) -> Ask:
    of, own = request.of, (request.own.start, request.own.stop)
    if not 0 < of <= _MAX_SLICES or not 0 < request.workers <= _MAX_SLICES:
        raise errors.ProtocolError(f"a step of {of} slices among {request.workers} workers is out of bounds")
    if not 0 <= own[0] <= own[1] <= of:
        raise errors.ProtocolError(f"[{own[0]}, {own[1]}) is no range of a step of {of} slices")
    if not 0 <= request.work_s < math.inf:
        raise errors.ProtocolError(f"work_s must be finite and not negative, not {request.work_s}")
    if not all(0 <= part.start <= part.stop <= of for part in request.finished):
        raise errors.ProtocolError("finished slices lie outside of the step")
    if sum(part.stop - part.start for part in request.finished) > of:
        raise errors.ProtocolError("more slices are finished than the step has")
    finished = frozenset(s for part in request.finished for s in range(part.start, part.stop))
    return Ask(request.worker, request.step, of, own, request.workers, request.work_s, finished)
