"""The worker with the seat: memory with weights that the others map, and the sums of what all of them contribute."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import structlog

from paramserver import errors
from paramserver.core.layout.arena import Arena
from paramserver.core.layout.host_weights import (
    Begin,
    Came,
    Effect,
    Event,
    Failed,
    Give,
    GivesUp,
    HostWeights,
    Leaves,
    Refuse,
    Wants,
)
from paramserver.core.layout.plan import ITEMSIZE, Kind, Plan, Segment
from paramserver.tensors.dtypes import tensor_from
from paramserver.transport.shm import segments
from paramserver.transport.shm.channel import join
from paramserver.transport.shm.meeting import receive
from paramserver.transport.shm.seat import Seat
from paramserver.v1 import shard_pb2
from paramserver.v1.local_pb2 import HostShare
from paramserver.worker.host.guest import readable
from paramserver.worker.host.reader import SLOTS, Answer, Reader
from paramserver.worker.host.sums import PushSum, Sums
from paramserver.worker.weights.landing import Landing
from paramserver.worker.weights.pulled import Pulled, merge

if TYPE_CHECKING:  # a coordinator loads no torch
    import torch

    from paramserver.worker.flat import FlatSpace
    from paramserver.worker.memory.inbox import Inbox

log = structlog.get_logger("paramserver.worker")

# After a worker could not be let in, for example for want of descriptors, none is for so long.
_DEAF_S = 1.0
# Other workers of the host that are let in.
_READERS = 1024
# The number of this worker among those whose contributions are added.
_SELF = 0

# Pulls a version or a later one into memory.
PullInto = Callable[[int, Landing], Awaitable[list[Pulled]]]


class Keeper:
    """Pulls, and gives; adds up, and pushes. Lives in the event loop. ``inbox``: of this worker."""

    def __init__(self, seat: Seat, plan: Plan, arena: Arena, inbox: Inbox, pull: PullInto, push: PushSum) -> None:
        """Takes ``seat`` over. Raises OSError where no memory can be shared."""
        self._seat, self._plan, self._arena, self._pull = seat, plan, arena, pull
        self._loop = asyncio.get_running_loop()
        self._segment = segments.Segment(arena.weights_bytes(SLOTS))
        self.memory = segments.Foreign(os.dup(self._segment.reading_fd), self._segment.nbytes)
        self._state = HostWeights(SLOTS)
        self._numbers = itertools.count(1)
        self._answers: dict[int, Callable[[Answer], None]] = {}
        self._spaces: dict[int, FlatSpace] = {}
        self._readers: set[Reader] = set()
        self._inbox = inbox
        # By worker and slot of its inbox.
        self._offered: dict[tuple[int, int], FlatSpace] = {}
        self.sums = Sums(plan, push)
        self._tasks: set[asyncio.Task[None]] = set()
        # Set while no worker is let in.
        self._deaf: asyncio.TimerHandle | None = None
        self._listen()

    @property
    def others(self) -> int:
        """The number of workers that take weights from here."""
        return len(self._readers)

    async def take(self, version: int, reading: Sequence[int]) -> Give | str:
        """Where ``version`` or a later one lies, once it does; or the reason why it does not, in words."""
        given: asyncio.Future[Answer] = self._loop.create_future()
        call = self.ask(0, version, reading, given.set_result)
        try:
            answer = await given
        finally:
            self.give_up(call)
        assert answer is not None
        return answer if isinstance(answer, Give) else answer.reason

    def expect(self, share: HostShare) -> None:
        """This worker says which slices it will offer."""
        self.sums.expect(_SELF, share)

    async def offer(self, header: shard_pb2.PushHeader) -> bool:
        """Offer the contribution of this worker that lies in a slot of its inbox. False: it has to be pushed."""
        answered: asyncio.Future[bool] = self._loop.create_future()

        def answer(counted: bool) -> None:
            if not answered.done():
                answered.set_result(counted)

        call = self.offered(_SELF, self._inbox.memory.view, header, answer)
        try:
            return await answered
        finally:
            self.sums.withdraw(call)

    async def close(self) -> None:
        """Pull and push for nobody any more, so that another worker does."""
        if self._deaf is not None:
            self._deaf.cancel()
        self._loop.remove_reader(self._seat.socket.fileno())
        self._seat.close()
        for task in list(self._tasks):
            task.cancel()
        for reader in list(self._readers):
            reader.close()
        for call, answer in list(self._answers.items()):
            answer(Refuse(call, "this worker leaves"))
        self._answers.clear()
        await self.sums.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._segment.close()

    # ---- for readers

    def ask(self, reader: int, version: int, reading: Sequence[int], answer: Callable[[Answer], None]) -> int:
        """A reader wants a version; ``answer`` is called once, later. Returns the number of the question."""
        call = next(self._numbers)
        self._answers[call] = answer
        self._handle(Wants(reader, call, version, tuple(reading)))
        return call

    def give_up(self, call: int) -> bool:
        """A question is not waited for any more. False: it was answered."""
        if self._answers.pop(call, None) is None:
            return False
        self._handle(GivesUp(call))
        return True

    def offered(
        self, worker: int, inbox: memoryview, header: shard_pb2.PushHeader, answer: Callable[[bool], None]
    ) -> int:
        """A worker offers a contribution, see `Sums.offer`. Raises ProtocolError."""
        from paramserver.worker.memory.inbox import in_slot

        if header.shared.slot >= len(inbox) // self._arena.slot_bytes:
            raise errors.ProtocolError(f"slot {header.shared.slot} is not in the inbox of this worker")
        slot = worker, header.shared.slot
        if slot not in self._offered:
            self._offered[slot] = in_slot(self._arena, inbox, header.shared.slot)
        return self.sums.offer(worker, header, self._offered[slot], answer)

    def left(self, reader: Reader) -> None:
        """A reader is gone."""
        self._readers.discard(reader)
        self._offered = {slot: space for slot, space in self._offered.items() if slot[0] != reader.number}
        self.sums.left(reader.number)
        self._handle(Leaves(reader.number))

    def _listen(self) -> None:
        self._deaf = None
        self._loop.add_reader(self._seat.socket.fileno(), self._come)

    def _come(self) -> None:
        """Another worker of this host has come."""
        try:
            connection = self._seat.welcome([self._segment.reading_fd])
        except OSError as error:
            log.info("a worker of this host could not be handed the memory with the weights", reason=str(error))
            self._loop.remove_reader(self._seat.socket.fileno())
            self._deaf = self._loop.call_later(_DEAF_S, self._listen)
            return
        if connection is not None and len(self._readers) >= _READERS:
            connection.close()
        elif connection is not None:
            self._begin(self._let_in(connection))

    async def _let_in(self, connection: socket.socket) -> None:
        """A worker leaves a descriptor of its inbox, and is a guest from then on."""
        try:
            await readable(connection)
            (fd,) = receive(connection, 1)
            inbox = segments.Foreign(fd, self._inbox.memory.nbytes)
        except (OSError, ValueError) as error:
            log.info("a worker of this host has left no memory with its gradients", reason=str(error))
            connection.close()
            return
        except BaseException:
            connection.close()
            raise
        reader = Reader(self, next(self._numbers), inbox)
        self._readers.add(reader)
        await join(reader, connection)

    # ---- what the state says

    def _handle(self, event: Event) -> None:
        effects: list[Effect] = self._state.handle(event)
        for effect in effects:
            match effect:
                case Begin(version, slot):
                    self._begin(self._bring(version, slot))
                case Give(call) | Refuse(call):
                    answer = self._answers.pop(call, None)
                    if answer is not None:
                        answer(effect)

    def _begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring(self, version: int, slot: int) -> None:
        """Pull a version into a slot."""
        try:
            if slot not in self._spaces:
                self._spaces[slot] = await asyncio.to_thread(self._make, slot)
            space = self._spaces[slot]
            results = await self._pull(version, Landing(space, self._plan))
            await asyncio.to_thread(space.write, merge(results))
        except (OSError, errors.ParamServerError) as error:
            self._handle(Failed(str(error)))
        else:
            self._handle(Came(results[0].version))

    def _make(self, slot: int) -> FlatSpace:
        """Memory for a version. Raises OSError if there is not enough. In a thread."""
        import torch

        from paramserver.worker.flat import FlatSpace

        base = self._arena.slot_start(slot)
        self._segment.reserve(base, self._arena.slot_bytes)

        def place(segment: Segment) -> torch.Tensor:
            start = base + self._arena.starts[segment.index]
            nbytes = segment.elements * ITEMSIZE[segment.dtype]
            return tensor_from(self._segment.view[start : start + nbytes], segment.dtype)

        return FlatSpace(self._plan.layout, torch.device("cpu"), (Kind.PARAMETER, Kind.BUFFER), place)
