"""The bulk transport's own rules: tokens, roles, TLS, what is no record, peers that stall, and ways around it.

What all transports have in common is in test_channel.py.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import random
import shutil
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from paramserver import errors
from paramserver.frames import AnyFrame, Frame, message_of
from paramserver.pki import certs
from paramserver.transport.base import Caller
from paramserver.transport.bulk import BulkChannel, line, serve
from paramserver.transport.bulk import server as servers
from paramserver.transport.bulk.reading import Reader
from paramserver.transport.bulk.records import HEAD_BYTES, LIMITS, Kind, Record, of_error, of_frame, parse
from paramserver.transport.bulk.sockets import Plain
from paramserver.transport.bulk.tls import Contexts, greet
from paramserver.transport.grpc import connect
from paramserver.transport.grpc import serve as serve_grpc
from paramserver.transport.limits import Limits
from paramserver.transport.security.access import OPEN, Security
from paramserver.transport.security.policy import COORDINATOR, SERVER, WORKER
from paramserver.v1 import shard_pb2
from tests.support.contract.channels import BulkWires, Offering, Parked, Stub, run, spawn
from tests.support.contract.requests import MIB, PULL, PUSH, WANT, T, collect
from tests.support.contract.trust import member

HELLO = struct.Struct("!2sBBIQ")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `certs init` makes."""
    directory = tmp_path_factory.mktemp("trust") / "certs"
    certs.init(directory)
    return directory


@pytest.fixture
def log_lines() -> Iterator[list[Any]]:
    with capture_logs() as lines:
        yield lines


async def take(frames: AsyncIterator[AnyFrame]) -> shard_pb2.PushResponse:
    got = 0
    async for frame in frames:
        got += len(frame)
    return shard_pb2.PushResponse(version=got)


async def give(_: object) -> AsyncIterator[AnyFrame]:
    yield Frame(b"", [memoryview(b"weights")])


class Both(BulkWires):
    """A server with both ports, and its parts."""

    async def open(
        self, service: object, security: Security = OPEN, limits: Limits | None = None, offering: bool = True
    ) -> Any:
        bulk = await serve([("Shard", service)], security=security, limits=limits or Limits())
        self.opened.append(bulk)  # type: ignore[arg-type]
        offered = Offering(service, bulk) if offering else service
        main = await serve_grpc([("Shard", offered)], security=security)
        self.opened.append(main)
        self.bulk = bulk
        return main

    def channel(self, address: str, security: Security = OPEN) -> BulkChannel:
        channel = BulkChannel(connect(address, security, SERVER), security, SERVER)
        self.opened.append(channel)
        return channel

    async def token(self, address: str, security: Security = OPEN) -> bytes:
        """A token, as a caller gets one."""
        main = connect(address, security, SERVER)
        self.opened.append(main)
        offer = await main.call("Shard.OpenBulk", shard_pb2.OpenBulkRequest(), timeout=T)
        assert isinstance(offer, shard_pb2.OpenBulkResponse)
        assert offer.port == self.bulk.port
        return offer.token

    async def stranger(self) -> Stranger:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.bulk.port)
        return Stranger(reader, writer)


