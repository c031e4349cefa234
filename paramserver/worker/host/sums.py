"""The contributions that the workers of a host offer, and their sums: the bytes of what `HostSums` decides.

Belongs to the worker with the seat. Contributions lie in the inboxes of their workers, and are only read. Sums lie in
memory of this process.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from paramserver import errors
from paramserver.core.layout.plan import Kind, Plan
from paramserver.core.versions.host_sums import (
    Add,
    Added,
    Answer,
    Drop,
    Event,
    Expects,
    HostSums,
    Leaves,
    Offers,
    Push,
    Pushed,
    Tick,
    Withdraws,
)
from paramserver.core.versions.names import SyncName
from paramserver.core.versions.reduction import Node
from paramserver.v1 import shard_pb2
from paramserver.v1.local_pb2 import HostShare
from paramserver.wire.messages import unpack_mask
from paramserver.worker.gradients.contribution import Outcomes, PushFacts
from paramserver.worker.gradients.leaving import Leaving

if TYPE_CHECKING:  # a coordinator loads no torch
    from paramserver.worker.flat import FlatSpace

log = structlog.get_logger("paramserver.worker")

# Brings a contribution to all servers.
PushSum = Callable[[Leaving], Awaitable[Outcomes]]


@dataclass(slots=True)
class _Part:
    """The bytes of a piece, and the facts about it. ``sum``: they lie in memory of this object."""

    space: FlatSpace
    samples: int
    overflow: bool
    used: frozenset[int]
    # Facts that are equal for all that is added.
    like: shard_pb2.PushHeader
    sum: bool = False


class Sums:
    """Lives in the event loop."""

    def __init__(self, plan: Plan, push: PushSum) -> None:
        self._plan, self._push = plan, push
        self._loop = asyncio.get_running_loop()
        self._state = HostSums()
        self._numbers = itertools.count(1)
        self._parts: dict[tuple[int, Node], _Part] = {}
        self._answers: dict[int, Callable[[bool], None]] = {}
        # Memory for sums: free, or needed by servers until a later step begins.
        self._free: list[FlatSpace] = []
        self._lent: list[tuple[int, FlatSpace]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def expect(self, worker: int, share: HostShare) -> None:
        """A worker says which slices it will offer."""
        self._handle(Expects(worker, share.step, share.of, share.lo, share.hi, share.patience_s))

    def offer(self, worker: int, header: shard_pb2.PushHeader, space: FlatSpace, answer: Callable[[bool], None]) -> int:
        """A worker offers the contribution that lies in ``space``. Returns the number of the offer.

        ``answer`` is called once, perhaps at once. True: the contribution counts. False: its worker has to push it.
        Raises ProtocolError.
        """
        name, call = header.sync, next(self._numbers)
        used = unpack_mask(header.used, len(self._plan.layout.tensors))
        if self._closed or (name.step, (name.lo, name.hi)) in self._parts:
            answer(False)
            return call
        like = shard_pb2.PushHeader()
        like.CopyFrom(header)
        for field in ("sync", "samples", "overflow", "used", "nonce", "shared"):
            like.ClearField(field)
        node = name.lo, name.hi
        self._parts[name.step, node] = _Part(space, header.samples, header.overflow, used, like)
        self._answers[call] = answer
        key = like.SerializeToString(deterministic=True)
        self._handle(Offers(worker, call, name.step, name.of, node, key))
        return call

    def withdraw(self, call: int) -> None:
        """A worker waits for the answer to its offer no longer."""
        if self._answers.pop(call, None) is not None:
            self._handle(Withdraws(call))

    def left(self, worker: int) -> None:
        """A worker is gone."""
        self._handle(Leaves(worker))

    async def close(self) -> None:
        """Push no more: each worker pushes by itself what is not answered."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer(False)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._parts.clear()

    # ---- what the state says

    def _handle(self, event: Event) -> None:
        if self._closed:
            return
        for effect in self._state.handle(event, self._loop.time()):
            match effect:
                case Add(step, left, right):
                    self._begin(self._add(step, left, right))
                case Push(step, node):
                    self._begin(self._send(step, node))
                case Drop(step, node):
                    part = self._parts.pop((step, node))
                    if part.sum:
                        self._free.append(part.space)
                case Answer(call, counted):
                    answer = self._answers.pop(call, None)
                    if answer is not None:
                        answer(counted)
        back = [lent for lent in self._lent if lent[0] < self._state.step]
        self._lent = [lent for lent in self._lent if lent[0] >= self._state.step]
        self._free += [space for _, space in back]
        if self._timer is not None:
            self._timer.cancel()
        due = self._state.due
        self._timer = self._loop.call_at(due, self._handle, Tick()) if due is not None else None

    def _begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _add(self, step: int, left: Node, right: Node) -> None:
        """Add two siblings."""
        one, other = self._parts[step, left], self._parts[step, right]
        try:
            place = one if one.sum else other if other.sum else None
            space = place.space if place is not None else await self._memory()
            await asyncio.to_thread(space.sum_of, one.space, other.space)
        except (MemoryError, RuntimeError) as error:  # torch's error if there is no memory
            log.warning("contributions of this host could not be added up", reason=str(error))
            self._parts.pop((step, left), None)
            self._parts.pop((step, right), None)
            self._handle(Added(step, left, right, well=False))
            return
        del self._parts[step, left], self._parts[step, right]
        if one.sum and other.sum:
            self._free.append(other.space)
        samples, overflow = one.samples + other.samples, one.overflow or other.overflow
        self._parts[step, (left[0], right[1])] = _Part(
            space, samples, overflow, one.used | other.used, one.like, sum=True
        )
        self._handle(Added(step, left, right))

    async def _memory(self) -> FlatSpace:
        if self._free:
            return self._free.pop()
        import torch

        from paramserver.worker.flat import FlatSpace

        kinds = (Kind.PARAMETER, Kind.BUFFER)
        return await asyncio.to_thread(FlatSpace, self._plan.layout, torch.device("cpu"), kinds)

    async def _send(self, step: int, node: Node) -> None:
        """Push a sum. Its memory is needed until the step is over: a server to which a shard moves is sent it again."""
        part, of = self._parts[step, node], self._state.of
        facts = PushFacts(
            name=SyncName(step, *node, of),
            samples=part.samples,
            overflow=part.overflow,
            used=frozenset() if part.overflow else part.used,
            groups=list(part.like.groups),
            base_versions=[part.like.base_version] * self._plan.shards,
            advances=part.like.advances,
            clip_norm=part.like.clip_norm,
            nonce=secrets.randbits(63) | 1,
        )
        leaving = Leaving(self._plan, facts, part.space.read)
        leaving.seal()
        counted = True
        try:
            await self._push(leaving)
        except (OSError, errors.ParamServerError) as error:
            counted = False
            log.info("the sum of this host did not reach the servers: each worker sends its part", reason=str(error))
        del self._parts[step, node]
        self._lent.append((step, part.space))
        self._handle(Pushed(step, node, counted))
