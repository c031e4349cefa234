"""The training loop of a script, as the engine sees it: slices to compute and their contributions. Blocking."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import structlog

from paramserver import errors
from paramserver.core.versions.names import SyncName
from paramserver.failpoints import reach
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.worker.engine.rollback import Rollback
from paramserver.worker.engine.summing import Summing
from paramserver.worker.flat import PartialSum
from paramserver.worker.gradients.leaving import Leaving
from paramserver.worker.gradients.sender import Sender
from paramserver.worker.job.member import Member
from paramserver.worker.job.modes import Modes
from paramserver.worker.job.phases import COMPUTE, OTHER, SEND, WAIT
from paramserver.worker.job.progress import Progress
from paramserver.worker.job.shards import Shards
from paramserver.worker.job.slices import Slices
from paramserver.worker.pace import Item, Pace, Paces
from paramserver.worker.weights.weights import Weights

# How long the coordinator has to take note of a slice.
_BEGIN_S = 5.0
log = structlog.get_logger("paramserver.worker")


class Loop:
    """Use: :meth:`next_item` and :meth:`contribute` in turn, and :meth:`finish` after the last epoch."""

    def __init__(
        self,
        member: Member,
        modes: Modes,
        shards: Shards,
        slices: Slices,
        progress: Progress,
        weights: Weights,
        sender: Sender,
        paces: Paces,
        rollback: Rollback,
        summing: Summing,
    ) -> None:
        self._member, self._modes, self._shards, self._slices = member, modes, shards, slices
        self._progress, self._weights, self._sender = progress, weights, sender
        self._paces, self._rollback, self._summing = paces, rollback, summing
        self._phases = member.phases
        # Timeline and version that the servers have copied at the end of the script's epoch; None: none.
        self.saved: tuple[int, int] | None = None

    # ---- which slice

    def next_item(self, epoch: int, last: bool, stay: bool = False) -> Item | None:
        """The slice to compute now; None if there is none left up to ``epoch``. Waits as long as the mode demands.

        ``last``: wait for slices that other workers hold, too. ``stay``: if the job goes back to an earlier epoch, its
        slices come at once; else None comes, since the script is to begin that epoch.
        """
        if self._weights.whole:
            self._rollback.following(self._weights.watch.check)
        former = self._phases.enter(WAIT)
        try:
            return self._next_item(epoch, last, stay)
        finally:
            self._phases.enter(former)

    def _next_item(self, epoch: int, last: bool, stay: bool) -> Item | None:
        while True:
            # An earlier epoch is the script's to begin, with that epoch's learning rate.
            if self._rollback.looks_back() and not stay and self._rollback.open_epoch() < epoch:
                return None
            try:
                item = self._paces.present().next(epoch, last)
                self._progress.begun()
            except errors.RolledBackError:
                self._rollback.follow()
                continue
            if item is not None:
                self._phases.begins(item.name)
            if item is not None or not self._modes.changed():
                return item

    def may_compute(self, item: Item) -> bool:
        """Whether the script may have this slice; False: the slice kills its workers, and counts without samples.

        After another worker has died, the coordinator hears of the slice before the script does.
        """
        if self.poisoned(item):
            return False
        ref = types_pb2.SliceRef(epoch=item.epoch, index=item.index)
        if isinstance(item.name, SyncName):
            ref.step = item.name.step
        if self._member.session.view.careful and not self._may_begin(ref):
            return False
        # A worker reports the slice after the permission: two workers that wait for it must not wait for each other.
        self._progress.computes(ref)
        return True

    def _may_begin(self, slice_: types_pb2.SliceRef) -> bool:
        """The coordinator's permission, which may take a while; granted if the coordinator does not answer."""
        session = self._member.session
        request = coordinator_pb2.BeginRequest(member=session.member, slice=slice_)
        try:
            reply = self._member.run(session.channel.call("Coordinator.Begin", request, timeout=_BEGIN_S))
        except errors.ParamServerError as error:
            log.info("the coordinator does not hear which slice is computed", reason=str(error))
            return True
        return not cast(coordinator_pb2.BeginResponse, reply).skip

    def poisoned(self, item: Item) -> bool:
        """Whether it is known that this slice kills the workers that compute it."""
        poisoned = self._member.session.view.poisoned
        return any((ref.epoch, ref.index) == (item.epoch, item.index) for ref in poisoned)

    def ahead(self, epoch: int) -> Iterator[Item]:
        """The slices that are likely to come, beginning with the one that :meth:`next_item` has given.

        Ends when the job goes back: the former pace must lease no more, nor report what it has done.
        """
        pace = self._paces.pace
        items = pace.ahead(epoch) if pace is not None else iter(())
        while self._paces.pace is pace and (item := next(items, None)) is not None:
            yield item

    def coming(self) -> Item | None:
        """Without a data set: the slice that this worker will compute next, if that is known without waiting."""
        pace = self._unchanged_pace()
        if pace is None:
            return None
        self._progress.begun()
        try:
            return next(pace.ahead(0), None)
        except errors.RolledBackError:
            return None

    def still(self, item: Item) -> bool:
        """Whether a slice that :meth:`coming` has told can be handed in now, without :meth:`next_item`."""
        pace = self._unchanged_pace()
        return pace is not None and pace.expects(item)

    def _unchanged_pace(self) -> Pace | None:
        return None if self._member.rolled_back() or self._modes.changed() else self._paces.pace

    # ---- contributions

    def begin_early(
        self, item: Item, samples: int, groups: Callable[[], Sequence[types_pb2.GroupHypers]]
    ) -> tuple[PartialSum, Leaving] | None:
        """Begin to push the contribution of ``item`` while it is computed; None where that is not possible.

        Returns the partial sum to fill, which :meth:`contribute` must get, and the object to tell of each tensor in it.
        """
        pace = self._paces.pace
        alone = pace is not None and pace.alone(item)
        return self._sender.begin_early(item.name, alone, self._paces.clock or 0, samples, groups)

    def contribute(
        self, item: Item, partial: PartialSum, groups: Sequence[types_pb2.GroupHypers], again: bool = False
    ) -> bool:
        """Hand in the contribution of a slice; returns with the next version, or with more work on this version.

        ``again``: the contribution does not count, and the slice comes again. Returns False without a data set only:
        another worker's contribution of the same name counts instead.
        """
        loader = self._slices.named_by_data
        reach("worker.after_grad", self._weights.version)
        if not loader:  # a slice that `coming` has told
            self._phases.begins(item.name)
        try:
            return self._contribute(item, partial, groups, again)
        finally:
            # Without a loader nobody can tell where the script's next batch begins.
            self._phases.enter(OTHER if loader else COMPUTE)

    def _contribute(
        self, item: Item, partial: PartialSum, groups: Sequence[types_pb2.GroupHypers], again: bool
    ) -> bool:
        partial.settle()
        try:
            right = self._weights.settle_slice(frozenset(partial.used), self._summing.waited_s)
            self._progress.computed(self._weights.stalled_s)
            summed = self._summing.settle()
            if not right or not summed or again:  # the slice is computed once more, on weights of one version
                self._sender.discard(partial)
                if not right:
                    self._paces.refresh()
                return True
            self._weights.watch.check()
        except errors.RolledBackError:
            return self._follow(item)
        self._progress.hands_in(partial.samples)
        if isinstance(item.name, SyncName):
            self._phases.hands_in(item.name.step, asynchronous=False)
        else:
            self._phases.hands_in(self._paces.clock or 0, asynchronous=True)
        self._phases.enter(SEND)
        pace = self._paces.pace
        assert pace is not None, "an item comes before its contribution"
        try:
            return pace.contribute(item, partial, groups)
        except errors.RolledBackError:
            return self._follow(item)

    def _follow(self, item: Item) -> bool:
        """Follow the job back during a contribution; raises RolledBackError if no worker brings it again."""
        self._rollback.follow()
        if self._slices.named_by_data:  # a worker computes the slice again
            return True
        if isinstance(item.name, SyncName) and self._rollback.carries(item.name.step):
            return True
        raise errors.RolledBackError(
            f"a server was lost, and the job went back to version {self._weights.version}: "
            "push again what was pushed since then"
        )

    # ---- the ends of epochs

    def end_of_epoch(self, epoch: int) -> None:
        """The script is at the end of an epoch: have the servers copy its version, before any worker goes on.

        :attr:`saved` is then its timeline and version. In asynchronous mode the worker takes in newer weights.
        """
        member, timeline = self._member, self._shards.links.timeline

        def request() -> coordinator_pb2.FinishRequest:
            return coordinator_pb2.FinishRequest(
                member=member.session.member, timeline=timeline, version=self._weights.version, epoch=epoch + 1
            )

        reply = member.run(member.session.ask("Coordinator.Finish", request, member.wait_timeout_s))
        version = cast(coordinator_pb2.FinishResponse, reply).version
        self.saved = (timeline, version) if version else None
        if version and not self._modes.together:
            self._rollback.following(self._weights.pull_latest)

    def goes_on(self) -> None:
        """The script is given a batch: what it logs does not belong to the end of an epoch any more."""
        self.saved = None
        self._rollback.goes_on()

    # ---- the end

    def finish(self) -> bool:
        """The script has been through all epochs: True when the result is safe, False if there is more to do."""
        member = self._member

        def request() -> coordinator_pb2.FinishRequest:
            return coordinator_pb2.FinishRequest(
                member=member.session.member,
                timeline=self._shards.links.timeline,
                version=self._weights.version,
            )

        if not (member.rolled_back() or member.session.view.checkpoints):
            return True
        self._progress.enter("finishing")
        try:
            self._paces.finish()
            reply = member.run(member.session.ask("Coordinator.Finish", request, member.wait_timeout_s))
        except errors.RolledBackError:
            reply = coordinator_pb2.FinishResponse(rolled_back=True)
        finally:
            self._progress.enter("training")
        if not cast(coordinator_pb2.FinishResponse, reply).rolled_back:
            self._progress.is_safe()
            return True
        self._rollback.follow()
        self._rollback.went_back()
        return False
