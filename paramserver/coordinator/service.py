"""The coordinator behind its RPCs: the job, and the services that answer calls.

No tensor passes through it. In synchronous mode a step in the steady state needs no call to it.
"""

from __future__ import annotations

from google.protobuf.message import Message

from paramserver.coordinator.job import Job
from paramserver.coordinator.leadership.cluster import Connect
from paramserver.coordinator.leadership.journal import Journal
from paramserver.coordinator.options import JobOptions
from paramserver.coordinator.rpc.operators import Operators
from paramserver.coordinator.rpc.sessions import Sessions
from paramserver.coordinator.rpc.training import Training
from paramserver.transport.base import Method
from paramserver.transport.security.members import judge


class CoordinatorService:
    """Answers the calls to one job. Each method has the name of the RPC that it answers.

    :meth:`start` and :meth:`close` bracket the background work.
    """

    def __init__(self, options: JobOptions, connect: Connect, journal: Journal) -> None:
        self.job = job = Job(options, connect, journal)
        self._sessions = sessions = Sessions(job)
        training = Training(job)
        self._operators = operators = Operators(job)
        shown = job.tracing.shown
        self.join, self.session = shown(sessions.join), sessions.session
        # Workers.
        self.register_model, self.register_data = shown(training.register_model), shown(training.register_data)
        self.initialize_done, self.lease = shown(training.initialize_done), shown(training.lease)
        self.begin, self.load, self.agree = shown(training.begin), shown(training.load), training.agree
        self.evaluate = training.evaluate
        self.keep, self.kept = training.keep, training.kept
        self.finish, self.snapshot = shown(training.finish), shown(training.snapshot)
        # Operators.
        self.status, self.settings, self.probe = operators.status, operators.settings, operators.probe
        self.set_consistency, self.ledger = shown(operators.set_consistency), operators.ledger
        self.drain, self.scale = shown(operators.drain), shown(operators.scale)
        self.stop = operators.stop
        self.trace, self.hand_in = job.tracing.trace, job.tracing.hand_in
        self.checkpoint = shown(operators.checkpoint)

    def judge(self, method: Method, message: Message) -> None:
        """Raise an error if the caller of the present call may not say this; see `transport.security.members`."""
        judge(method, message, self.job.roll)

    async def start(self) -> None:
        """Begin to watch leases."""
        await self._sessions.start()
        self._operators.go_on()

    async def close(self) -> None:
        """End all sessions, stop watching, close channels, write the last state."""
        await self._sessions.close()
        await self.job.close()
