"""A line of the bulk transport and the threads that move its bytes: who hands over to whom, and how much waits."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from paramserver.frames import Frame
from paramserver.pki import certs
from paramserver.transport.bulk import line as lines
from paramserver.transport.bulk import movers as threads
from paramserver.transport.bulk.line import Line, LostError
from paramserver.transport.bulk.records import Kind, Record, of_frame
from paramserver.transport.bulk.sockets import Plain, tune
from paramserver.transport.bulk.tls import Contexts, greet
from paramserver.transport.security.access import Security
from paramserver.transport.security.policy import SERVER, WORKER
from tests.support.contract.requests import MIB, T
from tests.support.contract.trust import member

Test = Callable[[Line, Line], Awaitable[None]]


def run(test: Test, ours: Security | None = None, theirs: Security | None = None) -> None:
    """Run a test with both ends of a connection, over TLS if they have certificates."""

    async def main() -> None:
        async with both_ends(ours, theirs) as (one, other), asyncio.timeout(T):
            await test(one, other)

    asyncio.run(main())


@asynccontextmanager
async def both_ends(ours: Security | None = None, theirs: Security | None = None) -> AsyncIterator[tuple[Line, Line]]:
    """A line at each end of a connection. See `run`."""
    one, other = pair()
    if ours is None or theirs is None:
        tune(one)
        tune(other)
        ends = [Line(Plain(one)), Line(Plain(other))]
    else:
        calling = greet(one, Contexts(ours.certificates, called=False).current()[1], SERVER)
        called = greet(other, Contexts(theirs.certificates, called=True).current()[1])
        ends = [Line(moving) for moving, _ in await asyncio.gather(calling, called)]
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.close()
        await asyncio.wait_for(asyncio.gather(*(end.released() for end in ends)), T)


@asynccontextmanager
async def socket_and_end() -> AsyncIterator[tuple[socket.socket, Line]]:
    """A line, and a bare socket as its peer."""
    one, two = pair()
    tune(two)
    end = Line(Plain(two))
    try:
        with one:
            yield one, end
    finally:
        end.close()
        await asyncio.wait_for(end.released(), T)


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection that holds little itself."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 256 << 10)
        one = socket.create_connection(door.getsockname(), T)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 256 << 10)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 256 << 10)
        return one, door.accept()[0]


def frames(count: int, nbytes: int) -> list[Record]:
    """Records of frames, each with another header and other data."""
    data = memoryview(random.Random(count).randbytes(nbytes + count))
    return [of_frame(Frame(b"%d" % number, (data[number:][:nbytes],))) for number in range(count)]


async def send_all(end: Line, records: list[Record]) -> None:
    for record in records:
        await end.send(record)


async def receive_all(end: Line, count: int) -> list[Record]:
    return [await end.receive() for _ in range(count)]


def same(got: list[Record], sent: list[Record]) -> bool:
    return [(one.kind, one.header, one.data()) for one in got] == [(one.kind, one.header, one.data()) for one in sent]


def hand_overs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the pieces of work that lines give to threads from now on."""
    jobs: list[str] = []
    before = Line._in_thread

    def counted(self: Line, work: Callable[[], None]) -> None:
        jobs.append(work.__name__)
        before(self, work)

    monkeypatch.setattr(Line, "_in_thread", counted)
    return jobs


def test_one_thread_sends_several_records_without_a_hand_over_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread goes on with what its sender gives meanwhile."""
    # On a busy machine the peer may not read for some milliseconds.
    monkeypatch.setattr(lines, "_PATIENCE_S", T)
    jobs = hand_overs(monkeypatch)
    sent = frames(1, 4 * MIB) * 24

    async def test(one: Line, other: Line) -> None:
        _, got = await asyncio.gather(send_all(one, sent), receive_all(other, len(sent)))
        assert len(got) == len(sent)

    run(test)
    # A thread begins with the first record. Another one begins each time when all that was given is sent.
    assert 1 <= jobs.count("_move_out") <= 9


def one_mover(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread moves the bytes of all lines. It waits for a peer for hours unless other work needs it."""
    monkeypatch.setattr(threads, "_THREADS", 1)
    monkeypatch.setattr(lines, "_PATIENT", 10**6)
    only = threads.Movers()
    monkeypatch.setattr(lines, "movers", lambda: only)


