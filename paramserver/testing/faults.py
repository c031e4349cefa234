"""Faults of the calls between a client and its peers."""

from __future__ import annotations

import asyncio
import enum
import hashlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from paramserver import errors
from paramserver.frames import AnyFrame
from paramserver.transport.base import Channel, Frames, Neighbour, Place, each
from paramserver.v1 import shard_pb2

T = TypeVar("T")


class Fault(enum.Enum):
    """A fault of one call. All but DUPLICATE, DELAY and REORDER end the call with UnavailableError at the caller."""

    # The peer never hears of the call.
    DROP_REQUEST = "drop"
    # The peer carries the call out (a download: begins to answer), and the caller gets no answer.
    LOSE_REPLY = "lose_reply"
    # The peer gets the request twice, at the same time; the caller sees one of the answers.
    DUPLICATE = "duplicate"
    # The call starts late, and other calls overtake it.
    DELAY = "delay"
    # The call starts when a later call of the same method has been answered, and at the latest after ``delay_s``.
    REORDER = "reorder"
    # An upload breaks off before its end. Other calls: as DROP_REQUEST.
    CUT_UPLOAD = "cut"


@dataclass(frozen=True, slots=True)
class Hit:
    """The fault of one call. ``delay_s``: how late a delayed call starts, and a reordered one at the latest."""

    fault: Fault
    delay_s: float = 0.0


class CallFaults:
    """Decides which calls of a client suffer which faults. Used within one event loop."""

    def __init__(self) -> None:
        # Calls that wait to be overtaken: (method, the event to set then).
        self._held: list[tuple[str, asyncio.Event]] = []

    def next(self, method: str) -> Hit | None:
        """The fault of a call of ``method`` that begins now; None: the call goes well."""
        raise NotImplementedError

    @property
    def quiet(self) -> bool:
        """Whether no call is to suffer a fault at the moment."""
        return False

    def repeats(self, method: str) -> bool:
        """Whether the frames that a call sends may be needed twice, or broken off."""
        return True

    async def gate(self, where: str, deadline: float | None) -> None:
        """Pass before a call begins. ``deadline``: in the loop's time."""

    async def settle(self, where: str, deadline: float | None, work: asyncio.Future[Any]) -> None:
        """Wait for the end of ``work``, a part of a call. If the wait is cancelled, so is ``work``."""
        try:
            await asyncio.wait([work])
        finally:
            await given_up(work)

    async def delay(self, hit: Hit | None, method: str) -> None:
        """Wait, if the fault is to start the call late."""
        if hit is not None and hit.fault is Fault.DELAY:
            await asyncio.sleep(hit.delay_s)
        if hit is not None and hit.fault is Fault.REORDER:
            held = method, asyncio.Event()
            self._held.append(held)
            try:
                async with asyncio.timeout(hit.delay_s):
                    await held[1].wait()
            except TimeoutError:
                pass
            finally:
                self._held.remove(held)

    def answered(self, method: str) -> None:
        """A call has come to its end: calls that were held back for it may go on."""
        for name, overtaken in self._held:
            if name == method:
                overtaken.set()


