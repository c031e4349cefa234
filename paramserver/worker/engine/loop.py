"""What a training script has of the cluster: weights in, contributions out. Blocking; the network is elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import cast

import structlog

from paramserver import errors
from paramserver.core.versions.consistency import Mode
from paramserver.core.versions.names import SyncName
from paramserver.failpoints import reach
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.wire.messages import schedule_from_proto
from paramserver.worker.engine.leaving import Leaving
from paramserver.worker.engine.loading import Loading
from paramserver.worker.engine.states import States
from paramserver.worker.flat import PartialSum
from paramserver.worker.pace import AsyncPace, Item, SyncPace, make_pace

# How long the coordinator has to take note of a slice.
_BEGIN_S = 5.0
log = structlog.get_logger("paramserver.worker")


class Engine(States, Loading, Leaving):
    """One worker of a job.

    ``connect`` opens a channel to a server's address, ``coordinator`` is the one to the coordinator; ``background`` is
    the loop in which the network runs.
    Use: :meth:`join`, :meth:`register`, then :meth:`next_item` and :meth:`contribute` in turn, :meth:`close`.
    """

    def next_item(self, epoch: int, last: bool, stay: bool = False) -> Item | None:
        """The slice to compute now; None if there is none left up to ``epoch``. Waits as long as the mode demands.

        ``last``: what others hold of these epochs is waited for, too. ``stay``: if the job goes back to an earlier
        epoch, its slices come at once; else None comes, since the script is to begin that epoch.
        """
        if self.whole:
            self._following(self.before_next)
        while True:
            if self._look_back:  # an earlier epoch is the script's to begin, with that epoch's learning rate
                self._look_back = False
                if not stay and self.open_epoch() < epoch:
                    return None
            try:
                item = self._present_pace().next(epoch, last)
                self._begun_at = time.monotonic()
            except errors.RolledBackError:
                self.follow()
                continue
            if item is not None or not self.mode_changed():
                return item

    def may_compute(self, item: Item) -> bool:
        """Whether the script may have this slice; False: it kills whoever computes it, and counts without samples.

        After another worker has died, the coordinator hears of the slice before the script does.
        """
        view = self.session.view
        ref = types_pb2.SliceRef(epoch=item.epoch, index=item.index)
        if isinstance(item.name, SyncName):
            ref.step = item.name.step
        self.computing = ref
        if self.poisoned(item):
            return False
        if not view.careful:
            return True
        request = coordinator_pb2.BeginRequest(member=self.session.member, slice=ref)
        try:
            reply = self._run(self.session.channel.call("Coordinator.Begin", request, timeout=_BEGIN_S))
        except errors.ParamServerError as error:
            log.info("the coordinator does not hear which slice is computed", reason=str(error))
            return True
        return not cast(coordinator_pb2.BeginResponse, reply).skip

    def poisoned(self, item: Item) -> bool:
        """Whether it is known that this slice kills whoever computes it."""
        return any((ref.epoch, ref.index) == (item.epoch, item.index) for ref in self.session.view.poisoned)

    def ahead(self, epoch: int) -> Iterator[Item]:
        """The slices that are likely to come, beginning with the one that :meth:`next_item` has given."""
        assert self._pace is not None, "an item comes before those ahead of it"
        return self._ahead(self._pace, epoch)

    def coming(self) -> Item | None:
        """Without a data set: the slice that this worker will compute next, if that is known without waiting."""
        if self._pace is None or self.rolled_back() or self.mode_changed():
            return None
        self._begun_at = time.monotonic()
        try:
            return next(self._pace.ahead(0), None)
        except errors.RolledBackError:
            return None

    def still(self, item: Item) -> bool:
        """Whether a slice that :meth:`coming` has told can be handed in now, without :meth:`next_item`."""
        return (
            self._pace is not None and not self.rolled_back() and not self.mode_changed() and self._pace.expects(item)
        )

    def contribute(self, item: Item, partial: PartialSum, groups: Sequence[types_pb2.GroupHypers]) -> bool:
        """Hand in what a slice yielded; returns with the next version, or with more work on this one.

        Without a data set the name of a slice does not say what it yields: False then means that another worker's
        contribution of this name counts instead of this one.
        """
        reach("worker.after_grad", self.version)
        partial.settle()
        self.stalled_s = 0.0
        try:
            right = self._settle(frozenset(partial.used))
            # Weights may have been waited for since before the slice began.
            self._slice_times.append(max(0.0, time.monotonic() - self._begun_at - self.stalled_s))
            if not right:
                self.discard(partial)
                self._refresh()
                return True
            self.before_next()
        except errors.RolledBackError:
            return self._follow()
        self.computing = None
        self.slices += 1
        self.samples += partial.samples
        assert self._pace is not None, "an item comes before its contribution"
        try:
            return self._pace.contribute(item, partial, groups)
        except errors.RolledBackError:
            return self._follow()

    def _follow(self) -> bool:
        """Follow the job back while a contribution is handed in; raises RolledBackError if nobody brings that again."""
        self.follow()
        if self.named_by_data:  # somebody computes it again
            return True
        raise errors.RolledBackError(
            f"a server was lost, and the job went back to version {self.version}: push again what was pushed since then"
        )

    def _refresh(self) -> None:
        """What the present slice was computed with is of no version: have one, and the slice once more."""
        if isinstance(self._pace, AsyncPace):
            self._pace.refresh()
        else:
            self._pull_latest()

    def _ahead(self, pace: SyncPace | AsyncPace, epoch: int) -> Iterator[Item]:
        """Ends with the pace: one of before the job went back must not lease, nor say what it has done."""
        items = pace.ahead(epoch)
        while self._pace is pace and (item := next(items, None)) is not None:
            yield item

    def _present_pace(self) -> SyncPace | AsyncPace:
        self.ensure_data()
        assert self._data is not None
        if self.rolled_back():
            raise errors.RolledBackError("the job goes back to a checkpoint")
        if self._pace is None or self.mode_changed():
            if self._pace is not None:
                self._pace.finish()
                log.info("mode", now=str(self.consistency), version=self.version)
            schedule = schedule_from_proto(self.session.view, self._data.slices_per_epoch)
            if self.consistency.mode is Mode.SYNC and schedule.base_version > self.version:
                self._install(self._watch(self.background.submit(self.links.pulls.pull_version(schedule.base_version))))
            self._paced = self.consistency
            self.outgoing.reset()
            self._pace = make_pace(self, self._paced, schedule)
        return self._pace
