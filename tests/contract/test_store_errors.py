"""What goes wrong at a Redis or Valkey server, and how it reads."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

import paramserver.store.redis as implementation
from paramserver.errors import ConfigError, StoreError
from paramserver.store import Entry, Lead, Store, TransientStoreError, open_store
from tests.support.contract.redis_servers import (
    DEADLINE_S,
    PREFIX,
    TTL_S,
    RedisServer,
    assert_no_secret,
    eventually,
    operations,
    programs,
    run,
    serving,
)


@pytest.fixture(scope="module", params=sorted(programs()))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Each server program in turn."""
    with serving(programs()[request.param], tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture(autouse=True)
def _restored(server: RedisServer) -> Iterator[None]:
    with server.restored():
        yield


def test_a_full_server_takes_no_writes_but_its_leader_stays(server: RedisServer) -> None:
    """F07."""

    async def test(store: Store) -> None:
        await store.save("k", b"x", 0)
        await store.lead("t", "h", 1.0)
        with server.admin() as admin:
            admin.config_set("maxmemory", "1")
            for write in (store.save("k", b"y", 1), store.save("new", b"y", 0), store.lead("t", "other", 5.0, term=2)):
                with pytest.raises(TransientStoreError, match="is full: raise its maxmemory"):
                    await write
            assert await store.lead("t", "h", TTL_S, term=1) == Lead(True, 1, "h", TTL_S)
            assert (await store.lead("u", "u", TTL_S)).leads is False
            known = await store.leader()
            assert known is not None
            assert known.left_s > 10
            assert await store.load("k") == Entry(b"x", 1)
            admin.config_set("maxmemory", "0")
        assert await store.save("k", b"y", 1) == 2

    run(server.url, test)


def test_a_replica_takes_no_writes(server: RedisServer) -> None:
    async def test(store: Store) -> None:
        with server.admin() as admin:
            server.command("REPLICAOF", "127.0.0.1", "1")
            try:
                with pytest.raises(TransientStoreError, match="is a replica and takes no writes: wait for the end"):
                    await store.save("k", b"", 0)
                with pytest.raises(TransientStoreError, match="is a replica"):
                    await store.lead("t", "h", TTL_S)
                assert await store.load("k") is None
                assert "is a replica" in (await store.inspect()).refusal
                admin.config_set("replica-serve-stale-data", "no")
                with pytest.raises(TransientStoreError, match="has lost its primary"):
                    await store.load("k")
            finally:
                admin.config_set("replica-serve-stale-data", "yes")
                server.command("REPLICAOF", "NO", "ONE")
        assert await store.save("k", b"", 0) == 1

    run(server.url, test)


def test_a_server_that_runs_somebodys_script(server: RedisServer) -> None:
    async def test(store: Store) -> None:
        await store.ping()
        with server.admin() as admin, server.admin() as other:
            admin.config_set("lua-time-limit", "1")

            def spin() -> None:
                with contextlib.suppress(redis.ResponseError):
                    other.eval("while true do end", 0)

            spinning = threading.Thread(target=spin)
            spinning.start()
            try:
                deadline = time.monotonic() + DEADLINE_S
                said = ""
                while not said:
                    assert time.monotonic() < deadline
                    try:
                        await store.ping()
                    except TransientStoreError as error:
                        said = str(error)
                assert said.endswith("is busy with another client's script: wait, or end the script with SCRIPT KILL")
            finally:
                admin.script_kill()
                spinning.join(DEADLINE_S)
                admin.config_set("lua-time-limit", "5000")
        await store.ping()

    run(server.url, test)


def test_a_server_that_cannot_write_to_its_disk(server: RedisServer, tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        (server.directory / "dump.rdb").unlink(missing_ok=True)
        (server.directory / "dump.rdb").mkdir()
        try:
            with server.admin() as admin:
                admin.config_set("save", "3600 1")
                admin.bgsave()
                await eventually(lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "err")
                with pytest.raises(TransientStoreError, match="cannot write to its disk: make room there"):
                    await store.save("k", b"", 0)
        finally:
            with server.admin() as admin:
                admin.config_set("save", "")
            (server.directory / "dump.rdb").rmdir()
        assert await store.save("k", b"", 0) == 1

    run(server.url, test)


def test_a_server_that_still_loads_its_data(server: RedisServer, tmp_path: Path) -> None:
    with server.admin() as admin, admin.pipeline() as pipeline:
        for number in range(20000):
            pipeline.set(f"k{number}", "x")
        pipeline.execute()

    async def test(store: Store) -> None:
        server.stop()
        server.launch("key-load-delay 100")  # microseconds; it looks at its sockets after every thousand keys
        deadline = time.monotonic() + DEADLINE_S
        said = set()
        while True:
            assert time.monotonic() < deadline
            try:
                await store.ping()
                break
            except TransientStoreError as error:
                said.add(str(error).rpartition("/s")[2])
                await asyncio.sleep(0.02)
        assert " still loads its data: wait until it has" in said
        assert await store.load("k") is None

    try:
        run(server.url, test)
    finally:
        server.stop()
        server.start()


def test_a_server_that_hangs(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "CALL_S", 0.3)

    async def test(store: Store) -> None:
        await store.ping()
        server.signal(signal.SIGSTOP)
        try:
            for operation in operations(store)[:4]:
                start = time.monotonic()
                with pytest.raises(TransientStoreError, match="did not answer in time"):
                    await operation()
                assert time.monotonic() - start < 2.0
        finally:
            server.signal(signal.SIGCONT)
        await store.ping()

    run(server.url, test)


def test_keys_of_somebody_else_in_our_place(server: RedisServer) -> None:
    async def test(store: Store) -> None:
        with server.admin() as admin:
            for key in ("entry:k", "leader", "term"):
                admin.rpush(PREFIX + key, "not what we write")
        for what, operation in (
            ("read", store.load("k")),
            ("write", store.save("k", b"", 0)),
            ("write", store.lead("t", "h", TTL_S)),
            ("read", store.leader()),
        ):
            with pytest.raises(StoreError, match=f"could not {what}: .*WRONGTYPE") as caught:
                await operation
            assert not isinstance(caught.value, TransientStoreError)

    run(server.url, test)


def test_too_many_clients(server: RedisServer) -> None:
    async def test(store: Store) -> None:
        with server.admin() as admin:
            before = str(admin.config_get("maxclients")["maxclients"])
            admin.config_set("maxclients", "1")
            try:
                with pytest.raises(TransientStoreError, match=r"too many clients|no store answers"):
                    await store.ping()
            finally:
                admin.config_set("maxclients", before)
        await store.ping()

    run(server.url, test)


# ---- no server of this kind


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:canary@127.0.0.1:1/0", "redis://…@127.0.0.1:1/0"),
        ("redis://127.0.0.1:1/0?password=canary", "redis://127.0.0.1:1/0"),
        ("rediss://user:canary@127.0.0.1:1/0", "rediss://…@127.0.0.1:1/0"),
        ("unix://:canary@/nowhere/store.sock?db=0", "unix://…@/nowhere/store.sock"),
        ("unix:///nowhere/store.sock?password=canary", "unix:///nowhere/store.sock"),
    ],
)
def test_nobody_there(url: str, shown: str) -> None:
    async def test(store: Store) -> None:
        for operation in operations(store):
            with pytest.raises(TransientStoreError, match=r"no store answers at .*: start Redis or Valkey") as caught:
                await operation()
            assert shown in str(caught.value)
            assert_no_secret(caught.value)
        assert store.operations == 8

    run(url, test)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "could not ping: |no store answers"),
        (b"-ERR unknown command `AUTH`, with args beginning with: `user` `canary-1`\r\n", "does not let us ping"),
        (b"-ERR something about canary-1\r\n", "could not ping: (ERR )?something about …"),
        (b"$5\r\n", "no store answers|did not answer in time"),
        (b"\xff\xfe\x00", "could not ping|did not answer in time|no store answers"),
        (b"", "no store answers"),
    ],
)
def test_something_else_is_there(reply: bytes, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "CALL_S", 0.3)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(reply)
        if not reply.startswith(b"$"):
            writer.write_eof()
        await reader.read()
        writer.close()

    async def main() -> None:
        other = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = other.sockets[0].getsockname()[1]
        store = open_store(f"redis://user:canary-1@127.0.0.1:{port}/0", PREFIX)
        with pytest.raises(StoreError, match=expected) as caught:
            await store.ping()
        assert_no_secret(caught.value)
        await store.close()
        other.close()
        await other.wait_closed()

    asyncio.run(main())


def test_an_error_before_ours_is_not_mistaken_for_it(server: RedisServer) -> None:
    """A caller that handles another error while it asks the store."""

    async def test(store: Store) -> None:
        try:
            raise TimeoutError("READONLY something else")
        except TimeoutError:
            with pytest.raises(TransientStoreError, match="no store answers"):
                await store.ping()

    run("redis://127.0.0.1:1/0", test)


def test_an_address_of_no_store_is_the_users_mistake() -> None:
    for url in ("", "auto", "mongodb://host", "http://user:canary@host", "redis:/host", "redis", "memory://"):
        with pytest.raises(ConfigError, match=r"cluster\.store") as caught:
            open_store(url, "p")
        assert_no_secret(caught.value)


def test_debians_server_is_tested_where_there_is_one() -> None:
    assert len(programs()) == 1 + (shutil.which("redis-server") is not None and "valkey" in programs())
