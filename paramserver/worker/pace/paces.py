"""The pace of the mode in force."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from paramserver.core.versions.consistency import Mode
from paramserver.core.versions.events import AtLeast
from paramserver.core.versions.names import AsyncName
from paramserver.worker.gradients.sender import Sender
from paramserver.worker.job.audited import Audited
from paramserver.worker.job.member import Member
from paramserver.worker.job.modes import Modes
from paramserver.worker.job.shards import Shards
from paramserver.worker.job.slices import Slices
from paramserver.worker.links.pulls import Pull
from paramserver.worker.pace.asynchronous import AsyncPace
from paramserver.worker.pace.sync import SyncPace
from paramserver.worker.weights.weights import Weights

log = structlog.get_logger("paramserver.worker")

Pace = SyncPace | AsyncPace


class Paces:
    """Makes a pace when there is none, or none of the mode in force. Belongs to the script's thread.

    ``pace``: None before the first slice, and after the job went back.
    """

    def __init__(
        self,
        member: Member,
        modes: Modes,
        shards: Shards,
        slices: Slices,
        weights: Weights,
        sender: Sender,
        audited: Audited,
    ) -> None:
        self._audited = audited
        self._member, self._modes, self._shards = member, modes, shards
        self._slices, self._weights, self._sender = slices, weights, sender
        self.pace: Pace | None = None

    def present(self) -> Pace:
        """The pace of the mode in force. Raises RolledBackError if the job goes back."""
        self._slices.ensure()
        self._member.check_timeline()
        if self.pace is None or self._modes.changed():
            self.finish()
            if self.pace is not None:
                log.info("mode", now=str(self._modes.present), version=self._weights.version)
            self.pace = self._make()
        return self.pace

    def _make(self) -> Pace:
        member, modes, shards, slices, weights = self._member, self._modes, self._shards, self._slices, self._weights
        schedule = slices.schedule()
        if modes.together and schedule.base_version > weights.version:
            weights.install(member.do(shards.links.pulls.ask(Pull(AtLeast(schedule.base_version)))))
        mode = modes.present
        modes.paced(mode)
        self._sender.outgoing.reset()
        if mode.mode is Mode.ASYNC:
            return AsyncPace(member, modes, shards, slices, weights, self._sender)
        return SyncPace(member, modes, shards, slices, weights, self._sender, schedule, self._audited)

    @property
    def holding(self) -> Sequence[AsyncName]:
        """The slices that are leased and not handed in."""
        return self.pace.holding if isinstance(self.pace, AsyncPace) else ()

    @property
    def clock(self) -> int | None:
        """Asynchronous mode: how many slices this worker has finished, counted from where it joined."""
        return self.pace.clock if isinstance(self.pace, AsyncPace) else None

    def clock_to_tell(self, version: int) -> int | None:
        """The clock that the coordinator is told. Synchronous mode: ``version``. None: the clock is not known yet."""
        if isinstance(self.pace, AsyncPace):
            return self.pace.clock if self.pace.joined else None
        return version if self.pace is not None else None

    @property
    def unsent(self) -> int:
        """How many slices were handed in and are not sent."""
        return self.pace.unsent if isinstance(self.pace, SyncPace) else 0

    def refresh(self) -> None:
        """The present slice was computed with weights of no single version: get weights of one version."""
        if isinstance(self.pace, AsyncPace):
            self.pace.refresh()
        else:
            self._weights.pull_latest()

    def finish(self) -> None:
        """Wait until everything that was handed in has arrived."""
        if self.pace is not None:
            self.pace.finish()

    def drop(self) -> None:
        """The job goes back, so all that the pace knows is out of date."""
        self.pace = None

    def hand_back(self) -> None:
        """Give up the pace: all that was handed in arrives, leases are given back, and this worker delays no other."""
        if self.pace is None:
            return
        self.pace.finish()
        if isinstance(self.pace, AsyncPace):
            self._member.wait(self._slices.lease())
            self._slices.idle()
        self.pace = None
        self._modes.paced(None)
