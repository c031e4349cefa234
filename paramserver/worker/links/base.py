"""What pushes and pulls share: the channels, who this worker is, trying again, and memory shared with servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import structlog

from paramserver import errors
from paramserver.compress.casts import Cast
from paramserver.core.layout.plan import Plan
from paramserver.transport.base import Channel
from paramserver.v1 import shard_pb2
from paramserver.worker.gradients.flow_control import FlowControl
from paramserver.worker.memory.shared import Attached, SharedMemory
from paramserver.worker.weights.pulled import Pulled

log = structlog.get_logger("paramserver.worker")

T = TypeVar("T")
_BACK_OFF_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
# How long an attempt may take, and besides for each byte that it is about: as on a link of 1 Mb/s.
_ATTEMPT_S, _BYTE_S = 60.0, 8e-6
_ATTACH_S = 10.0


class Base:
    """The shards of a job. ``worker`` tells this worker's present member number."""

    def __init__(
        self,
        channels: Sequence[Channel],
        plan: Plan,
        job: str,
        worker: Callable[[], int],
        wait_timeout_s: float = 600.0,
        log_interval_s: float = 5.0,
    ) -> None:
        self.channels = list(channels)
        self.plan = plan
        self.job = job
        self.timeline = 0
        self.waiting_for = ""
        # How many workers share a step, where that is known.
        self.workers = 1
        # What this worker says of itself when it pulls, where it says anything.
        self.assignment: shard_pb2.Assignment | None = None
        # Shared with those of the servers that are on this host; set once, by whoever attaches.
        self.shared: SharedMemory | None = None
        # What weights are rounded to on their way here.
        self.rounding: Cast | None = None
        # Pulls of which somebody has been given the first part.
        self._pulls: set[asyncio.Task[Pulled]] = set()
        self._nbytes = [sum(chunk.nbytes for chunk in plan.chunks_of(server)) for server in range(len(self.channels))]
        self._flow_control = FlowControl(len(self.channels), plan.layout.chunk_bytes)
        self._worker = worker
        self._wait_timeout_s = wait_timeout_s
        self._log_interval_s = log_interval_s

    # ---- shared memory

    def direct(self) -> list[Attached] | None:
        """By server, how the thread that trains reaches it; None where that is not possible with all."""
        if self.shared is None or self.rounding is not None:
            return None
        found = [self.shared.attached(server, self._worker()) for server in range(len(self.channels))]
        ways = [one for one in found if one is not None and one.channel.undisturbed and not one.direct.gone]
        return ways if len(ways) == len(found) else None

    async def attach(self, shared: SharedMemory) -> dict[int, str]:
        """Share memory with the servers on this host; by server, why others cannot."""

        async def one(server: int) -> str:
            return await self._persist(server, "to attach", partial(self._attach, shared, server))

        tasks = [asyncio.ensure_future(one(server)) for server in range(len(self.channels))]
        try:
            refusals = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # or one would attach after all is closed
            await shared.close()
            raise
        self.shared = shared if shared.servers else None
        return {server: refusal for server, refusal in enumerate(refusals) if refusal}

    async def detach(self) -> None:
        """Share memory with nobody any more."""
        shared, self.shared = self.shared, None
        if shared is not None:
            await shared.close()

    async def _attach(self, shared: SharedMemory, server: int, timeout_s: float) -> str:
        return await shared.attach(
            server, self.channels[server], self.job, self.timeline, self._worker(), min(timeout_s, _ATTACH_S)
        )

    async def _detached(self, server: int) -> None:
        log.info("a server does not share memory with this worker any more", server=f"server-{server}")
        assert self.shared is not None
        await self.shared.lost(server)

    def _way(self, server: int) -> Channel:
        """Where small messages to a server go: over a socket of this host if it shares memory with this worker."""
        attached = self.shared.attached(server, self._worker()) if self.shared is not None else None
        return self.channels[server] if attached is None else attached.channel

    @property
    def kind(self) -> str:
        """What carries weights and gradients, as `status` shows it."""
        kind = self.channels[0].kind if self.channels else ""
        if self.shared is None or not self.shared.servers:
            return kind
        return "shm" if len(self.shared.servers) == len(self.channels) else f"shm+{kind}"

    # ---- trying again

    async def _persist(
        self, server: int, what: str, attempt: Callable[[float], Coroutine[Any, Any, T]], nbytes: int = 0
    ) -> T:
        """Try until it works, somebody says never, or the deadline passes (the error then names the shard).

        ``nbytes``: how many have to travel. ``attempt`` gets the seconds that it may take.
        """
        started = time.monotonic()
        longest = _ATTEMPT_S + nbytes * _BYTE_S
        deadline = started + self._wait_timeout_s
        tries, said = 0, 0.0
        while True:
            try:
                return await attempt(min(longest, max(0.1, deadline - time.monotonic())))
            except errors.RetryableError as error:
                now = time.monotonic()
                if now >= deadline:
                    raise errors.DeadlineError(
                        f"server-{server} at {self.channels[server].address} did not let this worker {what[3:]} "
                        f"within {self._wait_timeout_s:g} s: {error}"
                    ) from error
                # That a server is busy is nothing to talk about, unless it lasts.
                busy = isinstance(error, errors.OverloadedError) and now - started < self._log_interval_s
                if not busy and (said == 0.0 or now - said >= self._log_interval_s):
                    said = now
                    log.info("trying again", server=f"server-{server}", what=what, reason=str(error))
                await asyncio.sleep(_BACK_OFF_S[min(tries, len(_BACK_OFF_S) - 1)])
                tries += 1

    async def close(self) -> None:
        """Close the channels."""
        for pull in list(self._pulls):
            pull.cancel()
        if self.shared is not None:
            await self.shared.close()
        await asyncio.gather(*(channel.close() for channel in self.channels), return_exceptions=True)
