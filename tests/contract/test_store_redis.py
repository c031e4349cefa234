"""A Redis or Valkey server as a store: who may enter, what it says of itself, and how its errors read."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
from redis.exceptions import NoPermissionError

import paramserver.store.redis as implementation
from paramserver.errors import ConfigError, StoreError
from paramserver.store import Entry, Lead, Store, TransientStoreError, open_store
from paramserver.testing.proxy import Proxy
from tests.contract.redis_servers import PASSWORD, USER, Authority, RedisServer, programs, serving

DEADLINE_S = 30.0
TTL_S = 60.0
PREFIX = "paramserver:job:"


@pytest.fixture(scope="module", params=sorted(programs()))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Each server program in turn."""
    with serving(programs()[request.param], tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture(autouse=True)
def _restored(server: RedisServer) -> Iterator[None]:
    """Each test leaves the server as it was, and empty."""
    with server.admin() as admin:
        saved = {name: admin.config_get(name)[name] for name in ("maxmemory", "maxmemory-policy", "appendonly")}
    yield
    with server.admin() as admin:
        for name, value in saved.items():
            admin.config_set(name, value)
        admin.flushall()


def run(url: str, test: Callable[[Store], Awaitable[None]], prefix: str = PREFIX) -> None:
    """Run ``test`` with a store."""

    async def main() -> None:
        store = open_store(url, prefix)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await test(store)
        finally:
            await store.close()

    asyncio.run(main())


def operations(store: Store) -> list[Callable[[], Awaitable[object]]]:
    """One call of each method that asks the server something."""
    return [
        store.ping,
        store.inspect,
        store.leader,
        lambda: store.load("k"),
        lambda: store.save("k", b"", 0),
        lambda: store.delete("k"),
        lambda: store.lead("t", "h", TTL_S),
        lambda: store.resign("t"),
    ]


def assert_no_secret(error: BaseException) -> None:
    """Neither in the error nor in those that led to it."""
    history: BaseException | None = error
    while history is not None:
        assert "canary" not in f"{history} {history!r}"
        history = history.__cause__ or history.__context__


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


# ---- who may enter


def test_the_documented_user_may_do_nothing_else(server: RedisServer) -> None:
    """J11."""
    with server.admin() as admin:
        admin.set("others", "1")
        admin.hset("other:entry:state", mapping={"value": "1"})
    client = redis.Redis(unix_socket_path=str(server.socket), username=USER, password=PASSWORD)
    commands: list[tuple[str, ...]] = [
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("CONFIG", "GET", "*"),
        ("CONFIG", "SET", "dir", "/"),
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("DBSIZE",),
        ("RANDOMKEY",),
        ("ACL", "LIST"),
        ("ACL", "SETUSER", USER, "+@all"),
        ("SCRIPT", "FLUSH"),
        ("CLIENT", "LIST"),
        ("DEBUG", "SLEEP", "0"),
        ("SHUTDOWN",),
        ("REPLICAOF", "NO", "ONE"),
        ("PUBLISH", "c", "m"),
        ("EXPIRE", "paramserver:job:x", "1"),
        ("GET", "others"),
        ("SET", "others", "2"),
        ("HMGET", "other:entry:state", "value"),
        ("DEL", "others"),
        ("EVAL", "return redis.call('GET', KEYS[1])", "1", "others"),
        ("EVAL", "return redis.call('SET', KEYS[1], '2')", "1", "others"),
    ]
    try:
        for command in commands:
            with pytest.raises(NoPermissionError):
                client.execute_command(*command)
        for script in (
            "return redis.call('GET', 'others')",
            "return redis.call('SET', 'others', '2')",
            "return redis.call('FLUSHALL')",
            "return redis.call('CONFIG', 'GET', '*')",
            "return redis.call('KEYS', '*')",
        ):
            with pytest.raises(redis.ResponseError, match=r"(?i)can't (run this command|access at least one)|NOPERM"):
                client.execute_command("EVAL", script, "0")
    finally:
        client.close()
    with server.admin() as admin:
        assert admin.get("others") == "1"


def test_every_command_of_the_documented_user_is_needed(server: RedisServer) -> None:
    """And those of `select`, `info` and `time` are needed only for what the document says."""

    async def everything(store: Store) -> None:
        await store.inspect()
        for term in (0, 1):
            await store.lead("t", "h", TTL_S, term=term)
        await store.leader()
        revision = await store.save("k", b"", 0)
        await store.load("k")
        await store.delete("k")
        await store.resign("t")
        await store.ping()
        assert revision == 1

    with server.admin() as admin:
        commands = [name[1:] for name in admin.acl_getuser(USER)["commands"] if name.startswith("+")]
        assert len(commands) == 16
        try:
            for command in commands:
                admin.execute_command("ACL", "SETUSER", USER, f"-{command}")
                admin.flushall()
                admin.script_flush()
                if command in ("info", "time"):
                    run(server.url, everything)
                else:
                    with pytest.raises(StoreError, match=r"does not let us \w+: correct user and password"):
                        run(server.url.replace("db=0", "db=1") if command == "select" else server.url, everything)
                admin.execute_command("ACL", "SETUSER", USER, f"+{command}")
        finally:
            for command in commands:
                admin.execute_command("ACL", "SETUSER", USER, f"+{command}")


def test_a_foreign_prefix_is_refused(server: RedisServer) -> None:
    async def test(store: Store) -> None:
        for operation in operations(store)[2:]:
            with pytest.raises(StoreError, match=r"does not let us (read|write): .*permissions"):
                await operation()

    run(server.url, test, prefix="somebody-else:")


@pytest.mark.parametrize("password", ["canary-wrong", "canary-wrong-%40:?#"])
def test_a_wrong_password_is_told_and_not_shown(server: RedisServer, password: str) -> None:
    async def test(store: Store) -> None:
        for operation in operations(store):
            with pytest.raises(StoreError, match=r"does not let us [\w ]+: correct user and password") as caught:
                await operation()
            assert not isinstance(caught.value, TransientStoreError)
            assert_no_secret(caught.value)
        assert "canary" not in repr(store)
        assert "canary" not in repr(vars(store)["_pool"]) + repr(vars(store)["_client"])

    run(f"unix://{USER}:{quote(password, safe='')}@{server.socket}", test)
    run(f"unix://{server.socket}?password={quote(password, safe='')}", test)


def test_no_password_where_one_is_needed(server: RedisServer) -> None:
    async def test(store: Store) -> None:
        with pytest.raises(StoreError, match="does not let us ping: correct user and password"):
            await store.ping()

    run(f"unix://{server.socket}", test)


def test_a_database_of_its_own(server: RedisServer) -> None:
    async def write(store: Store) -> None:
        await store.save("k", b"in three", 0)

    async def read(store: Store) -> None:
        assert await store.load("k") is None

    async def missing(store: Store) -> None:
        with pytest.raises(StoreError, match="does not have the database of cluster.store"):
            await store.ping()

    run(server.url.replace("db=0", "db=3"), write)
    run(server.url, read)
    run(server.url.replace("db=0", "db=99"), missing)

    async def over_tcp() -> None:
        async with Proxy(server.upstream) as proxy:
            store = open_store(server.tcp_url(proxy.address)[:-1] + "3", PREFIX)
            assert await store.load("k") == Entry(b"in three", 1)
            await store.close()

    asyncio.run(over_tcp())


# ---- TLS


def test_tls_needs_the_right_authority_and_host(server: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    authority, other = Authority(tmp_path), Authority(tmp_path / "other")

    async def ping(
        context: ssl.SSLContext | None, host: str = "localhost", query: str = "", tls: str = "rediss"
    ) -> str:
        async with Proxy(server.upstream, context) as proxy:
            port = proxy.address.rpartition(":")[2]
            store = open_store(server.tcp_url(f"{host}:{port}", tls) + query, PREFIX)
            try:
                await store.save("k", b"", 0)
                await store.delete("k")
            except StoreError as error:
                assert_no_secret(error)
                return str(error)
            finally:
                await store.close()
            return ""

    trusted, untrusted = f"?ssl_ca_certs={authority.certificate}", f"?ssl_ca_certs={other.certificate}"
    by_name, by_address = authority.server_context("localhost"), authority.server_context("127.0.0.1")

    async def main() -> None:
        assert await ping(by_name, query=trusted) == ""
        assert await ping(by_address, "127.0.0.1", query=trusted) == ""
        assert "certificate that we do not trust (hostname mismatch" in await ping(by_address, query=trusted)
        assert "certificate that we do not trust (ip address mismatch" in await ping(by_name, "127.0.0.1", trusted)
        for query in (untrusted, ""):
            assert "certificate that we do not trust (" in await ping(by_name, query=query)
        assert "does not agree with us on TLS" in await ping(None, query=trusted)
        assert "no store answers" in await ping(by_name, tls="redis")

    asyncio.run(main())


def test_a_server_may_ask_for_our_certificate(server: RedisServer, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    context = authority.server_context("localhost")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(authority.certificate)
    authority.server_context("client")
    own = f"&ssl_certfile={tmp_path}/client.pem&ssl_keyfile={tmp_path}/client.pem"

    async def main() -> None:
        async with Proxy(server.upstream, context) as proxy:
            url = server.tcp_url(f"localhost:{proxy.address.rpartition(':')[2]}", "rediss")
            url += f"?ssl_ca_certs={authority.certificate}"
            store, stranger = open_store(url + own, PREFIX), open_store(url, PREFIX)
            await store.ping()
            with pytest.raises(StoreError, match="TLS|no store answers"):
                await stranger.ping()
            await store.close()
            await stranger.close()

    asyncio.run(main())


# ---- what it says of itself


def test_a_good_server_has_nothing_to_complain_of(server: RedisServer) -> None:
    async def test(store: Store) -> None:
        facts = await store.inspect()
        with server.admin() as admin:
            info = admin.info("server")
        assert facts.kind == ("valkey" if "valkey_version" in info else "redis")
        assert facts.version == info.get("valkey_version", info["redis_version"])
        assert (facts.maxmemory_bytes, facts.maxmemory_policy, facts.persistence) == (0, "noeviction", True)
        assert facts.clock_offset_s is not None
        assert abs(facts.clock_offset_s) < 1
        assert facts.refusal == ""
        if facts.kind == "valkey":
            assert facts.warnings == []
        else:
            assert all("CVE-2025-49844" in warning for warning in facts.warnings)

    run(server.url, test)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "allkeys-random"])
def test_a_server_that_evicts_is_refused(server: RedisServer, policy: str) -> None:
    """F07."""

    async def test(store: Store) -> None:
        with server.admin() as admin:
            admin.config_set("maxmemory-policy", policy)
            assert (await store.inspect()).refusal == ""  # without a limit it removes nothing
            admin.config_set("maxmemory", "100mb")
        facts = await store.inspect()
        assert (facts.maxmemory_bytes, facts.maxmemory_policy) == (100 * 2**20, policy)
        assert f"maxmemory-policy {policy}" in facts.refusal
        assert "set maxmemory-policy noeviction" in facts.refusal

    run(server.url, test)


def test_a_server_that_forgets_is_warned_of(server: RedisServer) -> None:
    async def test(store: Store) -> None:
        with server.admin() as admin:
            admin.config_set("appendonly", "no")
        facts = await store.inspect()
        assert facts.persistence is False
        assert any("set appendonly yes" in warning for warning in facts.warnings)
        assert facts.refusal == ""

    run(server.url, test)


def test_a_server_that_tells_nothing_is_warned_of(server: RedisServer) -> None:
    async def test(store: Store) -> None:
        facts = await store.inspect()
        assert (facts.version, facts.persistence, facts.clock_offset_s, facts.refusal) == ("", None, None, "")
        assert len(facts.warnings) == 1
        assert "allow this user INFO" in facts.warnings[0]

    with server.admin() as admin:
        admin.execute_command("ACL", "SETUSER", USER, "-info", "-time")
        try:
            run(server.url, test)
        finally:
            admin.execute_command("ACL", "SETUSER", USER, "+info", "+time")


# ---- errors


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
            admin.execute_command("REPLICAOF", "127.0.0.1", "1")
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
                admin.execute_command("REPLICAOF", "NO", "ONE")
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
                while True:
                    try:
                        await store.ping()
                    except TransientStoreError as error:
                        assert "is busy with somebody's script: wait" in str(error)
                        break
                    assert time.monotonic() < deadline
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
        for number in range(2000):
            pipeline.set(f"k{number}", "x" * 1000)
        pipeline.execute()

    async def test(store: Store) -> None:
        server.stop()
        # Every key takes 1 ms, and the server answers after each 2 KB.
        server.launch("key-load-delay 1000", "loading-process-events-interval-bytes 2048")
        deadline = time.monotonic() + DEADLINE_S
        said = set()
        while True:
            assert time.monotonic() < deadline
            try:
                await store.ping()
                break
            except TransientStoreError as error:
                said.add("loads" if "still loads its data: wait until it has" in str(error) else str(error))
                await asyncio.sleep(0.02)
        assert "loads" in said
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
            before = admin.config_get("maxclients")["maxclients"]
            admin.config_set("maxclients", "1")
            try:
                with pytest.raises(TransientStoreError, match="too many clients|no store answers"):
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
        (
            b"-ERR something about canary-1\r\n",
            "could not ping: something about …|could not ping: ERR something about …",
        ),
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