class Stranger:
    """A connection whose bytes a test writes by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, *records: Record) -> None:
        for record in records:
            self._writer.write(record.head() + record.data())

    def raw(self, data: bytes) -> None:
        self._writer.write(data)

    async def closed(self) -> bytes:
        """What comes until the server has closed the connection."""
        try:
            return await self._reader.read()
        except ConnectionError:
            return b""
        finally:
            self._writer.close()

    async def record(self) -> Record:
        head = parse(await self._reader.readexactly(HEAD_BYTES))
        header = await self._reader.readexactly(head.header)
        return Record(head.kind, header, (memoryview(await self._reader.readexactly(head.data)),))


# ---- records


@given(st.sampled_from(list(Kind)), st.data())
def test_a_head_says_what_follows(kind: Kind, data: st.DataObject) -> None:
    header = data.draw(st.binary(max_size=min(LIMITS[kind].header, 64)))
    pieces = data.draw(st.lists(st.binary(min_size=1, max_size=20), max_size=3)) if LIMITS[kind].data else []
    record = Record(kind, header, [memoryview(piece) for piece in pieces])
    head = parse(record.head()[:HEAD_BYTES])
    assert (head.kind, head.header, head.data) == (kind, len(header), sum(map(len, pieces)))
    assert record.nbytes == len(record.head()) + head.data


@given(st.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES))
def test_anything_else_is_refused(raw: bytes) -> None:
    try:
        head = parse(raw)
    except errors.ProtocolError:
        return
    assert head.header <= LIMITS[head.kind].header
    assert head.data <= LIMITS[head.kind].data


@pytest.mark.parametrize("kind", list(Kind))
def test_no_record_is_larger_than_its_kind_may_be(kind: Kind) -> None:
    limits = LIMITS[kind]
    parse(HELLO.pack(b"PS", 1, kind, limits.header, limits.data))
    for header, data in ((limits.header + 1, limits.data), (limits.header, limits.data + 1), (2**32 - 1, 2**63)):
        with pytest.raises(errors.ProtocolError, match="claims"):
            parse(HELLO.pack(b"PS", 1, kind, header, data))


@pytest.mark.parametrize("seed", range(20))
def test_records_are_put_together_whatever_pieces_they_come_in(seed: int) -> None:
    rng = random.Random(seed)
    sent = [
        of_frame(Frame(rng.randbytes(rng.randrange(50)), [memoryview(rng.randbytes(rng.choice([1, 100, 9000])))]))
        if rng.random() < 0.7
        else rng.choice([Record(Kind.END), of_error("X", "y"), of_frame(b"message")])
        for _ in range(30)
    ]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        reader, got, going = Reader(Plain(ours)), [], b"".join(one.head() + one.data() for one in sent)
        while going or reader.amid:
            count = rng.choice([1, 7, 500, 20_000])
            theirs.sendall(going[:count])
            going = going[count:]
            while (record := reader.next(rng.choice([0, 64]))) is not None:
                got.append(record)
        assert [(one.kind, one.header, one.data()) for one in got] == [
            (one.kind, one.header, one.data()) for one in sent
        ]
        theirs.close()
        assert reader.next() is None
        assert reader.hung_up


def test_data_is_received_where_it_is_aligned() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        reader = Reader(Plain(ours))
        record = of_frame(Frame(b"abc", [memoryview(bytes(range(250)) * 40)]))
        theirs.sendall(record.head() + record.data())
        got = reader.next()
        assert got is not None
        import numpy as np

        assert np.frombuffer(got.pieces[0], np.uint8).ctypes.data % 64 == 0


def test_a_frame_is_one_message_for_transports_that_send_no_pieces() -> None:
    frame = Frame(b"\x20\x01", [memoryview(b"abc"), memoryview(b"def")])
    parsed = shard_pb2.Frame.FromString(message_of(frame))
    assert parsed.data == b"abcdef" == bytes(frame.data())
    assert parsed.header.SerializeToString() == b"" or parsed.HasField("header")


# ---- who may come


def test_a_token_opens_one_connection_and_only_soon(monkeypatch: pytest.MonkeyPatch, log_lines: list[Any]) -> None:
    async def test(w: Both) -> None:
        main = await w.open(Stub(push=take))
        token = await w.token(main.address)
        first = await w.stranger()
        first.send(Record(Kind.HELLO, token), Record(Kind.CALL, PUSH.encode()), of_frame(b"frame"), Record(Kind.END))
        assert shard_pb2.PushResponse.FromString((await first.record()).data()).version == 5
        again = await w.stranger()
        again.send(Record(Kind.HELLO, token))
        assert await again.closed() == b""
        monkeypatch.setattr(servers, "TOKEN_S", -1.0)
        old = await w.stranger()
        old.send(Record(Kind.HELLO, await w.token(main.address)))
        assert await old.closed() == b""
        assert [one["reason"] for one in log_lines] == ["a wrong token, or an old one"] * 2
        first.raw(b"")
        first._writer.close()

    run(Both, test)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "no record"),
        (Record(Kind.HELLO, b"x" * 32).head(), "wrong token"),
        (HELLO.pack(b"PS", 1, Kind.HELLO, 65, 0), "claims 65"),
        (HELLO.pack(b"PS", 1, Kind.FRAME, 5, 2**40), "claims 5 and"),
        (HELLO.pack(b"PS", 9, Kind.HELLO, 5, 0), "version 9"),
        (HELLO.pack(b"PS", 1, 99, 5, 0), "kind 99"),
        (Record(Kind.CALL, b"Shard.Push").head(), "did not begin with a token"),
        (Record(Kind.FRAME, b"", (memoryview(bytes(2 * MIB)),)).head() + bytes(2 * MIB), "did not begin with a token"),
    ],
)
def test_who_has_no_token_is_dropped_with_one_line(sent: bytes, reason: str, log_lines: list[Any]) -> None:
    async def test(w: Both) -> None:
        main = await w.open(Stub(push=take))
        stranger = await w.stranger()
        stranger.raw(sent)
        assert await stranger.closed() == b""
        assert [one["log_level"] for one in log_lines] == ["warning"]
        assert reason in log_lines[0]["reason"]
        assert await w.channel(main.address).upload(PUSH, [b"xyz"], timeout=T) == shard_pb2.PushResponse(version=3)

    run(Both, test)


@pytest.mark.parametrize(
    "sent", [b"", HELLO.pack(b"PS", 1, Kind.HELLO, 32, 0)[:7], Record(Kind.HELLO, bytes(32)).head()[:-1]]
)
def test_who_says_nothing_or_half_is_dropped_in_time(sent: bytes, log_lines: list[Any]) -> None:
    async def test(w: Both) -> None:
        await w.open(Stub(push=take), limits=Limits(handshake_s=0.2))
        stranger = await w.stranger()
        stranger.raw(sent)
        assert await stranger.closed() == b""
        assert len(log_lines) == 1

    run(Both, test)


def test_many_strangers_cost_others_nothing() -> None:
    async def test(w: Both) -> None:
        main = await w.open(Stub(push=take))
        channel = w.channel(main.address)
        await channel.upload(PUSH, [b"x"], timeout=T)
        strangers = [await w.stranger() for _ in range(300)]
        for _ in range(20):
            assert await channel.upload(PUSH, [b"xyz"], timeout=T) == shard_pb2.PushResponse(version=3)
        for stranger in strangers:
            stranger._writer.close()

    run(Both, test)


def test_idle_strangers_keep_no_member_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """All come from this host, so the oldest one gives way; a member shows its token before it is the oldest."""
    monkeypatch.setattr("paramserver.transport.entrance.strangers", lambda: 16)

    async def test(w: Both) -> None:
        main = await w.open(Stub(push=take))
        strangers = [await w.stranger() for _ in range(64)]
        for _ in range(4):
            channel = w.channel(main.address)
            assert await channel.upload(PUSH, [b"xyz"], timeout=T) == shard_pb2.PushResponse(version=3)
            assert channel.kind == "bulk"
        async with asyncio.timeout(T):
            for stranger in strangers[:48]:
                assert await stranger.closed() == b""
        for stranger in strangers:
            stranger._writer.close()

    run(Both, test)


def test_nothing_but_a_token_is_taken_from_a_stranger() -> None:
    """A hello that does not end, with 12 MiB behind it: the server takes 80 bytes at most."""

    async def test(w: Both) -> None:
        await w.open(Stub(push=take))
        stranger = await w.stranger()
        stranger.send(Record(Kind.HELLO, b"x" * 64))
        stranger.raw(bytes(12 * MIB))
        assert await stranger.closed() == b""
        # What the system had not delivered cannot be sent any more.
        assert stranger._writer.transport.get_write_buffer_size() == 0
        late = await w.stranger()
        late.raw(HELLO.pack(b"PS", 1, Kind.FRAME, 0, 12 * MIB))
        assert await late.closed() == b""

    run(Both, test)


def test_without_descriptors_the_server_waits_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """EMFILE leaves the port readable: the server must not ask again and again."""

    async def test(w: Both) -> None:
        main = await w.open(Stub(push=take))
        tries, full, accept = 0, True, socket.socket.accept

        def refusing(sock: socket.socket) -> Any:
            nonlocal tries
            if sock.getsockname()[1] != w.bulk.port or not full:
                return accept(sock)
            tries += 1
            raise OSError(errno.EMFILE, "too many open files")

        monkeypatch.setattr(socket.socket, "accept", refusing)
        channel = w.channel(main.address)
        call = spawn(channel.upload(PUSH, [b"xyz"], timeout=T))
        while not tries:
            await asyncio.sleep(0.001)
        turns = 0
        async with asyncio.timeout(T):
            while tries < 2:
                turns += 1
                await asyncio.sleep(0.001)
        assert turns > 50  # half a second has passed between both
        full = False
        assert await call == shard_pb2.PushResponse(version=3)

    run(Both, test)


def test_a_connection_that_is_closed_at_once_is_one_that_failed(log_lines: list[Any]) -> None:
    """Connecting succeeds at a port that is full. The next try goes over gRPC."""

    async def test(w: Both) -> None:
        main = await w.open(Stub(push=take))

        def close(sock: socket.socket, _: str, number: int) -> Any:
            w.bulk._entrance.settled(number)
            sock.close()

        w.bulk._entrance._take = close
        channel = w.channel(main.address)
        with pytest.raises(errors.UnavailableError):
            await channel.upload(PUSH, [b"xyz"], timeout=T)
        assert await channel.upload(PUSH, [b"xyz"], timeout=T) == shard_pb2.PushResponse(version=3)
        assert "cannot be reached" in channel.kind
        assert [one["event"] for one in log_lines] == [
            "weights and gradients go over gRPC: the bulk port of a server cannot be reached"
        ]

    run(Both, test)


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([Record(Kind.END)], "END came where a call begins"),
        ([Record(Kind.HELLO, b"again")], "HELLO came where a call begins"),
        ([Record(Kind.CALL, PUSH.encode()), Record(Kind.REPLY)], ""),
    ],
)
def test_records_out_of_order_end_the_connection_or_the_call(
    records: list[Record], reason: str, log_lines: list[Any]
) -> None:
    async def test(w: Both) -> None:
        main = await w.open(Stub(push=take))
        stranger = await w.stranger()
        stranger.send(Record(Kind.HELLO, await w.token(main.address)), *records)
        if reason:
            assert await stranger.closed() == b""
            assert reason in log_lines[0]["reason"]
        else:
            answer = await stranger.record()
            assert answer.kind is Kind.ERROR
            assert b"REPLY came where a frame belongs" in answer.data()
            stranger._writer.close()

    run(Both, test)


def test_random_bytes_after_a_token_harm_nobody() -> None:
    async def test(w: Both) -> None:
        main = await w.open(Stub(push=take))
        for seed in range(30):
            rng = random.Random(seed)
            stranger = await w.stranger()
            stranger.send(Record(Kind.HELLO, await w.token(main.address)), Record(Kind.CALL, PUSH.encode()))
            stranger.raw(rng.randbytes(rng.choice([3, 16, 500])))
            stranger._writer.write_eof()
            await stranger.closed()
        assert await w.channel(main.address).upload(PUSH, [b"xyz"], timeout=T) == shard_pb2.PushResponse(version=3)

    run(Both, test)


def test_claims_cost_no_memory() -> None:
    """A hundred connections that claim a frame of 8 MiB each, and send nothing of it."""

    async def test(w: Both) -> None:
        main = await w.open(Stub(push=take))
        claim = HELLO.pack(b"PS", 1, Kind.FRAME, 0, 8 * MIB)
        gc.collect()
        before = _resident()
        strangers = []
        for _ in range(100):
            stranger = await w.stranger()
            stranger.send(Record(Kind.HELLO, await w.token(main.address)), Record(Kind.CALL, PUSH.encode()))
            stranger.raw(claim)
            strangers.append(stranger)
        channel = w.channel(main.address)
        assert await channel.upload(PUSH, [b"xyz"], timeout=T) == shard_pb2.PushResponse(version=3)
        assert _resident() - before < 100 * MIB
        for stranger in strangers:
            stranger._writer.close()

    run(Both, test)


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_record_that_stops_coming_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "_STALL_S", 0.1)
    ended: asyncio.Queue[str] = asyncio.Queue()

    async def push(frames: AsyncIterator[AnyFrame]) -> shard_pb2.PushResponse:
        try:
            async for _ in frames:
                pass
        except BaseException as error:
            ended.put_nowait(type(error).__name__)
            raise
        return shard_pb2.PushResponse()

    async def test(w: Both) -> None:
        main = await w.open(Stub(push=push))
        stranger = await w.stranger()
        stranger.send(Record(Kind.HELLO, await w.token(main.address)), Record(Kind.CALL, PUSH.encode()))
        stranger.raw(HELLO.pack(b"PS", 1, Kind.FRAME, 0, MIB) + bytes(1000))
        assert await stranger.closed() == b""
        assert await ended.get() in ("UnavailableError", "CancelledError")

    run(Both, test)


def test_a_reader_that_takes_nothing_holds_up_nobody_else() -> None:
    """More of them than there are threads."""

    async def much(_: object) -> AsyncIterator[AnyFrame]:
        while True:
            yield Frame(b"", [memoryview(bytes(4 * MIB))])

    async def test(w: Both) -> None:
        main = await w.open(Stub(push=take, pull=much))
        strangers = []
        for _ in range(12):
            stranger = await w.stranger()
            stranger.send(Record(Kind.HELLO, await w.token(main.address)), Record(Kind.CALL, PULL.encode()))
            strangers.append(stranger)
        await asyncio.sleep(0.2)
        channel = w.channel(main.address)
        for _ in range(5):
            sent = [Frame(b"", [memoryview(bytes(MIB))])]
            assert await channel.upload(PUSH, sent, timeout=T) == shard_pb2.PushResponse(version=MIB)
        for stranger in strangers:
            stranger._writer.close()

    run(Both, test)


# ---- TLS and roles


def test_with_tls_frames_go_both_ways(home: Path) -> None:
    async def test(w: Both) -> None:
        main = await w.open(Stub(push=take, pull=give), member(home, SERVER))
        channel = w.channel(main.address, member(home, WORKER))
        frames = [Frame(b"", [memoryview(bytes(MIB)), memoryview(b"x" * 70_000)]) for _ in range(20)]
        reply = await channel.upload(PUSH, frames, timeout=T)
        assert reply == shard_pb2.PushResponse(version=20 * (MIB + 70_000))
        assert [message_of(frame)[-7:] for frame in await collect(channel)] == [b"weights"]
        assert channel.kind == "bulk"
        assert w.bulk.connections == 1

    run(Both, test)


def test_with_tls_a_connection_needs_a_certificate_of_the_role_that_got_the_token(
    home: Path, log_lines: list[Any]
) -> None:
    async def test(w: Both) -> None:
        main = await w.open(Stub(push=take), member(home, SERVER))
        stranger = await w.stranger()  # no TLS at all
        stranger.send(Record(Kind.HELLO, await w.token(main.address, member(home, WORKER))))
        await stranger.closed()
        assert len(log_lines) == 1
        worker, coordinator = member(home, WORKER), member(home, COORDINATOR)
        token = await w.token(main.address, worker)
        moving, _ = await greet(await _socket(w.bulk.port), _context(coordinator), SERVER)
        over = line.Line(moving)
        await over.send(Record(Kind.HELLO, token))
        await over.ended()
        assert "the token was for another one" in log_lines[-1]["reason"]
        await over.released()

    run(Both, test)


def test_another_authority_is_not_trusted(home: Path, tmp_path: Path, log_lines: list[Any]) -> None:
    certs.init(tmp_path / "other")
    mixed = Path(shutil.copytree(home, tmp_path / "mixed"))

    async def test(w: Both) -> None:
        main = await w.open(Stub(push=take), member(home, SERVER))
        channel = w.channel(main.address, member(mixed, WORKER))
        # Only the certificate of the bulk connection is of another authority.
        channel._contexts = type(channel._contexts)(member(tmp_path / "other", WORKER).certificates, called=False)
        assert await channel.upload(PUSH, [b"xyz"], timeout=T) == shard_pb2.PushResponse(version=3)
        assert channel.kind.startswith("grpc: port ")
        assert "cannot be reached" in channel.kind

    run(Both, test)


def _context(security: Security) -> Any:
    return Contexts(security.certificates, called=False).current()[1]


async def _socket(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    return sock


def test_a_connection_gives_no_more_rights_than_the_call_that_asked_for_it(log_lines: list[Any]) -> None:
    """A worker may not forward, whatever it sends over its connection."""

    async def test(w: Both) -> None:
        main = await w.open(Stub(push=take, forward=take))
        token = await w.token(main.address)
        (ticket,) = w.bulk._tickets.values()
        w.bulk._tickets = dict.fromkeys(
            w.bulk._tickets, servers._Ticket(Caller(frozenset({WORKER}), admin=False), None, ticket.until)
        )
        stranger = await w.stranger()
        stranger.send(Record(Kind.HELLO, token), Record(Kind.CALL, b"Shard.Forward"), Record(Kind.END))
        answer = await stranger.record()
        assert (answer.kind, answer.header) == (Kind.ERROR, b"DeniedError")
        stranger._writer.close()

    run(Both, test)


# ---- ways around it


def test_a_server_without_bulk_connections_is_reached_over_grpc() -> None:
    async def none(_: object) -> shard_pb2.OpenBulkResponse:
        return shard_pb2.OpenBulkResponse(reason="cluster.transport is grpc at the server")

    async def test(w: Both) -> None:
        main = await w.open(Stub(push=take, open_bulk=none), offering=False)
        channel = w.channel(main.address)
        assert await channel.upload(PUSH, [Frame(b"", [memoryview(b"xyz")])], timeout=T)
        assert channel.kind == "grpc: cluster.transport is grpc at the server"
        assert w.bulk.connections == 0

    run(Both, test)


def test_where_the_port_cannot_be_reached_frames_go_over_grpc(log_lines: list[Any]) -> None:
    async def test(w: Both) -> None:
        main = await w.open(Stub(push=take, pull=give))
        w.bulk._close_ports()
        channel = w.channel(main.address)
        for _ in range(3):
            assert await channel.upload(PUSH, [b"xyz"], timeout=T) == shard_pb2.PushResponse(version=3)
        assert len(await collect(channel)) == 1
        assert channel.kind.startswith("grpc: port ")
        assert [one["event"] for one in log_lines] == [
            "weights and gradients go over gRPC: the bulk port of a server cannot be reached"
        ]

    run(Both, test)


def test_a_connection_takes_one_call_after_the_other() -> None:
    async def test(w: Both) -> None:
        main = await w.open(Stub(push=take, pull=give))
        channel = w.channel(main.address)
        for _ in range(10):
            await channel.upload(PUSH, [b"xyz"], timeout=T)
            await collect(channel)
        assert w.bulk.connections == 1
        both = await asyncio.gather(*(channel.upload(PUSH, [b"xyz"], timeout=T) for _ in range(5)))
        assert len(both) == 5
        assert w.bulk.connections <= 5

    run(Both, test)


def test_a_call_that_was_given_up_leaves_nothing_on_a_connection() -> None:
    """The next call gets its own answer, not that of the call before."""

    async def test(w: Both) -> None:
        parked = Parked()
        main = await w.open(Stub(push=take, pull=parked.download))
        channel = w.channel(main.address)
        given_up = spawn(collect(channel))
        await parked.until(lambda: parked.arrived == 1)
        given_up.cancel()
        await asyncio.wait([given_up])
        await parked.until(lambda: parked.left == 1)
        assert await channel.upload(PUSH, [b"xyz"], timeout=T) == shard_pb2.PushResponse(version=3)

    run(Both, test)


def test_pieces_are_sent_without_being_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    def joined(_: Frame) -> bytes:
        raise AssertionError("the pieces of a frame were joined")

    monkeypatch.setattr(Frame, "message", joined)
    data = memoryview(bytes(9 * MIB))

    async def test(w: Both) -> None:
        main = await w.open(Stub(push=take, pull=give))
        channel = w.channel(main.address)
        frames = [Frame(b"", [data[at : at + MIB], data[:5]]) for at in range(0, len(data), MIB)]
        assert await channel.upload(PUSH, frames, timeout=T) == shard_pb2.PushResponse(version=9 * (MIB + 5))
        assert len(await collect(channel)) == 1

    run(Both, test)


# ---- where frames are received


def test_data_is_received_where_the_caller_wants_it() -> None:
    data = random.Random(1).randbytes(MIB)

    async def three(_: object) -> AsyncIterator[AnyFrame]:
        for name in (b"here", b"elsewhere", b"here"):
            yield Frame(name, [memoryview(data)])

    async def test(w: Both) -> None:
        main = await w.open(Stub(pull=three))
        channel, room, asked = w.channel(main.address), bytearray(MIB), []

        def place(header: bytes, nbytes: int) -> memoryview | None:
            asked.append((header, nbytes))
            return memoryview(room) if header == b"here" else None

        got = [frame async for frame in channel.download(PULL, WANT, timeout=T, place=place)]
        assert asked == [(b"here", MIB), (b"elsewhere", MIB), (b"here", MIB)]
        assert room == data
        assert [isinstance(one, Frame) and one.pieces[0].obj is room for one in got] == [True, False, True]
        # The next call on the same connection has no such places.
        room[:] = bytes(MIB)
        assert len([frame async for frame in channel.download(PULL, WANT, timeout=T)]) == 3
        assert (room, w.bulk.connections) == (bytearray(MIB), 1)

    run(Both, test)


@pytest.mark.parametrize("how", ["closed", "cancelled"])
def test_nothing_is_written_to_the_places_of_a_call_that_has_ended(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    receive = Plain.receive

    def slowly(self: Plain, into: memoryview) -> int | None:
        if len(into) > MIB:
            time.sleep(0.02)
            into[:1] = b"\x01"
        return receive(self, into)

    async def endless(_: object) -> AsyncIterator[AnyFrame]:
        while True:
            yield Frame(b"x", [memoryview(b"\x01" * 4 * MIB)])

    async def take(channel: BulkChannel, room: bytearray, came: asyncio.Event) -> None:
        places = channel.download(PULL, WANT, timeout=T, place=lambda *_: memoryview(room))
        async with aclosing(places) as frames:
            async for _ in frames:
                came.set()
                if how == "closed":
                    return

    async def test(w: Both) -> None:
        main = await w.open(Stub(pull=endless))
        channel = w.channel(main.address)
        monkeypatch.setattr(Plain, "receive", slowly)
        for _ in range(5):
            room, came = bytearray(4 * MIB), asyncio.Event()
            task = asyncio.ensure_future(take(channel, room, came))
            await came.wait()
            task.cancel() if how == "cancelled" else None
            await asyncio.wait([task])
            room[:] = bytes(4 * MIB)
            await asyncio.sleep(0.05)
            assert room.count(0) == 4 * MIB, "something was written after the end"

    run(Both, test)


def test_a_connection_can_be_tried_before_it_is_needed(log_lines: list[Any]) -> None:
    async def test(w: Both) -> None:
        main = await w.open(Stub(push=take))
        channel = w.channel(main.address)
        assert await channel.attempt(T) == await channel.attempt(T) == ""
        await channel.upload(PUSH, [b"xyz"], timeout=T)
        assert w.bulk.connections == 1
        await w.bulk.stop()
        other = w.channel(main.address)
        assert "cannot be reached" in await other.attempt(T)
        assert other.kind.startswith("grpc: port")

    run(Both, test)