def test_a_thread_takes_turns_with_other_work_that_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends share one thread: it sends a part, receives it, and so on."""
    one_mover(monkeypatch)
    jobs = hand_overs(monkeypatch)
    sent = frames(24, 4 * MIB)

    async def test(one: Line, other: Line) -> None:
        _, got = await asyncio.gather(send_all(one, sent), receive_all(other, len(sent)))
        assert same(got, sent)

    run(test)
    # 96 MiB in turns of at most 16.
    assert jobs.count("_move_out") >= 6


def test_a_peer_that_stops_in_the_middle_costs_no_thread_that_others_need(monkeypatch: pytest.MonkeyPatch) -> None:
    one_mover(monkeypatch)
    half = of_frame(Frame(b"half", (memoryview(bytes(MIB)),)))

    async def main() -> None:
        async with socket_and_end() as (silent, waiting), both_ends() as (one, other), asyncio.timeout(T):
            coming = asyncio.ensure_future(waiting.receive())
            silent.sendall((half.head() + half.data())[: MIB // 2])
            while not waiting.busy:
                await asyncio.sleep(0.01)
            sent = frames(8, MIB)
            _, got = await asyncio.gather(send_all(one, sent), receive_all(other, len(sent)))
            assert same(got, sent)
            assert not coming.done()
            silent.sendall((half.head() + half.data())[MIB // 2 :])
            assert same([await coming], [half])

    asyncio.run(main())


def test_a_sender_waits_while_much_is_under_way_and_goes_on_when_it_is_sent() -> None:
    given: list[int] = []

    async def test(one: Line, other: Line) -> None:
        sent = frames(40, MIB)

        async def send() -> None:
            for number, record in enumerate(sent):
                await one.send(record)
                given.append(number)

        task = asyncio.ensure_future(send())
        while not other._full:  # nobody takes what has come
            await asyncio.sleep(0.01)
        held = (lines._ROOM_OUT_BYTES + lines._ROOM_IN_BYTES) // MIB
        # The sockets hold less than four records.
        assert len(given) <= held + 4
        assert not task.done()
        assert same(await receive_all(other, len(sent)), sent)
        await task

    run(test)


def test_what_comes_is_left_in_the_socket_while_nobody_takes_it() -> None:
    async def test(one: Line, other: Line) -> None:
        task = asyncio.ensure_future(send_all(one, frames(40, MIB)))
        while not (other._paused and not other.busy):
            await asyncio.sleep(0.01)
        assert sum(record.nbytes for record in other._come) <= lines._ROOM_IN_BYTES + 2 * MIB
        assert len(await receive_all(other, 40)) == 40
        await task

    run(test)


def test_a_record_that_comes_slowly_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver sleeps until much has come, and still knows that something comes."""
    monkeypatch.setattr(lines, "_STALL_S", 0.2)
    record = of_frame(Frame(b"slow", (memoryview(bytes(range(256)) * 1024),)))
    raw = record.head() + record.data()

    async def main() -> None:
        async with socket_and_end() as (one, end):
            coming = asyncio.ensure_future(end.receive())
            for start in range(0, 40 * 1024, 1024):  # 0.8 s
                one.sendall(raw[start : start + 1024])
                await asyncio.sleep(0.02)
            assert not coming.done()
            one.sendall(raw[40 * 1024 :])
            assert same([await asyncio.wait_for(coming, T)], [record])

    asyncio.run(main())


