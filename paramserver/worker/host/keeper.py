"""The worker that pulls for its host: memory that the others map, and answers about what lies there."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import structlog
from google.protobuf.message import DecodeError

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
from paramserver.transport.shm.channel import Line, join
from paramserver.transport.shm.seat import Seat
from paramserver.v1 import shard_pb2
from paramserver.v1.local_pb2 import Envelope
from paramserver.worker.weights.landing import Landing
from paramserver.worker.weights.pulled import Pulled, merge

if TYPE_CHECKING:  # a coordinator loads no torch
    import torch

    from paramserver.worker.flat import FlatSpace

log = structlog.get_logger("paramserver.worker")

# Only used slots take memory: three while all workers keep step, at most two more than there are workers.
SLOTS = 32
# A question is kept for so long. Then the answer says that this worker is alive.
ALIVE_S = 0.5
# After a worker could not be let in, for example for want of descriptors, none is for so long.
_DEAF_S = 1.0
# The calls that a reader may have open.
_MOST_CALLS = 8

# Pulls a version or a later one into memory.
PullInto = Callable[[int, Landing], Awaitable[list[Pulled]]]
Answer = Give | Refuse | None


class Keeper:
    """Pulls, and gives. Lives in the event loop."""

    def __init__(self, seat: Seat, plan: Plan, arena: Arena, pull: PullInto) -> None:
        """Takes ``seat`` over. Raises OSError where no memory can be shared."""
        self._seat, self._plan, self._arena, self._pull = seat, plan, arena, pull
        self._loop = asyncio.get_running_loop()
        self._segment = segments.Segment(arena.weights_bytes(SLOTS))
        self.memory = segments.Foreign(os.dup(self._segment.reading_fd), self._segment.nbytes)
        self._state = HostWeights(SLOTS)
        self._numbers = itertools.count(1)
        self._answers: dict[int, Callable[[Answer], None]] = {}
        self._spaces: dict[int, FlatSpace] = {}
        self._readers: set[_Reader] = set()
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

    async def close(self) -> None:
        """Pull for nobody any more, so that another worker does."""
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

    def left(self, reader: _Reader) -> None:
        """A reader is gone."""
        self._readers.discard(reader)
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
        if connection is not None:
            reader = _Reader(self, next(self._numbers))
            self._readers.add(reader)
            self._begin(join(reader, connection))

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


class _Reader(Line):
    """The connection to another worker of this host."""

    def __init__(self, keeper: Keeper, number: int) -> None:
        super().__init__()
        self.number = number
        self._keeper = keeper
        # By call of the other side: the number of the question, and what ends the wait for it.
        self._open: dict[int, tuple[int, asyncio.TimerHandle]] = {}
        self._loop = asyncio.get_running_loop()

    def heard(self, envelope: Envelope) -> None:
        """A question, or that it is given up."""
        if envelope.cancel:
            self._end(envelope.call)
            return
        request = shard_pb2.PullRequest()
        try:
            request.ParseFromString(envelope.message)
        except DecodeError as error:
            raise errors.ProtocolError("what came is no question for weights") from error
        slots_exist = all(slot < SLOTS for slot in request.shared.reading)
        if envelope.call in self._open or len(self._open) >= _MOST_CALLS or not slots_exist:
            raise errors.ProtocolError("this question for weights makes no sense")
        call = envelope.call
        timer = self._loop.call_later(ALIVE_S, self._still_there, call)
        self._open[call] = 0, timer
        asked = self._keeper.ask(
            self.number, request.min_version, request.shared.reading, lambda answer: self._answer(call, answer)
        )
        if call in self._open:  # it is not answered yet
            self._open[call] = asked, timer

    def lost(self) -> None:
        """The other worker is gone."""
        for call in list(self._open):
            self._end(call)
        self._keeper.left(self)

    def _end(self, call: int) -> bool:
        """A question is over. False: it was before."""
        asked, timer = self._open.pop(call, (0, None))
        if timer is None:
            return False
        timer.cancel()
        self._keeper.give_up(asked)
        return True

    def _still_there(self, call: int) -> None:
        if self._end(call):
            self._tell(call, shard_pb2.PullHeader())

    def _answer(self, call: int, answer: Answer) -> None:
        self._end(call)
        if isinstance(answer, Give):
            self._tell(call, shard_pb2.PullHeader(ready=True, version=answer.version, slot=answer.slot))
        elif answer is not None:
            self.post(Envelope(call=call, error=errors.UnavailableError.__name__, text=answer.reason))

    def _tell(self, call: int, header: shard_pb2.PullHeader) -> None:
        self.post(Envelope(call=call, message=header.SerializeToString()))
