"""The number of servers changes while a job trains: `resize` asks for it while the workers are held."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from paramserver.v1 import coordinator_pb2
from paramserver.worker.context import Context
from tests.support.cluster.harness import until, wait
from tests.support.failover.held import Held
from tests.support.failover.rollback import Rig

_WAIT_S = 20.0


class Between(Held):
    """Also holds all workers as soon as a change is in force after which another one is wished for."""

    def __init__(self, wishes: int) -> None:
        super().__init__()
        self.rig: Rig | None = None
        # By the number of the plan in force.
        self.holds = [(self.reached, self.released)]
        self.holds += [(threading.Event(), threading.Event()) for _ in range(1, wishes)]

    def __call__(self, ctx: Context, slices: int) -> None:
        super().__call__(ctx, slices)
        plan = self.rig.record().plan if self.rig is not None and len(self.holds) > 1 else 0
        if 0 < plan < len(self.holds):
            reached, released = self.holds[plan]
            reached.set()
            wait(released, "the release of the workers", 60.0)


class Wish:
    """A wish for another number of servers, in a thread of its own."""

    def __init__(self, rig: Rig, servers: int, wait_s: float = _WAIT_S) -> None:
        self.answer: coordinator_pb2.ScaleResponse | None = None
        self.error: Exception | None = None
        request = coordinator_pb2.ScaleRequest(servers=servers, wait_s=wait_s)

        def ask() -> None:
            try:
                self.answer = rig.ask("Coordinator.Scale", request, rig.leader.place, wait_s + 5.0)
            except Exception as error:
                self.error = error

        self._thread = threading.Thread(target=ask, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the answer, or the error."""
        self._thread.join(_WAIT_S + 10.0)
        assert not self._thread.is_alive(), "no answer to the wish"


def brought(rig: Rig) -> bool:
    """Whether former shards have brought the shards of a new plan all of their chunks."""
    services = [service for keeper in rig.keepers for service in keeper.service.shards.values()]
    parts = [service.host.parts for service in services if service.host.parts is not None]
    return bool(parts) and all(one.whole for one in parts)


def resize(rig: Rig, held: Between, wishes: Sequence[int]) -> None:
    """Have other numbers of servers, one after the other, while the job trains.

    For each wish the workers are held until the new servers have their parts of a version: the job is not to be done
    before.
    """
    there, held.rig = rig.settings.cluster.servers, rig
    for (reached, released), servers in zip(held.holds, wishes, strict=True):
        wait(reached, "the workers")
        wish = Wish(rig, servers)
        until("the wish is known", lambda servers=servers: rig.record().wanted_servers == servers)  # type: ignore[misc]
        for index in range(there, servers):
            rig.serve(index)
        until("the new servers have their parts", lambda: brought(rig))
        released.set()
        wish.join()
        if wish.error is not None:
            raise wish.error
        assert wish.answer is not None
        assert wish.answer.servers == servers
        there = servers
