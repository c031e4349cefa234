"""Follows the job when it goes back to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from paramserver import errors
from paramserver.v1 import types_pb2
from paramserver.worker.engine.entry import Entry
from paramserver.worker.gradients.sender import Sender
from paramserver.worker.job.member import Member
from paramserver.worker.job.modes import Modes
from paramserver.worker.job.shards import Shards
from paramserver.worker.job.slices import Slices
from paramserver.worker.pace import Paces
from paramserver.worker.startup import Offer
from paramserver.worker.weights.weights import Weights

log = structlog.get_logger("paramserver.worker")


class Rollback:
    """Follows the job to where it stands, and knows the epoch there."""

    def __init__(
        self,
        member: Member,
        modes: Modes,
        shards: Shards,
        slices: Slices,
        weights: Weights,
        sender: Sender,
        entry: Entry,
        paces: Paces,
    ) -> None:
        self._member, self._modes, self._shards, self._slices = member, modes, shards, slices
        self._weights, self._sender, self._entry, self._paces = weights, sender, entry, paces
        # The last move to another timeline has undone nothing: the number of servers has changed.
        self._carried = False
        # While the script is in ``ctx.load``: the weights and state that it brings.
        self._loads: Offer | None = None
        # The job went back: since the script's epoch began; since the script was given its last slice.
        self._moved = self._look_back = False
        # How often the job went back in a way that has undone something.
        self.undone = 0
        # It did so since the script has begun an epoch or was given a batch: what the script computes now is of the
        # weights to which the job went back, and the body in which the script is comes again, or counts for nothing.
        self.aborted = False
        self._said = 0

    def follow(self) -> None:
        """The job went back to a checkpoint: wait until it goes on, and go on from there with it."""
        member, former = self._member, self._shards.links.timeline
        before, stood = (self._moved, self._look_back), self._weights.version
        self._paces.drop()
        self._sender.drop_early()
        self._weights.forget()
        self._moved = self._look_back = True
        self._sender.cancel()
        self._modes.forget()
        member.phases.begins_anew()
        member.waits_for("the servers, which begin anew")
        if self._loads is None:
            log.info("the servers begin anew; waiting for them", version=self._weights.version)

        def ready(view: types_pb2.View) -> bool:
            return view.timeline > former and view.state != types_pb2.JOB_STATE_RECOVERING

        try:
            session, timeout_s = member.session, member.wait_timeout_s
            member.run(session.wait_until(ready, lambda view: view.reason or "the servers", timeout_s))
            self._entry.enter(self._loads)
        finally:
            member.waits_for("")
        view = member.session.view
        self._carried = view.HasField("carried_from") and view.carried_from == former
        if self._carried:
            self.undo(before)
        elif self._loads is None or self._weights.version < stood:
            self.undone += 1
            self.aborted = True
        log.info("going on", version=self._weights.version, timeline=self._shards.links.timeline)

    def carries(self, step: int) -> bool:
        """After :meth:`follow`: whether a contribution to this step counts, since nothing was undone."""
        return self._carried and step < self._weights.version

    def following(self, work: Callable[[], None]) -> None:
        """Call ``work``; if the job goes back meanwhile, follow it instead."""
        try:
            work()
        except errors.RolledBackError:
            self.follow()

    # ---- the script's place in the data

    @property
    def behind(self) -> bool:
        """Whether the job went back, and this worker still has weights of the history that was undone."""
        view, mine = self._member.session.view, self._shards.links.timeline if self._shards.met is not None else -1
        return 0 <= mine < view.timeline and not (view.HasField("carried_from") and view.carried_from == mine)

    def goes_on(self) -> None:
        """The script begins an epoch, or is given a batch: from now on it computes what counts."""
        self.aborted = False

    def say(self, what: str) -> None:
        """Say once that ``what`` the script does now belongs to no history of the job."""
        if self._said != self.undone:
            self._said = self.undone
            log.warning(
                f"the job went back to a checkpoint in the middle of what the script does: {what} is of version "
                f"{self._weights.version}, and counts for no epoch; ctx.went_back is true until the next batch"
            )

    def ended_too_early(self) -> errors.JobFailedError | None:
        """The script ends here: what that means for what was undone, and not trained again; None: nothing."""
        if not self.aborted:
            return None
        return errors.JobFailedError(
            f"the script has ended right after the job went back to version {self._weights.version}: what it had "
            "trained after that version is undone, and this worker has not trained it again. Leave the loop only where "
            "ctx.went_back is false; start the job again, with --resume if it has a checkpoint directory"
        )

    def open_epoch(self) -> int:
        """The epoch in which the job stands."""
        while not self._modes.together:
            try:
                return self._member.wait(self._slices.lease(holding=self._paces.holding)).open_epoch
            except errors.RolledBackError:
                self.follow()
        if not self._slices.counted:
            return 0
        if self._member.rolled_back():
            self.follow()
        schedule = self._slices.schedule()
        # The job may have become synchronous since these weights came, at a later version.
        return schedule.step(max(self._weights.version, schedule.base_version)).epoch

    def next_epoch(self, epoch: int) -> int:
        """The epoch after ``epoch``, or an earlier one if the job went back meanwhile."""
        if self._member.rolled_back():
            self.follow()
        return self.open_epoch() if self.went_back() else epoch + 1

    def went_back(self) -> bool:
        """Whether the job went back since the last call of this method or of `next_epoch`."""
        moved, self._moved = self._moved, False
        return moved

    def looks_back(self) -> bool:
        """Whether the job went back since the last call, so that the script may have to begin an earlier epoch."""
        back, self._look_back = self._look_back, False
        return back

    # ---- ctx.load, after which the job goes on with other weights, too

    def begin_load(self, offer: Offer) -> tuple[bool, bool]:
        """From now on, :meth:`follow` offers these weights and state. Returns the argument of :meth:`undo`."""
        self._loads = offer
        return self._moved, self._look_back

    def end_load(self) -> None:
        """Nothing is offered any more."""
        self._loads = None

    def undo(self, before: tuple[bool, bool]) -> None:
        """The load did not move the job in its data: restore the facts that :meth:`begin_load` returned."""
        self._moved, self._look_back = before
