"""What happens when the job goes back to a checkpoint, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import structlog

from paramserver import errors
from paramserver.core.versions.consistency import Mode
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.wire.messages import schedule_from_proto
from paramserver.worker.engine.cuts import Cuts
from paramserver.worker.engine.joining import Joining
from paramserver.worker.engine.pulls import Pulls

log = structlog.get_logger("paramserver.worker")


class GoingBack(Joining, Pulls, Cuts):
    """Follows the job to where it stands."""

    def follow(self) -> None:
        """The job went back to a checkpoint: wait until it goes on, and go on from there with it."""
        former, self._pace = self.links.timeline, None
        self._early.drop()
        self._forget()
        self._moved = self._look_back = True
        for push in list(self._pushing):
            push.cancel()
        self._paced = self._consistency = None
        self.waiting_for = "the job, which goes back to a checkpoint"
        if self._loads is None:
            log.info("the job goes back to a checkpoint; waiting for it", version=self.version)

        def ready(view: types_pb2.View) -> bool:
            return view.timeline > former and view.state != types_pb2.JOB_STATE_RECOVERING

        try:
            self._run(self.session.wait_until(ready, lambda view: view.reason or "the servers", self._wait_timeout_s))
            self._enter()
        finally:
            self.waiting_for = ""
        log.info("going on", version=self.version, timeline=self.links.timeline)

    def next_epoch(self, epoch: int) -> int:
        """The epoch after ``epoch``, or an earlier one if the job went back meanwhile."""
        if self.rolled_back():
            self.follow()
        if not self._moved:
            return epoch + 1
        self._moved = False
        return self.open_epoch()

    def went_back(self) -> bool:
        """Whether the job went back since this was asked last, or since the last epoch of `next_epoch`."""
        moved, self._moved = self._moved, False
        return moved

    def open_epoch(self) -> int:
        """The epoch in which the job stands."""
        while self.consistency.mode is Mode.ASYNC:
            try:
                return self.wait(self.lease(0, False, 0, (), 0.0)).open_epoch
            except errors.RolledBackError:
                self.follow()
        if self._data is None or self._data.slices_per_epoch == 0:
            return 0
        if self.rolled_back():
            self.follow()
        return schedule_from_proto(self.session.view, self._data.slices_per_epoch).step(self.version).epoch

    def pull_latest(self) -> None:
        """Take in the newest weights that all shards can give."""
        self._following(self._pull_latest)

    def pull_cut(self) -> None:
        """Take in weights in which each contribution counts on all shards or on none; none older than this call.

        Raises DeadlineError if a contribution that some shards have does not come to the others.
        """
        self._following(self._pull_cut)

    def settle(self) -> None:
        """The script is to do something else: see to it that all weights are there, of this version or a newer one."""
        self._following(self._complete)

    def _following(self, work: Callable[[], None]) -> None:
        """Do it, or go on from where the job has gone back to."""
        try:
            work()
        except errors.RolledBackError:
            self.follow()

    def finish(self) -> bool:
        """The script has been through all epochs: True when the result is safe, False if there is more to do."""

        def request() -> coordinator_pb2.FinishRequest:
            return coordinator_pb2.FinishRequest(
                member=self.session.member, timeline=self.links.timeline, version=self.version
            )

        if not (self.rolled_back() or self.session.view.checkpoints):
            return True
        self.state = "finishing"
        try:
            if self._pace is not None:
                self._pace.finish()
            reply = self._run(self.session.ask("Coordinator.Finish", request, self._wait_timeout_s))
        except errors.RolledBackError:
            reply = coordinator_pb2.FinishResponse(rolled_back=True)
        finally:
            self.state = "training"
        if not cast(coordinator_pb2.FinishResponse, reply).rolled_back:
            self.safe = True
            return True
        self.follow()
        self._moved = False
        return False
