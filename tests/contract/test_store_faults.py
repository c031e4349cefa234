"""Faults between a store and its server: the proxy makes them, and each test proves that its fault fired."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path

import pytest

import paramserver.store.redis as implementation
from paramserver.errors import FencedError
from paramserver.store import ConflictError, Entry, Lead, Store, TransientStoreError, open_store
from tests.support.contract.proxy import Proxy, Way
from tests.support.contract.redis_servers import DEADLINE_S, PREFIX, TTL_S, RedisServer, programs, serving


@pytest.fixture(scope="module", params=sorted(programs()))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Each server program in turn."""
    with serving(programs()[request.param], tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture(autouse=True)
def _restored(server: RedisServer) -> Iterator[None]:
    with server.restored():
        yield


def run(server: RedisServer, test: Callable[[Store, Proxy], Awaitable[None]]) -> None:
    """Run ``test`` with a store behind a proxy; its connection exists, and the server knows the scripts."""

    async def main() -> None:
        async with Proxy(server.upstream) as proxy, asyncio.timeout(DEADLINE_S):
            store = open_store(server.tcp_url(proxy.address), PREFIX)
            try:
                await warm(store)
                await test(store, proxy)
            finally:
                await store.close()

    asyncio.run(main())


async def warm(store: Store) -> None:
    """Each script once."""
    await store.save("warm", b"", 0)
    await store.delete("warm")
    await store.lead("warm", "warm", TTL_S)
    await store.resign("warm")
    await store.leader()


# ---- a connection that breaks


@pytest.mark.parametrize("after_bytes", [0, 3])
@pytest.mark.parametrize("way", Way)
def test_a_save_whose_connection_breaks_counts_once(server: RedisServer, way: Way, after_bytes: int) -> None:
    """F13. Cut on the way back: the script has run. On the way there: it has not."""

    async def test(store: Store, proxy: Proxy) -> None:
        proxy.cut(way, after_bytes)
        assert await store.save("k", b"x", 0) == 1
        proxy.check("cut")
        assert proxy.connections == 2
        assert await store.load("k") == Entry(b"x", 1)
        proxy.cut(way, after_bytes)
        assert await store.save("k", b"y", 1) == 2
        assert proxy.fired["cut"] == 2
        assert await store.load("k") == Entry(b"y", 2)

    run(server, test)


@pytest.mark.parametrize("way", Way)
def test_a_lead_whose_connection_breaks_takes_one_term(server: RedisServer, way: Way) -> None:
    """F13."""

    async def test(store: Store, proxy: Proxy) -> None:
        proxy.cut(way)
        assert await store.lead("t", "h", TTL_S) == Lead(True, 2, "h", TTL_S)
        proxy.cut(way)
        assert await store.lead("t", "h", TTL_S, term=2) == Lead(True, 2, "h", TTL_S)
        proxy.cut(way)
        await store.resign("t")
        proxy.cut(way)
        assert await store.leader() is None
        assert proxy.fired["cut"] == 4
        assert await store.lead("u", "u", TTL_S) == Lead(True, 3, "u", TTL_S)

    run(server, test)


@pytest.mark.parametrize("later", [1, 20])
def test_a_save_is_recognized_though_others_have_written_since(server: RedisServer, later: int) -> None:
    """The script has run, its answer is held back, others write, and only then the connection breaks."""

    async def test(store: Store, proxy: Proxy) -> None:
        other = open_store(server.url, PREFIX)
        proxy.pause(Way.REPLY)
        save = asyncio.create_task(store.save("k", b"mine", 0))
        while await other.load("k") is None:
            await asyncio.sleep(0.01)
        for revision in range(1, 1 + later):
            await other.save("k", b"theirs", revision)
        assert (await other.lead("u", "u", TTL_S, floor=7)).term == 8  # and nobody with a lower term may write now
        proxy.check("pause")
        proxy.reset()
        proxy.resume()
        assert await save == 1
        assert await store.load("k") == Entry(b"theirs", 1 + later)
        await other.close()

    run(server, test)


def test_requests_of_long_ago_are_forgotten(server: RedisServer) -> None:
    async def test(store: Store, proxy: Proxy) -> None:
        for revision in range(100):
            await store.save("k", b"", revision)
        with server.admin() as admin:
            assert admin.hlen(PREFIX + "entry:k") == 2 + 32

    run(server, test)


def test_writers_whose_connections_break_at_random(server: RedisServer) -> None:
    """F09, F11: each item that was confirmed is there once, and no item is there twice."""

    async def test(store: Store, proxy: Proxy) -> None:
        chance = random.Random(0)
        unknown = 0

        async def write(item: int) -> None:
            nonlocal unknown
            while True:
                try:
                    entry = await store.load("items") or Entry(b"[]", 0)
                    items = json.loads(entry.value)
                    if item in items:  # a write that was not confirmed
                        unknown += 1
                        return
                    await store.save("items", json.dumps([*items, item]).encode(), entry.revision)
                    return
                except (ConflictError, TransientStoreError):
                    await asyncio.sleep(chance.uniform(0, 0.05))

        async def break_connections() -> None:
            while True:
                await asyncio.sleep(0.005)
                proxy.cut(chance.choice(list(Way)), chance.randrange(300))

        breaking = asyncio.create_task(break_connections())
        await asyncio.gather(*(write(item) for item in range(50)))
        breaking.cancel()
        await proxy.heal()
        assert proxy.fired["cut"] >= 10
        entry = await store.load("items")
        assert entry is not None
        assert Counter(json.loads(entry.value)) == Counter(range(50))
        assert entry.revision == 50

    run(server, test)


# ---- a server that is slow, away, or back


def test_two_seconds_of_latency_do_no_harm(server: RedisServer) -> None:
    """F08. A new connection included, which takes two round trips."""

    async def test(store: Store, proxy: Proxy) -> None:
        proxy.delay(Way.REQUEST, 1.0)
        proxy.delay(Way.REPLY, 1.0)
        fresh = open_store(server.tcp_url(proxy.address), PREFIX)
        start = time.monotonic()
        saved, lead, fresh_saved = await asyncio.gather(
            store.save("a", b"", 0), store.lead("t", "h", TTL_S), fresh.save("b", b"", 0)
        )
        assert (saved, lead, fresh_saved) == (1, Lead(True, 2, "h", TTL_S), 1)
        assert 3.5 < time.monotonic() - start < 8
        proxy.check("delay")
        await fresh.close()

    run(server, test)


def test_a_slow_line_in_small_pieces(server: RedisServer) -> None:
    async def test(store: Store, proxy: Proxy) -> None:
        proxy.slice(Way.REQUEST, 7)
        proxy.slice(Way.REPLY, 1)
        value = bytes(range(256))
        assert await store.save("k", value, 0) == 1
        assert await store.load("k") == Entry(value, 1)
        proxy.slice(Way.REQUEST, 0)
        proxy.slice(Way.REPLY, 0)
        proxy.throttle(Way.REPLY, 50_000)
        assert await store.save("k", value * 40, 1) == 2
        start = time.monotonic()
        assert await store.load("k") == Entry(value * 40, 2)
        assert time.monotonic() - start > 0.1
        proxy.check("slice", "throttle")

    run(server, test)


def test_a_server_that_is_down_and_back(server: RedisServer) -> None:
    """F03: the same store object works again at once; meanwhile each call fails fast, with few connections."""

    async def test(store: Store, proxy: Proxy) -> None:
        await store.save("k", b"x", 0)
        server.stop()
        before = proxy.connections
        for _ in range(10):
            start = time.monotonic()
            with pytest.raises(TransientStoreError, match="no store answers"):
                await store.load("k")
            assert time.monotonic() - start < 1.0
        assert proxy.connections - before <= 20
        server.start()
        start = time.monotonic()
        assert await store.load("k") == Entry(b"x", 1)
        assert await store.save("k", b"y", 1) == 2
        assert time.monotonic() - start < 2.0

    run(server, test)


def test_a_port_that_refuses_is_tried_once(server: RedisServer) -> None:
    async def test(store: Store, proxy: Proxy) -> None:
        attempts = 0
        connect = asyncio.open_connection

        async def counted(*arguments: object, **options: object) -> object:
            nonlocal attempts
            attempts += 1
            return await connect(*arguments, **options)  # type: ignore[arg-type]

        proxy.refuse()
        proxy.reset()
        proxy.check("reset")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio, "open_connection", counted)
            for _ in range(5):
                with pytest.raises(TransientStoreError, match="no store answers"):
                    await store.load("k")
        assert attempts == 5
        await proxy.accept()
        assert await store.load("k") is None

    run(server, test)


