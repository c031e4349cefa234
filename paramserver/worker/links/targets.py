"""The shards of a job: the channels to them, this worker's member number, and retries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import structlog

from paramserver import errors
from paramserver.core.layout.plan import Plan
from paramserver.tracing import Recorder
from paramserver.transport.base import Channel

log = structlog.get_logger("paramserver.worker")

T = TypeVar("T")
_BACK_OFF_S = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
# How long an attempt may take, and how much longer for each byte, which is the time on a link of 1 Mb/s.
_ATTEMPT_S, _BYTE_S = 60.0, 8e-6
# How long the links wait at their end for channels of former servers that are being closed.
_CLOSE_S = 2.0


class Targets:
    """The shards on one timeline. ``names``: by shard, the name of its server.

    ``worker`` tells this worker's present member number, 0 for a process that is no member. A shard may move to another
    server. So each attempt takes the channel from ``channels`` when it begins, and calls :meth:`still` after it.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        names: Sequence[str],
        plan: Plan,
        job: str,
        worker: Callable[[], int],
        timeline: int = 0,
        wait_timeout_s: float = 600.0,
        log_interval_s: float = 5.0,
        trace: Recorder | None = None,
    ) -> None:
        self.trace = trace or Recorder()
        self.channels, self.names = list(channels), list(names)
        self.plan = plan
        self.job = job
        self.worker = worker
        self.timeline = timeline
        self.wait_timeout_s = wait_timeout_s
        self.log_interval_s = log_interval_s
        # By shard, the bytes of its chunks.
        self.nbytes = [sum(chunk.nbytes for chunk in plan.chunks_of(shard)) for shard in range(len(self.channels))]
        # By shard, set when it moves.
        self._moved = [asyncio.Event() for _ in self.channels]
        # Work beside calls, and channels that are being closed.
        self._working: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()

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
            channel, name = self.channels[shard], self.names[shard]
            try:
                return await attempt(min(longest, max(0.1, deadline - time.monotonic())))
            except errors.RetryableError as error:
                now = time.monotonic()
                if now >= deadline:
                    raise errors.DeadlineError(
                        f"{name} at {channel.address} did not let this worker {what[3:]} "
                        f"within {self.wait_timeout_s:g} s: {error}"
                    ) from error
                # A busy server is worth a line in the log only if that lasts.
                busy = isinstance(error, errors.OverloadedError) and now - started < self.log_interval_s
                if not busy and (said == 0.0 or now - said >= self.log_interval_s):
                    said = now
                    log.info("trying again", server=name, what=what, reason=str(error))
                await self._pause(shard, channel, _BACK_OFF_S[min(tries, len(_BACK_OFF_S) - 1)])
                tries = tries + 1 if self.channels[shard] is channel else 0

    async def _pause(self, shard: int, channel: Channel, seconds: float) -> None:
        """Wait before the next attempt; not if the shard has moved since the last one, or only until it moves."""
        if self.channels[shard] is channel:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._moved[shard].wait()

    # ---- shards that move

    def move(self, shard: int, channel: Channel, name: str) -> None:
        """Another server has this shard from now on. Calls over the former channel end, and are made again."""
        former, self.channels[shard], self.names[shard] = self.channels[shard], channel, name
        moved, self._moved[shard] = self._moved[shard], asyncio.Event()
        moved.set()
        closing = asyncio.ensure_future(former.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def still(self, shard: int, channel: Channel) -> None:
        """Raises UnavailableError if ``channel`` does not lead to the server that has the shard now.

        A server's answer that it has counted or kept something is worth nothing after the shard has moved.
        """
        if self.channels[shard] is not channel:
            raise errors.UnavailableError(f"shard {shard} has moved to {self.names[shard]}")

    def beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do some work beside calls, until the links are closed."""
        task = asyncio.ensure_future(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        return task

    async def close(self) -> None:
        """Close the channels."""
        working = list(self._working)
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in self.channels), return_exceptions=True)
        if self._closing:
            await asyncio.wait(self._closing, timeout=_CLOSE_S)