class FaultyChannel:
    """A channel whose calls suffer ``faults``; see `paramserver.transport.base.Channel`."""

    def __init__(self, inner: Channel, faults: CallFaults) -> None:
        self.address = inner.address
        self._inner = inner
        self._faults = faults

    @property
    def kind(self) -> str:
        """The transport."""
        return self._inner.kind

    async def call(self, method: str, request: Message, *, timeout: float) -> Message:
        """One message there, one back."""
        return await self.suffer(method, timeout, lambda: self._inner.call(method, request, timeout=timeout))

    async def upload(self, method: str, frames: Frames, *, timeout: float) -> Message:
        """Frames there, one message back."""
        if not self._faults.repeats(method):
            return await self.suffer(method, timeout, lambda: self._inner.upload(method, frames, timeout=timeout))
        sent = [raw async for raw in each(frames)]
        return await self.suffer(
            method,
            timeout,
            lambda: self._inner.upload(method, sent, timeout=timeout),
            lambda: self._inner.upload(method, _endless(sent, f"{method} at {self.address}"), timeout=timeout),
        )

    async def suffer(
        self,
        method: str,
        timeout: float,
        attempt: Callable[[], Awaitable[Message]],
        cut_short: Callable[[], Awaitable[Message]] | None = None,
    ) -> Message:
        """The answer of a call, made by ``attempt``, after the planned fault of ``method``.

        ``cut_short``: makes a call that breaks off before its end; None: the call is a single message.
        """
        where, hit, deadline = await self._begin(method, timeout, cut_short is None)
        fault = hit.fault if hit is not None else None
        if fault is Fault.CUT_UPLOAD and cut_short is not None:
            await cut_short()
            raise AssertionError(f"{where}: the peer answered an upload that was cut short")
        works = [asyncio.ensure_future(attempt()) for _ in range(2 if fault is Fault.DUPLICATE else 1)]
        both = asyncio.gather(*works)
        both.add_done_callback(lambda done: done.cancelled() or done.exception())  # looked at, if the caller has gone
        await self._faults.settle(where, deadline, both)
        replies = both.result()
        self._faults.answered(method)
        if fault is Fault.LOSE_REPLY:
            raise broken(where, "the reply was lost")
        return replies[-1]

    async def _begin(
        self, method: str, timeout: float | None, whole: bool = True
    ) -> tuple[str, Hit | None, float | None]:
        where = f"{method} at {self.address}"
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        await self._faults.gate(where, deadline)
        hit = self._faults.next(method)
        if hit is not None and (hit.fault is Fault.DROP_REQUEST or (hit.fault is Fault.CUT_UPLOAD and whole)):
            raise broken(where, "the request was dropped")
        await self._faults.delay(hit, method)
        return where, hit, deadline

    async def download(
        self, method: str, request: Message, *, timeout: float, place: Place | None = None
    ) -> AsyncGenerator[AnyFrame, None]:
        """One message there, frames back."""
        where, hit, deadline = await self._begin(method, timeout)
        if hit is not None and hit.fault is Fault.DUPLICATE:
            async for _ in self._inner.download(method, request, timeout=timeout):
                pass
        async with (
            aclosing(self._inner.download(method, request, timeout=timeout, place=place)) as answers,
            aclosing(self._guarded(answers, where, deadline)) as guarded,
        ):
            async for frame in guarded:
                yield frame
                if hit is not None and hit.fault is Fault.LOSE_REPLY:
                    raise broken(where, "the rest of the reply was lost")
        self._faults.answered(method)

    async def session(self, method: str, requests: AsyncIterator[Message]) -> AsyncGenerator[Message, None]:
        """Messages both ways. LOSE_REPLY ends it after its first answer; DUPLICATE does nothing to it."""
        where, hit, deadline = await self._begin(method, None)
        async with (
            aclosing(self._inner.session(method, requests)) as answers,
            aclosing(self._guarded(answers, where, deadline)) as guarded,
        ):
            async for answer in guarded:
                yield answer
                if hit is not None and hit.fault is Fault.LOSE_REPLY:
                    raise broken(where, "the session was reset")

    async def _guarded(
        self, answers: AsyncGenerator[T, None], where: str, deadline: float | None
    ) -> AsyncGenerator[T, None]:
        while True:
            coming = asyncio.ensure_future(_next(answers))
            await self._faults.settle(where, deadline, coming)
            for answer in coming.result():
                yield answer
            if not coming.result():
                return

    def beside(self, sock: socket.socket) -> Neighbour:
        """The same peer over a socket, with the same faults."""
        return _FaultyNeighbour(self._inner.beside(sock), self, self._faults)

    async def close(self) -> None:
        """Close the channel."""
        await self._inner.close()


class _FaultyNeighbour:
    """Unary calls over a socket, which suffer the same faults as calls of a ``channel`` to the same peer."""

    def __init__(self, inner: Neighbour, channel: FaultyChannel, faults: CallFaults) -> None:
        self._inner, self._channel, self._faults = inner, channel, faults

    @property
    def undisturbed(self) -> bool:
        """See `base.Neighbour`."""
        return self._faults.quiet and self._inner.undisturbed

    async def call(self, method: str, request: Message, *, timeout: float) -> Message:
        """See `base.Neighbour`. A push or a pull suffers the faults that are planned for pushes or pulls."""
        named = _named(method, request)
        return await self._channel.suffer(named, timeout, lambda: self._inner.call(method, request, timeout=timeout))

    async def close(self) -> None:
        """See `base.Neighbour`."""
        await self._inner.close()


def _named(method: str, request: Message) -> str:
    """The name under which faults of a call are planned: half an exchange is a push or a pull."""
    if isinstance(request, shard_pb2.ExchangeRequest) and not (request.HasField("push") and request.HasField("pull")):
        return "Shard.Push" if request.HasField("push") else "Shard.Pull"
    if isinstance(request, shard_pb2.ForwardHeader):
        return "Shard.Forward"
    return method


def broken(where: str, how: str) -> errors.UnavailableError:
    """The error by which the caller sees a planned fault."""
    return errors.UnavailableError(f"{where}: {how}, as planned")


def _endless(frames: Sequence[AnyFrame], where: str) -> Iterable[AnyFrame]:
    """All frames, but no end."""
    yield from frames
    raise broken(where, "the upload was cut short")


async def _next(answers: AsyncGenerator[T, None]) -> tuple[T, ...]:
    """The next answer, or None after the last answer."""
    async for answer in answers:
        return (answer,)
    return ()


async def given_up(work: asyncio.Future[Any]) -> None:
    """Cancel ``work`` unless it has ended, and wait for its end, with or without an error."""
    if not work.done():
        work.cancel()
        await asyncio.wait([work])
    if not work.cancelled():
        work.exception()  # looked at: nobody may ask for it any more


def chance(*key: object) -> float:
    """A number in [0, 1) that depends on the arguments alone, for seeded choices."""
    text = "/".join(map(str, key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") / 2**64
