"""The shards of a job: the channels to them, this worker's member number, and retries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import structlog

from paramserver import errors
from paramserver.core.layout.plan import Plan
from paramserver.transport.base import Channel

log = structlog.get_logger("paramserver.worker")

T = TypeVar("T")
_BACK_OFF_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
# How long an attempt may take, and how much longer for each byte, which is the time on a link of 1 Mb/s.
_ATTEMPT_S, _BYTE_S = 60.0, 8e-6


class Targets:
    """The shards on one timeline. ``names``: by shard, the name of its server.

    ``worker`` tells this worker's present member number.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        names: Sequence[str],
        plan: Plan,
        job: str,
        worker: Callable[[], int],
        timeline: int,
        wait_timeout_s: float,
        log_interval_s: float,
    ) -> None:
        self.channels, self.names = list(channels), names
        self.plan = plan
        self.job = job
        self.worker = worker
        self.timeline = timeline
        self.wait_timeout_s = wait_timeout_s
        self.log_interval_s = log_interval_s
        # By shard, the bytes of its chunks.
        self.nbytes = [sum(chunk.nbytes for chunk in plan.chunks_of(shard)) for shard in range(len(self.channels))]

    def __len__(self) -> int:
        return len(self.channels)

    async def persist(
        self, shard: int, what: str, attempt: Callable[[float], Coroutine[Any, Any, T]], nbytes: int = 0
    ) -> T:
        """Try until the attempt succeeds, fails for good, or the deadline passes (the error then names the shard).

        ``nbytes``: how many bytes have to travel. ``attempt`` gets the seconds that it may take.
        """
        started = time.monotonic()
        longest = _ATTEMPT_S + nbytes * _BYTE_S
        deadline = started + self.wait_timeout_s
        tries, said = 0, 0.0
        while True:
            try:
                return await attempt(min(longest, max(0.1, deadline - time.monotonic())))
            except errors.RetryableError as error:
                now = time.monotonic()
                if now >= deadline:
                    raise errors.DeadlineError(
                        f"{self.names[shard]} at {self.channels[shard].address} did not let this worker {what[3:]} "
                        f"within {self.wait_timeout_s:g} s: {error}"
                    ) from error
                # A busy server is worth a line in the log only if that lasts.
                busy = isinstance(error, errors.OverloadedError) and now - started < self.log_interval_s
                if not busy and (said == 0.0 or now - said >= self.log_interval_s):
                    said = now
                    log.info("trying again", server=self.names[shard], what=what, reason=str(error))
                await asyncio.sleep(_BACK_OFF_S[min(tries, len(_BACK_OFF_S) - 1)])
                tries += 1

    async def close(self) -> None:
        """Close the channels."""
        await asyncio.gather(*(channel.close() for channel in self.channels), return_exceptions=True)
