"""The server's side of work stealing: checks the question of an idle worker, and asks `core/work/stealing.py`."""

from __future__ import annotations

import math
import time

from paramserver import errors
from paramserver.core.shards.shard import ShardState
from paramserver.core.work.stealing import Ask, Assignment, Stealing
from paramserver.v1 import shard_pb2
from paramserver.wire.bounds import MAX_SLICES


def note(stealing: Stealing, request: shard_pb2.PullRequest, version: int) -> None:
    """The answer to this pull is ``version``. An assignment that makes no sense is not noted."""
    if request.HasField("assignment") and _sensible(request.assignment):
        stealing.given(_assignment(request.worker, request.assignment), version)


def answer(stealing: Stealing, request: shard_pb2.StealRequest, state: ShardState) -> shard_pb2.StealResponse:
    """The slice to compute, if there is one. Raises ProtocolError for a question that makes no sense."""
    ask = _checked(request)
    if request.timeline != state.timeline:
        raise errors.FencedError(
            f"the question is of timeline {request.timeline}, this shard is on timeline {state.timeline}"
        )
    missing = state.missing()
    if missing is not None and request.step == state.version and missing.of not in (0, ask.of):
        raise errors.ProtocolError(f"the question is of a step of {ask.of} slices, this one has {missing.of}")
    advice = stealing.advise(ask, state.version, missing, time.monotonic())
    return shard_pb2.StealResponse(slice=advice.slice, complete=advice.complete)


def _sensible(said: shard_pb2.Assignment) -> bool:
    return 0 < said.workers <= MAX_SLICES and -1 <= said.place < said.workers and 0 <= said.work_s < math.inf


def _assignment(worker: int, said: shard_pb2.Assignment) -> Assignment:
    return Assignment(worker, said.place, said.workers, said.work_s)


def _checked(request: shard_pb2.StealRequest) -> Ask:
    of, said = request.of, request.assignment
    if not 0 < of <= MAX_SLICES:
        raise errors.ProtocolError(f"a step of {of} slices is out of bounds")
    if not _sensible(said):
        raise errors.ProtocolError(
            f"place {said.place} of {said.workers} workers, with {said.work_s} s per slice, makes no sense"
        )
    if not all(0 <= part.start <= part.stop <= of for part in request.finished):
        raise errors.ProtocolError("finished slices lie outside of the step")
    if sum(part.stop - part.start for part in request.finished) > of:
        raise errors.ProtocolError("more slices are finished than the step has")
    finished = frozenset(s for part in request.finished for s in range(part.start, part.stop))
    return Ask(_assignment(request.worker, said), request.step, of, finished)
