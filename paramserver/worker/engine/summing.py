"""Sums over all slices of the present step, which layers need in the middle of a forward or a backward pass."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial

import structlog
import torch

from paramserver import errors
from paramserver.core.versions.names import SyncName
from paramserver.v1 import shard_pb2
from paramserver.worker.job.member import Member
from paramserver.worker.job.phases import WAIT
from paramserver.worker.job.shards import Shards
from paramserver.worker.pace import Item, Paces
from paramserver.worker.pace.sync import SyncPace

log = structlog.get_logger("paramserver.worker")

# Calls of one layer in one slice. Rounds of a layer count from step times this number.
_CALLS = 1 << 16
# After so long a server names the missing slices, and is asked again.
_PARK_S = 2.0
# A worker that was alone in so many steps says so.
_STEPS = 3


class Summing:
    """Sums of the slice that the script computes now. Belongs to the thread that computes.

    A round has the name of the work: timeline, step, layer, direction and the number of the call. So a slice that is
    computed again brings the same numbers to the same rounds, and gets the same sums.

    Errors are raised by :meth:`settle`, and not in the middle of a pass: until then the slice goes on with numbers of
    its own, and its contribution is dropped.
    """

    def __init__(self, member: Member, shards: Shards, paces: Paces) -> None:
        self._member, self._shards, self._paces = member, shards, paces
        # The slice that the script has, and its samples; None between two slices.
        self._item: Item | None = None
        self.samples = 1
        # How often each layer was called in this slice, by channel.
        self._calls: Counter[str] = Counter()
        # Why the sums of this slice are not those of the step: an error, or another slice that has to come first.
        self._error: errors.ParamServerError | None = None
        self._first: int | None = None
        # Seconds that this slice has waited for others.
        self.waited_s = 0.0
        # The last step in which a slice was put off, and how many such steps there were.
        self._put_off_in, self._steps_put_off = -1, 0

    # ---- the slice

    def begin(self, item: Item, samples: int) -> None:
        """The script has this slice of so many samples now."""
        self._item, self.samples = item, samples
        self._calls.clear()
        self._error = self._first = None
        self.waited_s = 0.0

    def settle(self) -> bool:
        """The slice was computed. False: its sums were not those of the step, and it has to be computed again.

        Raises the error that has kept a sum from coming.
        """
        error, first = self._error, self._first
        self._item = self._error = self._first = None
        self.waited_s = 0.0
        if first is not None:
            pace = self._paces.pace
            if isinstance(pace, SyncPace):
                pace.put_off(first)
            return False
        if error is None:
            return True
        if isinstance(error, errors.StaleViewError) and not isinstance(error, errors.FencedError):
            log.info("a sum over the slices of a step did not come", reason=str(error))
            self._paces.refresh()  # the step may be over
            return False
        raise error

    @property
    def slices(self) -> int:
        """How many slices the present step has; 0 outside of a slice. Raises UserError in asynchronous mode."""
        if self._item is None:
            return 0
        name = self._item.name
        if not isinstance(name, SyncName):
            raise errors.UserError(
                "SyncBatchNorm needs steps of several slices, and the job is asynchronous now: set consistency.mode to "
                "sync, or use BatchNorm"
            )
        return name.of

    # ---- sums

    def total(self, what: str, channel: str, shard: int, given: torch.Tensor) -> torch.Tensor:
        """The sum of ``given`` (float64, flat, in main memory) over the slices of the step, in their order.

        ``what``: in words, ``channel``: of the layer and its direction. ``shard``: which server adds up.
        Raises UserError outside of a slice.
        """
        if self._item is None:
            raise errors.UserError(
                f"{what} were asked for after the slice was handed in: make all backward passes of a batch before "
                "optimizer.step()"
            )
        number, self._calls[channel] = self._calls[channel], self._calls[channel] + 1
        if self._error is not None or self._first is not None:
            return given
        name = self._item.name
        assert isinstance(name, SyncName)
        request = self._request(name, f"{what} in step {name.step}", channel, number, given)
        former, began = self._member.phases.enter(WAIT), time.monotonic()
        try:
            found = self._sum(name, shard, request)
        except errors.ParamServerError as error:
            self._error = error
            return given
        finally:
            self._member.waits_for("")
            self._member.phases.enter(former)
            self.waited_s += time.monotonic() - began
        return given if found is None else torch.frombuffer(bytearray(found), dtype=torch.float64)

    def _request(
        self, name: SyncName, what: str, channel: str, number: int, given: torch.Tensor
    ) -> shard_pb2.CollectRequest:
        if number >= _CALLS:
            raise errors.UserError(f"{what}: the layer is called more than {_CALLS} times in one slice")
        data = given.detach().contiguous().numpy().tobytes()
        return shard_pb2.CollectRequest(
            rank=name.lo,
            size=max(name.of, self._member.session.view.slices_per_step),
            ranks=range(name.of),
            channel=channel,
            number=name.step * _CALLS + number,
            what=what,
            reduction=shard_pb2.REDUCTION_SUM,
            dtype="float64",
            bytes=len(data),
            data=data,
            takes=True,
            # All slices of this step have the sums of the steps before it.
            done=name.step * _CALLS,
        )

    def _sum(self, name: SyncName, shard: int, request: shard_pb2.CollectRequest) -> bytes | None:
        """The sum; None if this worker itself has to compute a slice that is missing."""
        member, links, pace = self._member, self._shards.links, self._paces.pace
        assert isinstance(pace, SyncPace)
        deadline = time.monotonic() + member.wait_timeout_s
        member.waits_for(f"the other slices of step {name.step}")
        while True:
            generation = member.generation
            mine = pace.others(name)
            asked = shard_pb2.CollectRequest(
                mine=sorted(mine), wait_s=min(_PARK_S, max(0.0, deadline - time.monotonic()))
            )
            asked.MergeFrom(request)
            bringing = member.submit(links.rounds.bring(name.step, shard % len(links.channels), asked))
            found = member.wait_unless(bringing, partial(self._moved, generation))
            if isinstance(found, bytes):
                return found
            missing = sorted(found or ())
            if own := [slice_ for slice_ in missing if slice_ in mine]:
                self._put_off(name.step, own[0])
                return None
            if missing:
                self._look(name, request.what, missing, pace, deadline)

    def _moved(self, generation: tuple[int, ...]) -> bool:
        """Whether the slices may have been dealt out anew since then."""
        return self._member.generation != generation

    def _put_off(self, step: int, first: int) -> None:
        """The sum needs slice ``first``, which this worker has to compute. A warning comes if that lasts."""
        self._first = first
        if step == self._put_off_in:
            return
        self._put_off_in, self._steps_put_off = step, self._steps_put_off + 1
        if self._steps_put_off == _STEPS:
            log.warning(
                "this worker has several slices of a step, and SyncBatchNorm needs all of them at once: it computes "
                "them again for each layer, forward and backward, until there are as many workers as slices in a step"
            )

    def _look(self, name: SyncName, what: str, missing: list[int], pace: SyncPace, deadline: float) -> None:
        """Say for whom this worker waits. Raises DeadlineError after ``wait_timeout_s``."""
        slices = f"slice{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of step {name.step}"
        whom = f"{slices} ({', '.join(self._owners(name, missing, pace)) or 'no worker'})"
        self._member.waits_for(whom)
        if time.monotonic() >= deadline:
            raise errors.DeadlineError(
                f"{what}: waited {self._member.wait_timeout_s:g} s for {whom}: look there for an error, or for a layer "
                "that not every slice calls"
            )

    def _owners(self, name: SyncName, missing: list[int], pace: SyncPace) -> list[str]:
        """The names of the workers whose ranges have these slices."""
        workers = self._member.placed()
        shares = [pace.share(name, place, len(workers)) for place in range(len(workers))]
        return [w for w, (lo, hi) in zip(workers, shares, strict=True) if any(lo <= slice_ < hi for slice_ in missing)]