def test_a_black_hole(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "CALL_S", 0.3)

    async def test(store: Store, proxy: Proxy) -> None:
        proxy.pause()
        for operation in (store.load("k"), store.save("k", b"", 0), store.lead("t", "h", TTL_S), store.ping()):
            start = time.monotonic()
            with pytest.raises(TransientStoreError, match="did not answer in time"):
                await operation
            assert time.monotonic() - start < 2.0
        proxy.check("pause")
        proxy.resume()
        await store.ping()

    run(server, test)


def test_a_connection_that_is_gone_is_made_anew(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Python does not say so: 3.12 and 3.13 raise these errors instead (gh-136234)."""
    errors_to_come: list[Exception] = []
    write = asyncio.StreamWriter.writelines

    def writelines(self: asyncio.StreamWriter, data: Iterable[bytes]) -> None:
        if errors_to_come:
            raise errors_to_come.pop()
        write(self, data)

    async def test(store: Store, _: Proxy) -> None:
        await store.save("k", b"x", 0)
        for error in (AttributeError("'NoneType' object has no attribute '_add_writer'"), TypeError("no descriptor")):
            errors_to_come.append(error)
            assert await store.load("k") == Entry(b"x", 1)
            assert not errors_to_come

    monkeypatch.setattr(asyncio.StreamWriter, "writelines", writelines)
    run(server, test)


def test_a_call_that_is_cancelled_leaves_a_usable_store(server: RedisServer) -> None:
    async def test(store: Store, proxy: Proxy) -> None:
        await store.save("k", b"x", 0)
        for turns in [*range(40), *range(100, 1000, 100)]:
            proxy.pause(Way.REPLY)
            call = asyncio.create_task(store.load("k"))
            for _ in range(turns):  # wherever it is then
                await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            proxy.resume()
            assert await store.load("other") is None  # not the answer that was due before
            if turns % 2:  # in the next round the connection is new
                proxy.reset()
                await asyncio.sleep(0.01)
            else:
                assert await store.load("k") == Entry(b"x", 1)
        proxy.check("pause")

    run(server, test)


# ---- a server that has lost something


def test_scripts_that_the_server_forgot_are_sent_again(server: RedisServer) -> None:
    """F10."""

    async def test(store: Store, proxy: Proxy) -> None:
        with server.admin() as admin:
            admin.script_flush()
            assert await store.save("k", b"", 0) == 1
            admin.script_flush()
            assert (await store.lead("t", "h", TTL_S)).leads
            admin.script_flush()
            assert (await store.leader() or Lead(False, 0, "", 0)).holder == "h"
            admin.script_flush()
            await store.resign("t")
            admin.script_flush()
            await store.delete("k")
            assert await store.load("k") is None

            # Several at once, while they are forgotten again and again.
            async def forget() -> None:
                while True:
                    admin.script_flush()
                    await asyncio.sleep(0.001)

            forgetting = asyncio.create_task(forget())
            for revision in range(30):
                results = await asyncio.gather(*(store.save(f"k{n}", b"", revision) for n in range(5)))
                assert results == [revision + 1] * 5
            forgetting.cancel()

    run(server, test)


def test_a_server_that_was_flushed(server: RedisServer) -> None:
    async def test(store: Store, proxy: Proxy) -> None:
        lead = await store.lead("t", "h", TTL_S)
        await store.save("k", b"x", 0, term=lead.term)
        server.command("FLUSHALL")
        assert await store.load("k") is None
        with pytest.raises(ConflictError):
            await store.save("k", b"y", 1, term=lead.term)
        assert await store.lead("t", "h", TTL_S, term=lead.term) == lead
        assert (await store.lead("other", "o", TTL_S)).leads is False
        assert await store.save("k", b"y", 0, term=lead.term) == 1
        await store.resign("t")
        assert (await store.lead("other", "o", TTL_S)).term == lead.term + 1

    run(server, test)


def test_a_server_that_comes_back_with_an_older_state(server: RedisServer, tmp_path: Path) -> None:
    """F06: as after a fail-over to a replica that was behind. No term is used twice."""

    async def test(store: Store, proxy: Proxy) -> None:
        first = await store.lead("a", "a", TTL_S)
        await store.save("k", b"a", 0, term=first.term)
        server.stop()
        shutil.copytree(server.directory, tmp_path / "old")
        server.start()
        await store.resign("a")
        second = await store.lead("b", "b", TTL_S)
        assert second.term == first.term + 1
        await store.save("k", b"b", 1, term=second.term)

        server.stop()
        shutil.rmtree(server.directory)
        shutil.copytree(tmp_path / "old", server.directory)
        server.start()
        assert await store.load("k") == Entry(b"a", 1)
        # By the old state the first one leads. Somebody has told it of the higher term: it does not go on.
        assert (await store.leader() or second).holder == "a"
        late = await store.lead("a", "a", TTL_S, term=first.term, floor=second.term)
        assert late == Lead(False, second.term, "", 0.0)
        # The second one goes on at once.
        assert await store.lead("b", "b", TTL_S, term=second.term) == Lead(True, second.term, "b", TTL_S)
        with pytest.raises(FencedError):
            await store.save("k", b"late", 1, term=first.term)
        assert await store.save("k", b"b", 1, term=second.term) == 2
        await store.resign("b")
        assert (await store.lead("c", "c", TTL_S)).term == second.term + 1

    run(server, test)