def test_a_receiver_is_woken_for_many_bytes_at_once_and_for_the_last_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of a megabyte that comes in pieces of four kilobytes is received with few calls."""
    counts: list[int] = []
    before = Plain.receive

    def receive(self: Plain, into: memoryview) -> int | None:
        count = before(self, into)
        counts.append(count or 0)
        return count

    monkeypatch.setattr(Plain, "receive", receive)
    record = of_frame(Frame(b"pieces", (memoryview(random.Random(1).randbytes(MIB + 77)),)))
    raw = record.head() + record.data()

    async def main() -> None:
        async with socket_and_end() as (one, end):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            coming = asyncio.ensure_future(end.receive())
            for start in range(0, len(raw), 4096):
                one.sendall(raw[start : start + 4096])
                await asyncio.sleep(0.0005)
            assert same([await asyncio.wait_for(coming, T)], [record])

    asyncio.run(main())
    # Without that it is one call for each of 257 pieces, and one more that finds nothing.
    assert len([count for count in counts if count]) < 60


def test_records_that_waited_when_the_line_was_lost_are_received_and_then_the_reason_is_raised() -> None:
    async def test(one: Line, other: Line) -> None:
        task = asyncio.ensure_future(send_all(one, frames(40, MIB)))
        while not (other._paused and not other.busy):
            await asyncio.sleep(0.01)
        other.close("closed while much waited")
        await other.released()
        waiting = len(other._come)
        assert waiting > lines._ROOM_IN_BYTES // (2 * MIB)
        assert len(await receive_all(other, waiting)) == waiting
        with pytest.raises(LostError, match="closed while much waited"):
            await other.receive()
        one.close()
        with pytest.raises(LostError):
            await task

    run(test)


def test_a_line_that_is_closed_while_a_thread_sends_gives_the_thread_back() -> None:
    """Also if it is closed between a look at the waiting pieces and the taking of one."""
    closed: list[bool] = []

    async def test(one: Line, other: Line) -> None:
        loop = asyncio.get_running_loop()

        async def close() -> None:
            one.close("closed in the middle")
            closed.append(True)

        class Closing(deque[memoryview]):
            def popleft(self) -> memoryview:
                if not closed:
                    asyncio.run_coroutine_threadsafe(close(), loop).result(T)
                return super().popleft()

        one._going = Closing()
        with pytest.raises(LostError, match="closed in the middle"):
            await one.send(*frames(20, MIB))
        await one.released()
        assert closed
        assert not one.busy

    run(test)


def test_many_records_both_ways_at_once_arrive_in_order() -> None:
    async def test(one: Line, other: Line) -> None:
        there, back = frames(150, 300_000), frames(149, 310_000)

        async def both(end: Line, going: list[Record], coming: int) -> list[Record]:
            got = asyncio.ensure_future(receive_all(end, coming))
            await send_all(end, going)
            return await got

        at_other, at_one = await asyncio.gather(both(other, back, len(there)), both(one, there, len(back)))
        assert same(at_other, there)
        assert same(at_one, back)
        assert one.quiet
        assert other.quiet

    run(test)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trust") / "certs"
    certs.init(directory)
    return directory


def test_over_tls_data_of_every_size_arrives_as_it_was(home: Path) -> None:
    """What is moved by several calls of OpenSSL at once keeps its order, both ways at the same time."""
    rng = random.Random(7)
    sizes = [1, 16_383, 16_384, 16_385, 70_000, 256 << 10, (256 << 10) + 1, 5 * MIB + 3]
    sent = [of_frame(Frame(b"h" * rng.randrange(60), (memoryview(rng.randbytes(size)),))) for size in sizes * 2]

    async def test(one: Line, other: Line) -> None:
        results = await asyncio.gather(
            receive_all(other, len(sent)), receive_all(one, len(sent)), send_all(one, sent), send_all(other, sent)
        )
        assert same(results[0], sent)
        assert same(results[1], sent)

    run(test, member(home, WORKER), member(home, SERVER))


def test_over_tls_what_came_before_the_peer_hung_up_is_received_first(home: Path) -> None:
    async def test(one: Line, other: Line) -> None:
        await one.send(*frames(2, 40_000), Record(Kind.END))
        while not one.quiet:
            await asyncio.sleep(0.01)
        # The descriptor is closed as a process that ends closes it.
        socket.socket.shutdown(one._sock._sock, socket.SHUT_WR)  # type: ignore[attr-defined]
        got = await receive_all(other, 3)
        assert [record.kind for record in got] == [Kind.FRAME, Kind.FRAME, Kind.END]
        with pytest.raises(LostError, match="it stopped or closed the connection"):
            await other.receive()

    run(test, member(home, WORKER), member(home, SERVER))
