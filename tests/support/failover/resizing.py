"""The number of servers changes while a job trains: `Resized` asks for it while the workers are held."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from paramserver.v1 import coordinator_pb2
from tests.support.cluster.harness import until, wait
from tests.support.failover.held import Held
from tests.support.failover.rollback import Rig

_WAIT_S = 20.0


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


def resize(rig: Rig, held: Held, wishes: Sequence[int]) -> None:
    """Have other numbers of servers, one after the other, while the job trains. The workers are held at first."""
    wait(held.reached, "the workers in their third slice")
    there = rig.settings.cluster.servers
    for number, servers in enumerate(wishes):
        wish = Wish(rig, servers)
        until("the wish is known", lambda servers=servers: rig.record().wanted_servers == servers)  # type: ignore[misc]
        for index in range(there, servers):
            rig.serve(index)
        if number == 0:
            until("the change is prepared", lambda: rig.record().newest_plan == 1)
            held.released.set()
        wish.join()
        if wish.error is not None:
            raise wish.error
        assert wish.answer is not None
        assert wish.answer.servers == servers
        there = servers
