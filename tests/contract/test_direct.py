"""Calls by a thread that waits itself: it gets answers, or none, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from paramserver import errors
from paramserver.transport.base import Caller
from paramserver.transport.direct import DirectLine, ask_all
from paramserver.transport.envelopes import pack, unpack
from paramserver.transport.security.policy import COORDINATOR, WORKER
from paramserver.transport.shm import channel as local
from paramserver.v1 import shard_pb2
from paramserver.v1.local_pb2 import Envelope
from tests.support.contract.channels import DEADLINE_S, Parked, Stub

REQUEST = shard_pb2.ExchangeRequest(push=shard_pb2.PushHeader(job="job", used=b"x" * 1000))
LONG_S = 10.0


async def answer(request: shard_pb2.ExchangeRequest) -> shard_pb2.ExchangeResponse:
    return shard_pb2.ExchangeResponse(pulled=shard_pb2.PullHeader(ready=True, waiting_for=request.push.job))


async def refuse(request: shard_pb2.ExchangeRequest) -> shard_pb2.ExchangeResponse:
    raise errors.RolledBackError("another timeline")


class Host:
    """Lines to services, and what serves them."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.servers: list[local.LocalServer] = []

    async def line(self, exchange: Callable[[Any], Awaitable[Any]], role: str = WORKER) -> DirectLine:
        mine, theirs = socket.socketpair()
        line = DirectLine(mine)
        self._stack.callback(line.close)
        server = await local.serve(theirs, [("Shard", Stub(exchange=exchange))], Caller(frozenset({role}), admin=False))
        self._stack.push_async_callback(server.stop)
        self.servers.append(server)
        return line


def run(test: Callable[[Host], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
            await test(Host(stack))

    asyncio.run(main())


async def ask(*lines: DirectLine, timeout_s: float = LONG_S) -> Any:
    return await asyncio.to_thread(ask_all, lines, "Shard.Exchange", [REQUEST] * len(lines), timeout_s)


def test_every_line_has_its_answer_again_and_again() -> None:
    async def test(host: Host) -> None:
        lines = [await host.line(answer) for _ in range(3)]
        for _ in range(3):
            answers = await ask(*lines)
            assert [one.pulled.waiting_for for one in answers] == ["job"] * 3

    run(test)


@pytest.mark.parametrize("role", [WORKER, COORDINATOR])
def test_no_answer_if_one_is_refused(role: str) -> None:
    """By the service, or because of who asks. The others are given up, and the lines are as good as before."""

    async def test(host: Host) -> None:
        parked = Parked()
        good, waits = await host.line(answer), await host.line(parked.unary)
        bad = await host.line(refuse if role == WORKER else answer, role)
        assert await ask(good, waits, bad) is None
        await parked.until(lambda: parked.left == 1)
        assert await ask(good) is not None
        assert [line.gone for line in (good, waits, bad)] == [False] * 3

    run(test)


def test_what_takes_too_long_is_given_up_and_its_late_answer_not_taken_for_another() -> None:
    async def test(host: Host) -> None:
        asked: list[asyncio.Event] = []
        given_up = asyncio.Event()

        async def stubborn(request: shard_pb2.ExchangeRequest) -> shard_pb2.ExchangeResponse:
            number = len(asked)
            asked.append(asyncio.Event())
            if not number:
                try:
                    await asked[0].wait()
                except asyncio.CancelledError:  # and answers all the same
                    given_up.set()
            return shard_pb2.ExchangeResponse(pulled=shard_pb2.PullHeader(version=number))

        line = await host.line(stubborn)
        assert await ask(line, timeout_s=0.05) is None
        await given_up.wait()
        assert [one.pulled.version for one in await ask(line)] == [1]

    run(test)


@pytest.mark.parametrize("who", ["server", "this end"])
def test_a_line_that_is_cut_is_gone(who: str) -> None:
    async def test(host: Host) -> None:
        parked = Parked()
        line = await host.line(parked.unary)
        asking = asyncio.ensure_future(ask(line))
        await parked.until(lambda: parked.arrived == 1)
        if who == "server":
            host.servers[0].close()
        else:
            line.close()
        assert await asking is None
        assert line.gone
        assert await ask(line) is None

    run(test)


def test_a_line_that_is_forgotten_has_hung_up() -> None:
    mine, theirs = socket.socketpair()
    with theirs:
        theirs.settimeout(DEADLINE_S)
        line = DirectLine(mine)
        del line
        assert theirs.recv(1) == b""


def test_envelopes_come_in_any_pieces() -> None:
    sent = [Envelope(call=n, message=bytes([n]) * n * 50) for n in range(1, 5)]
    raw, come = b"".join(map(pack, sent)), bytearray()
    got: list[Envelope] = []
    for at in range(0, len(raw), 37):
        come += raw[at : at + 37]
        got += unpack(come)
    assert got == sent
    assert not come


@pytest.mark.parametrize("raw", [b"\xff\xff\xff\xff", b"\x03\x00\x00\x00\xff\xff\xff"])
def test_what_is_no_envelope_is_refused(raw: bytes) -> None:
    with pytest.raises(errors.ProtocolError):
        list(unpack(bytearray(raw)))
