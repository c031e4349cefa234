"""The values that scripts log, as the coordinator collects them from the reports of workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from paramserver.core.job.membership import Member, Membership, Role
from paramserver.core.records.history import History
from paramserver.core.records.steps import NAMES, NAMES_OF_ONE, VALUES, Collector, Logged, Place, StepValues
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.v1 import coordinator_pb2

log = structlog.get_logger("paramserver.coordinator")


class _Job(Protocol):
    members: Membership

    @property
    def consistency(self) -> Consistency: ...


class Sink(Protocol):
    """Where closed steps are written; `records.writing.Writing` does it."""

    def write(self, steps: Sequence[StepValues]) -> None:
        """These steps were closed now. Does not block."""

    def settle(self) -> None:
        """Return when the steps up to now are written, as far as that is promised. Blocks."""


class _Nowhere:
    """Writes nothing."""

    def write(self, steps: Sequence[StepValues]) -> None:
        pass

    def settle(self) -> None:
        pass


class Records:
    """``history``: the curves in memory, for pages. ``sink``: where closed steps are written."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._collector = Collector()
        self.history = History()
        self.sink: Sink = _Nowhere()
        # See :meth:`tell`.
        self._told: Callable[[Sequence[StepValues]], None] = lambda steps: None
        # Where each worker stands, by member number: it logs nothing for earlier steps any more.
        self._places: dict[int, Place] = {}
        self._said = False

    def tell(self, told: Callable[[Sequence[StepValues]], None]) -> None:
        """Call ``told`` with the steps that are closed from now on."""
        self._told = told

    def go_on(self, history: History, steps: Sequence[StepValues]) -> None:
        """Earlier coordinators have written ``history``. ``steps``: the last of them that were closed in this job.

        There are none if the job goes on from a checkpoint of the job that has written them.
        """
        self._collector.go_on(steps)
        history.join(self.history)
        self.history = history

    def hear(self, member: Member, report: coordinator_pb2.WorkerReport) -> None:
        """A worker reports, with all that its script has logged since the last report."""
        if member.role is not Role.WORKER:
            return
        self._places[member.ident] = (report.logging_timeline, report.logging_step)
        if not report.logged:
            return
        calls = [
            Logged(
                call.step,
                call.timeline,
                call.values,
                (call.slice.epoch, call.slice.index) if call.HasField("slice") else None,
                call.samples,
            )
            for call in report.logged
        ]
        late_counts = self._job.consistency.mode is Mode.ASYNC
        self._collector.hear(member.incarnation, member.name, report.logged_from, calls, time.monotonic(), late_counts)
        if self._collector.refused and not self._said:
            self._said = True
            log.warning(
                f"scripts log more than is kept ({NAMES_OF_ONE} names of a worker, {NAMES} of the job, {VALUES} values "
                f"of steps under way): values of {self._collector.refused[:100]!r} are left out, and more may be",
                worker=member.name,
            )

    def finish(self) -> None:
        """Nothing more is logged: close all steps."""
        self._places.clear()
        self._close_steps()

    async def settle(self) -> None:
        """There is no worker: close all steps, and wait until they are written."""
        self.finish()
        await asyncio.to_thread(self.sink.settle)

    def look(self) -> None:
        """Close the steps to which no worker can add; called several times a second."""
        present = [member.ident for member in self._job.members.of(Role.WORKER)]
        self._places = {ident: self._places.get(ident, (0, 0)) for ident in present}
        self._close_steps()

    def _close_steps(self) -> None:
        if steps := self._collector.close(self._places.values(), time.monotonic()):
            now = time.time()
            for step in steps:
                self.history.add(step, now)
            self.sink.write(steps)
            self._told(steps)
