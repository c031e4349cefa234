"""Numbers on which all workers agree, for example the loss that lowers the learning rate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import cast

from paramserver import errors
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.wire.messages import OF_RUN
from paramserver.worker.engine.rollback import Rollback
from paramserver.worker.job.member import Member
from paramserver.worker.job.shards import Shards
from paramserver.worker.weights.weights import Weights

# How long the coordinator may park a call.
_CALL_S = 30.0
# How often a worker asks who else has come.
_LOOK_S = 0.2
_BEFORE = (types_pb2.JOB_STATE_WAITING, types_pb2.JOB_STATE_INITIALISING)
# The epoch, and the so many number of that epoch; see `LoadPlace`.
Place = tuple[int, int]


class Agreeing:
    """Asks the coordinator, which knows the first number for each place."""

    def __init__(self, member: Member, shards: Shards, weights: Weights, rollback: Rollback) -> None:
        self._member, self._shards, self._weights, self._rollback = member, shards, weights, rollback
        # The place that this worker waits at, and until when.
        self._awaited = ("", 0.0)

    def agree(self, name: str, place: Place, value: float, version: int = 0) -> float:
        """Give a number for this place of the script; returns the number that all workers have there.

        ``version``: if the job goes back to an earlier version, the number is forgotten; 0: it stays.
        """
        return self.agree_all(name, place, value, version).get(place, value)

    def agree_all(self, name: str, place: Place, value: float, version: int = 0) -> Mapping[Place, float]:
        """As :meth:`agree`; returns all numbers of this name, by place."""
        epoch, count = place
        return self._ask(name, coordinator_pb2.Agreed(epoch=epoch, count=count, value=value, version=version))

    def agree_on_measured(self, name: str, place: Place, value: float, comes_again: bool) -> float:
        """As :meth:`agree`, for a number that was measured with the weights at hand.

        ``comes_again``: the script comes to this place again if the job goes back. If the job has gone back, and the
        script has not come again yet, its number is told to no other worker.
        """
        if self._rollback.aborted:
            self._rollback.say("a number to agree on")
            return value
        return self.agree(name, place, value, self._weights.version if comes_again else 0)

    def so_far(self, name: str, awaited: int) -> Mapping[Place, float]:
        """All numbers of this name, in the order of their places.

        Waits some seconds for one of the epoch ``awaited`` if other workers are about to give it; 0: does not wait.
        """
        return self._ask(name, awaited=awaited)

    def meet(self, name: str, timeout_s: float) -> None:
        """Wait until all workers have come to the place of this name; 0: for as long as calls may wait.

        Raises DeadlineError that says who is missing.
        """
        rank = self._member.session.rank
        came = self.agree_all(self._of_run(name), (1, rank), 1.0)
        while missing := self._missing({rank for _, rank in came}):
            came = self._look(self._of_run(name), "ctx.barrier", missing, timeout_s)

    def once(self, name: str, work: Callable[[], object], timeout_s: float) -> None:
        """Do the work if this worker is the main worker; else wait until that has done it, or is another one.

        Raises DeadlineError that names the main worker.
        """
        name = self._of_run(name)
        while not self.so_far(name, 0):
            view, session = self._member.session.view, self._member.session
            if view.main == session.member:
                work()
                self.agree_all(name, (1, 1), 1.0)
                return
            main = next((one.name for one in view.workers if one.member == view.main), "a main worker")
            self._look(name, "ctx.once", main, timeout_s)

    def _of_run(self, name: str) -> str:
        return f"{OF_RUN}{self._member.session.view.beginning:x} {name}"

    def _look(self, name: str, call: str, whom: str, timeout_s: float) -> Mapping[Place, float]:
        """A moment later, who has come. Raises DeadlineError if the worker has waited for too long in all."""
        member, limit = self._member, timeout_s or self._member.wait_timeout_s
        member.session.check()
        if name != self._awaited[0]:
            self._awaited = name, time.monotonic() + limit
        if time.monotonic() > self._awaited[1]:
            raise errors.DeadlineError(
                f"{call} has waited {limit:g} s for {whom}: all workers have to call it at the same place of the "
                "script; if the work takes longer, give it a longer timeout_s"
            )
        with member.waiting():
            member.waits_for(whom)
            member.run(asyncio.sleep(_LOOK_S))
            member.waits_for("")
        return self.so_far(name, 0)

    def _missing(self, ranks: Collection[int]) -> str:
        """Who has not come, in words: of the workers of the job's start, and later of those that live."""
        view = self._member.session.view
        missing = [worker.name for worker in view.workers if worker.rank not in ranks]
        if not missing and view.state in _BEFORE:
            return view.reason
        return " and ".join(missing)

    def _ask(self, name: str, mine: coordinator_pb2.Agreed | None = None, awaited: int = 0) -> Mapping[Place, float]:
        session = self._member.session

        def request() -> coordinator_pb2.AgreeRequest:
            return coordinator_pb2.AgreeRequest(
                member=session.member, mine=mine, name=name, awaited=awaited, timeline=self._shards.timeline
            )

        reply = cast(
            coordinator_pb2.AgreeResponse, self._member.run(session.ask("Coordinator.Agree", request, _CALL_S))
        )
        return {(one.epoch, one.count): one.value for one in reply.agreed}
