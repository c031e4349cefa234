"""The main worker of a job, and the order in which slices are dealt out, in which it always has some."""

from __future__ import annotations

from paramserver.coordinator import ports
from paramserver.core.job.life import BEFORE
from paramserver.core.job.main_worker import Candidate, MainWorker, at_work
from paramserver.core.job.membership import Member
from paramserver.v1 import coordinator_pb2


class Main:
    """Tells `MainWorker` of the members. Members hear of the main worker with the view."""

    def __init__(self, job: ports.Stage) -> None:
        self._job = job
        self._core = MainWorker()
        # Whether all workers with which the job begins were there.
        self._begun = False

    @property
    def member(self) -> int:
        """The member number of the main worker; 0: nobody yet."""
        return self._core.member

    def look(self) -> None:
        """Members may have changed, or the job may have begun."""
        workers = self._job.members.by_place()
        self._begun = self._begun or len(workers) >= self._job.options.workers
        candidates = [Candidate(one.ident, one.index) for one in workers]
        self._core.look(candidates, self._job.options.step_slices, not self._begun)

    def leaving(self, request: coordinator_pb2.SessionRequest) -> None:
        """A worker says goodbye, before it is a member no more. One that leaves before there are weights hands on."""
        if (request.finished or request.ended) and self._job.life.phase not in BEFORE:
            self._core.leaves(request.member, request.not_main)

    def undone(self) -> None:
        """Steps are trained again that had been trained before."""
        self._core.undone()
        self.look()

    def restore(self, record: coordinator_pb2.JobRecord) -> None:
        """Go on from the record of an earlier coordinator."""
        self._core.restore(record.view.main, [one.member for one in record.members])
        self._begun = record.ready

    def places(self) -> list[Member]:
        """The workers in the order in which slices are dealt out. It changes with the generation only."""
        by_number = {worker.ident: worker for worker in self._job.members.by_place()}
        return [by_number[ident] for ident in at_work(list(by_number), self.member, self._job.options.step_slices)]
