"""What a coordinator does to others, seen and stopped: its calls, its answers, its operations on the store."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from fnmatch import fnmatchcase
from typing import Any

from google.protobuf.message import Message

from paramserver.frames import AnyFrame
from paramserver.store.base import Entry, Lead, Store, StoreFacts, TransientStoreError
from paramserver.transport.base import METHODS, Channel, Frames, MethodKind, Neighbour, Place
from paramserver.v1 import shard_pb2

Before = Callable[[str], Awaitable[int]]
After = Callable[[str, int], Awaitable[None]]


class Trap:
    """Kills the first leader at the ``nth`` (from 0) thing it does that matches ``what``.

    Things are "call Shard.Activate", "call Shard.SetConsistency COMMIT", "call Shard.Release 8" (a version),
    "answer Coordinator.Join", "store save state".
    ``when``: "before" it is done, "after", or "between": another one of the kind, begun at about the same time, is
    done, this one never.
    """

    def __init__(self, what: str, nth: int = 0, when: str = "before") -> None:
        self.what, self.nth, self.when = what, nth, when
        self.fired = threading.Event()
        self.seen: list[str] = []
        self._count = 0
        self._held = False

    async def before(self, what: str, kill: Callable[[], None]) -> int:
        """Something is about to be done; its number among those that match, -1: it does not."""
        self.seen.append(what)
        if not fnmatchcase(what, self.what):
            return -1
        number = self._count
        self._count += 1
        if number == self.nth and self.when == "before" and not self.fired.is_set():
            await self._spring(kill)
        if number == self.nth and self.when == "between":
            self._held = True
            await asyncio.Event().wait()
        return number

    async def after(self, what: str, number: int, kill: Callable[[], None]) -> None:
        """It is done."""
        if number < 0 or self.fired.is_set():
            return
        if (self.when == "after" and number == self.nth) or (self._held and number != self.nth):
            await self._spring(kill)

    async def _spring(self, kill: Callable[[], None]) -> None:
        self.fired.set()
        kill()
        await asyncio.Event().wait()


class Commands:
    """The commands that shards have taken, in order."""

    def __init__(self) -> None:
        # (address, term, generation, workers); workers are None where the command names none.
        self.taken: list[tuple[str, int, int, tuple[int, ...] | None]] = []

    def take(self, address: str, request: Message) -> None:
        """A shard has answered it. Of two that are on their way at once, the older one may be answered last."""
        if isinstance(request, shard_pb2.SetMembersRequest | shard_pb2.ConfigureRequest):
            workers: tuple[int, ...] | None = tuple(sorted(w.member for w in request.workers))
            self.taken.append((address, request.term, request.generation, workers))
        elif isinstance(request, shard_pb2.ActivateRequest | shard_pb2.SetConsistencyRequest):
            self.taken.append((address, request.term, request.generation, None))

    def check(self) -> None:
        """On every shard terms never fall; a generation is of one term and one set of workers.

        A shard may answer news of an older generation after newer ones: `core.shards.shard` passes over them.
        """
        meaning: dict[int, tuple[int, tuple[int, ...]]] = {}
        newest: dict[str, int] = {}
        for address, term, generation, workers in self.taken:
            before = newest.get(address, 0)
            assert term >= before, f"{address} follows term {term} after {before}"
            if workers is None:
                continue
            newest[address] = term
            known = meaning.setdefault(generation, (term, workers))
            assert known == (term, workers), f"generation {generation} is {known} and {(term, workers)}"


class TappedChannel:
    """A coordinator's channel to a server."""

    def __init__(self, inner: Channel, before: Before, after: After, commands: Commands) -> None:
        self.kind, self.address = inner.kind, inner.address
        self._inner, self._before, self._after, self._commands = inner, before, after, commands

    async def call(self, method: str, request: Message, *, timeout: float) -> Message:
        """See `base.Channel`."""
        what = f"call {method}"
        if isinstance(request, shard_pb2.SetConsistencyRequest):
            what += " " + shard_pb2.Phase.Name(request.phase).removeprefix("PHASE_")
        elif isinstance(request, shard_pb2.ReleaseRequest):
            what += f" {' '.join(map(str, request.versions))}"
        number = await self._before(what)
        reply = await self._inner.call(method, request, timeout=timeout)
        self._commands.take(self.address, request)
        await self._after(what, number)
        return reply

    async def upload(self, method: str, frames: Frames, *, timeout: float) -> Message:
        """See `base.Channel`."""
        return await self._inner.upload(method, frames, timeout=timeout)

    def download(
        self, method: str, request: Message, *, timeout: float, place: Place | None = None
    ) -> AsyncGenerator[AnyFrame, None]:
        """See `base.Channel`."""
        return self._inner.download(method, request, timeout=timeout, place=place)

    def session(self, method: str, requests: AsyncIterator[Message]) -> AsyncGenerator[Message, None]:
        """See `base.Channel`."""
        return self._inner.session(method, requests)

    def beside(self, sock: socket.socket) -> Neighbour:
        """See `base.Channel`."""
        return self._inner.beside(sock)

    async def close(self) -> None:
        """See `base.Channel`."""
        await self._inner.close()


