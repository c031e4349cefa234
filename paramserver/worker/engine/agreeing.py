"""Numbers on which all workers agree, for example the loss that lowers the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from paramserver.v1 import coordinator_pb2
from paramserver.worker.job.member import Member

# How long the coordinator may park a call.
_CALL_S = 30.0
# The epoch, and the so many number of that epoch; see `LoadPlace`.
Place = tuple[int, int]


class Agreeing:
    """Asks the coordinator, which knows the first number for each place."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def agree(self, name: str, place: Place, value: float) -> float:
        """Give a number for this place of the script; returns the number that all workers have there."""
        epoch, count = place
        return self._ask(name, coordinator_pb2.Agreed(epoch=epoch, count=count, value=value))[place]

    def so_far(self, name: str, awaited: int) -> Mapping[Place, float]:
        """All numbers of this name, in the order of their places.

        Waits some seconds for one of the epoch ``awaited`` if other workers are about to give it; 0: does not wait.
        """
        return self._ask(name, awaited=awaited)

    def _ask(self, name: str, mine: coordinator_pb2.Agreed | None = None, awaited: int = 0) -> Mapping[Place, float]:
        session = self._member.session

        def request() -> coordinator_pb2.AgreeRequest:
            return coordinator_pb2.AgreeRequest(member=session.member, mine=mine, name=name, awaited=awaited)

        reply = cast(
            coordinator_pb2.AgreeResponse, self._member.run(session.ask("Coordinator.Agree", request, _CALL_S))
        )
        return {(one.epoch, one.count): one.value for one in reply.agreed}
