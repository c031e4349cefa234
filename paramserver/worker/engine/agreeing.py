"""Numbers on which all workers agree, for example the loss that lowers the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from paramserver.v1 import coordinator_pb2
from paramserver.worker.engine.rollback import Rollback
from paramserver.worker.job.member import Member
from paramserver.worker.job.shards import Shards
from paramserver.worker.weights.weights import Weights

# How long the coordinator may park a call.
_CALL_S = 30.0
# The epoch, and the so many number of that epoch; see `LoadPlace`.
Place = tuple[int, int]


class Agreeing:
    """Asks the coordinator, which knows the first number for each place."""

    def __init__(self, member: Member, shards: Shards, weights: Weights, rollback: Rollback) -> None:
        self._member, self._shards, self._weights, self._rollback = member, shards, weights, rollback

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
