"""Idle workers: they have nothing to compute, since a synchronous step has fewer slices than there are workers."""

from __future__ import annotations

from typing import Protocol

import structlog

from paramserver.coordinator import ports
from paramserver.coordinator.watching.ending import Ending
from paramserver.coordinator.watching.main import Main
from paramserver.coordinator.watching.stalls import Stalls
from paramserver.coordinator.work.schedule import Schedule
from paramserver.core.job.life import Phase
from paramserver.core.job.membership import Member, Role
from paramserver.core.versions.consistency import Mode
from paramserver.core.work.slices import without_slices

log = structlog.get_logger("paramserver.coordinator")

_SHOWN = 4


class _Job(ports.Stage, Protocol):
    ending: Ending
    stalls: Stalls
    schedule: Schedule
    main: Main


class Idle:
    """The workers that have no slices in any step; a change is logged."""

    def __init__(self, job: _Job) -> None:
        # Workers that were idle at some time of this job, by name.
        self.ever: set[str] = set()
        self._job = job
        self._said = ""

    def members(self) -> list[Member]:
        """The workers without slices, in the order of their places.

        Empty in asynchronous mode, where each worker that asks gets slices. Empty, too, as soon as a worker has been
        through all epochs: then workers leave one by one.
        """
        job = self._job
        if job.life.phase is not Phase.RUNNING or job.consistency.mode is not Mode.SYNC or job.ending.finished:
            return []
        at_work = [one for one in job.main.places() if one.ident not in job.stalls.members]
        return [at_work[place] for place in without_slices(self._slices(), len(at_work))]

    def sentence(self) -> str:
        """Which workers are idle, why, and what to do about it, in words; empty if no worker is idle."""
        idle = self.members()
        if not idle:
            return ""
        slices, workers = self._slices(), len(self._job.members.of(Role.WORKER))
        names = ", ".join(one.name for one in idle[:_SHOWN]) + (", ..." if len(idle) > _SHOWN else "")
        return (
            f"a step has {slices} slices and there are {workers} workers, so {names} "
            f"{'has' if len(idle) == 1 else 'have'} none to compute: scale to workers={slices}, or begin the next job "
            f"with training.slices_per_step = {workers}"
        )

    def look(self) -> None:
        """Log the sentence if it has changed."""
        sentence = self.sentence()
        if sentence and sentence != self._said:
            log.warning(sentence)
        self._said = sentence
        self.ever.update(one.name for one in self.members())

    def _slices(self) -> int:
        """How many slices a full step has."""
        per_step = self._job.options.step_slices
        data = self._job.schedule.data
        return min(per_step, data.slices_per_epoch // data.turns) if data and data.slice_size else per_step
