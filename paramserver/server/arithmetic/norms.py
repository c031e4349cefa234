"""Clipping by the global norm: every shard must use the same norm, down to the last bit.

A shard computes the squared norm of each of its chunks, tells all other shards, and adds up those of all chunks in the
order of the chunks, which does not depend on how many servers there are.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import torch

from paramserver import errors
from paramserver.transport.base import Channel
from paramserver.v1 import shard_pb2, types_pb2

_CALL_S = 10.0
_RETRY_S = 0.1
# A shard that has just got another primary may need the norms of a step that others have finished, and of the next one.
_KEPT = 2
# As torch.nn.utils.clip_grad_norm_ has it.
_EPSILON = 1e-6


def squares(gradients: Mapping[int, torch.Tensor]) -> dict[int, float]:
    """The squared 2-norm of each chunk, added up in float64."""
    return {index: float(torch.dot(wide := flat.double(), wide)) for index, flat in gradients.items()}


def clip(
    gradients: Mapping[int, torch.Tensor], all_squares: Mapping[int, float], limit: float, in_place: bool = False
) -> dict[int, torch.Tensor]:
    """The gradients, scaled down if the norm over all chunks of all shards is above ``limit``."""
    norm = math.sqrt(math.fsum(all_squares[index] for index in sorted(all_squares)))
    factor = limit / (norm + _EPSILON)
    if factor >= 1.0:
        return dict(gradients)
    return {index: torch.mul(flat, factor, out=flat if in_place else None) for index, flat in gradients.items()}


class NormExchange:
    """Tells the other shards this one's norms, and waits for theirs."""

    def __init__(self, connect: Callable[[str], Channel], job: str, wait_s: float) -> None:
        self._connect, self._job, self.wait_s = connect, job, wait_s
        self._index = 0
        self._peers: dict[int, Channel] = {}
        # The norms that this shard has told last.
        self._told: deque[shard_pb2.ShareNormsRequest] = deque(maxlen=_KEPT)
        self._tasks: set[asyncio.Task[None]] = set()
        self._heard: dict[tuple[int, int], dict[int, dict[int, float]]] = {}  # (timeline, step) -> shard -> squares
        self._news = asyncio.Condition()
        self.waiting_for = ""

    def configure(self, index: int, peers: Sequence[types_pb2.ShardInfo]) -> None:
        """Learn the addresses of the other shards. A shard at another address than before may lack the last norms."""
        self._index = index
        for peer in peers:
            former = self._peers.get(peer.index)
            if peer.index == index or (former is not None and former.address == peer.address):
                continue
            channel = self._peers[peer.index] = self._connect(peer.address)
            for request in self._told:
                self._begin(self._tell(channel, request))
            if former is not None:
                self._begin(former.close())

    async def hear(self, request: shard_pb2.ShareNormsRequest, version: int) -> None:
        """Another shard tells its norms. What belongs to a published step is forgotten."""
        if len(request.chunks) != len(request.squares):
            raise errors.ProtocolError("as many squares as chunks belong into a message of norms")
        if request.shard not in self._peers:
            raise errors.ProtocolError(f"shard {request.shard} is no other shard of this job")
        if request.step > version + 1:
            raise errors.ProtocolError(f"the norm of step {request.step}, but this shard still works on step {version}")
        if not all(math.isfinite(square) and square >= 0 for square in request.squares):
            raise errors.ProtocolError("a squared norm must be finite and not negative")
        async with self._news:
            if request.step >= version:
                told = self._heard.setdefault((request.timeline, request.step), {})
                told[request.shard] = dict(zip(request.chunks, request.squares, strict=True))
            for key in [key for key in self._heard if key[1] < version]:
                del self._heard[key]
            self._news.notify_all()

    async def exchange(self, timeline: int, step: int, mine: Mapping[int, float]) -> dict[int, float]:
        """The squares of all chunks of all shards. Raises DeadlineError naming the shards that were not heard of."""
        if not self._peers:
            return dict(mine)
        request = shard_pb2.ShareNormsRequest(
            job=self._job,
            timeline=timeline,
            step=step,
            shard=self._index,
            chunks=list(mine),
            squares=list(mine.values()),
        )
        self._told.append(request)
        for channel in self._peers.values():  # a slower peer may need the norms of this shard when it has its own
            self._begin(self._tell(channel, request))
        try:
            async with asyncio.timeout(self.wait_s):
                return await self._collect((timeline, step), mine)
        except TimeoutError as error:
            raise errors.DeadlineError(f"waited {self.wait_s:g} s for {self.waiting_for}") from error
        finally:
            self.waiting_for = ""

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    async def _collect(self, key: tuple[int, int], mine: Mapping[int, float]) -> dict[int, float]:
        async with self._news:
            while True:
                told = self._heard.get(key, {})
                missing = [f"server-{index}" for index in self._peers if index not in told]
                if not missing:
                    break
                self.waiting_for = f"the norm of step {key[1]}: {', '.join(missing)}"
                await self._news.wait()
            self._heard.pop(key, None)
        return dict(mine) | {index: square for squares_ in told.values() for index, square in squares_.items()}

    async def _tell(self, channel: Channel, request: shard_pb2.ShareNormsRequest) -> None:
        deadline = asyncio.get_running_loop().time() + self.wait_s
        while asyncio.get_running_loop().time() < deadline:
            try:
                await channel.call("Shard.ShareNorms", request, timeout=_CALL_S)
                return
            except errors.RetryableError:
                await asyncio.sleep(_RETRY_S)

    async def close(self) -> None:
        """Close the channels to the other shards."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*(channel.close() for channel in self._peers.values()), return_exceptions=True)