class TappedEndpoint:
    """The service of a coordinator."""

    def __init__(self, endpoint: object, before: Before, after: After) -> None:
        for method in METHODS.values():
            if method.service == "Coordinator":
                inner = getattr(endpoint, method.handler)
                if method.kind is MethodKind.UNARY:
                    inner = self._tapped(inner, f"answer {method.name}", before, after)
                setattr(self, method.handler, inner)

    @staticmethod
    def _tapped(inner: Callable[[Message], Awaitable[Message]], what: str, before: Before, after: After) -> Any:
        async def answer(request: Message) -> Message:
            number = await before(what)
            reply = await inner(request)
            await after(what, number)
            return reply

        return answer


class StoreLink:
    """One coordinator's connection to the store; see `paramserver.store.base.Store`."""

    def __init__(self, inner: Store, before: Before, after: After) -> None:
        self._inner, self._before, self._after = inner, before, after
        # While it is away every operation fails.
        self.cut = False
        self.operations = 0
        # Every operation takes so long.
        self.delay_s = 0.0
        self.delayed = 0
        # Operations that failed.
        self.refused = 0

    async def _do(self, what: str, work: Callable[[], Awaitable[Any]]) -> Any:
        self.operations += 1
        self._check()
        if self.delay_s:
            self.delayed += 1
            await asyncio.sleep(self.delay_s)
        number = await self._before(f"store {what}")
        self._check()
        result = await work()
        await self._after(f"store {what}", number)
        self._check()
        return result

    def _check(self) -> None:
        if self.cut:
            self.refused += 1
            raise TransientStoreError("the store is away, as planned")

    async def load(self, key: str) -> Entry | None:
        """See `base.Store`."""
        found: Entry | None = await self._do(f"load {key}", lambda: self._inner.load(key))
        return found

    async def save(self, key: str, value: bytes, expected: int, term: int = 0) -> int:
        """See `base.Store`."""
        revision: int = await self._do(f"save {key}", lambda: self._inner.save(key, value, expected, term))
        return revision

    async def delete(self, key: str, term: int = 0) -> None:
        """See `base.Store`."""
        await self._do(f"delete {key}", lambda: self._inner.delete(key, term))

    async def lead(self, token: str, holder: str, ttl_s: float, term: int = 0, floor: int = 0) -> Lead:
        """See `base.Store`."""
        lead: Lead = await self._do("lead", lambda: self._inner.lead(token, holder, ttl_s, term, floor))
        return lead

    async def resign(self, token: str) -> None:
        """See `base.Store`."""
        await self._do("resign", lambda: self._inner.resign(token))

    async def leader(self) -> Lead | None:
        """See `base.Store`."""
        lead: Lead | None = await self._do("leader", self._inner.leader)
        return lead

    async def inspect(self) -> StoreFacts:
        """See `base.Store`."""
        facts: StoreFacts = await self._do("inspect", self._inner.inspect)
        return facts

    async def ping(self) -> None:
        """See `base.Store`."""
        await self._do("ping", self._inner.ping)

    async def close(self) -> None:
        """Nothing to give back."""
