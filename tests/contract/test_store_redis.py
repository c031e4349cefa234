"""A Redis or Valkey server as a store: who may enter, TLS, and what it says of itself."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
from redis.exceptions import NoPermissionError

import paramserver.store.redis as implementation
from paramserver.errors import StoreError
from paramserver.store import Entry, Store, TransientStoreError, open_store
from tests.support.contract.proxy import Proxy
from tests.support.contract.redis_servers import (
    PASSWORD,
    PREFIX,
    TTL_S,
    USER,
    Authority,
    RedisServer,
    assert_no_secret,
    operations,
    programs,
    run,
    serving,
    user_line,
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


# ---- who may enter


def test_the_documented_user_may_do_nothing_else(server: RedisServer) -> None:
    """J11."""
    with server.admin() as admin:
        admin.set("others", "1")
        admin.hset("other:entry:state", mapping={"value": "1"})
    client = redis.Redis(unix_socket_path=str(server.socket), username=USER, password=PASSWORD)
    execute: Callable[..., object] = client.execute_command
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
                execute(*command)
        for script in (
            "return redis.call('GET', 'others')",
            "return redis.call('SET', 'others', '2')",
            "return redis.call('FLUSHALL')",
            "return redis.call('CONFIG', 'GET', '*')",
            "return redis.call('KEYS', '*')",
        ):
            with pytest.raises(
                redis.ResponseError,
                match=r"ACL failure in script|user executing the script can't|not allowed from script",
            ):
                execute("EVAL", script, "0")
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
        commands = [word[1:] for word in user_line().split() if word.startswith("+")]
        assert len(commands) == 15
        try:
            for command in commands:
                server.permit(f"-{command}")
                admin.flushall()
                admin.script_flush()
                if command in ("info", "time"):
                    run(server.url, everything)
                else:
                    with pytest.raises(StoreError, match=r"does not let us \w+: correct user and password"):
                        run(server.url.replace("db=0", "db=1") if command == "select" else server.url, everything)
                server.permit(f"+{command}")
        finally:
            for command in commands:
                server.permit(f"+{command}")


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
        for operation in operations(store):  # none of them in database 0
            with pytest.raises(StoreError, match="does not have the database of"):
                await operation()

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


def test_tls_needs_the_right_authority_and_host(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    authority, other = Authority(tmp_path), Authority(tmp_path / "other")

    async def outcome(
        context: ssl.SSLContext | None, host: str = "localhost", query: str = "", scheme: str = "rediss"
    ) -> str:
        async with Proxy(server.upstream, context) as proxy:
            port = proxy.address.rpartition(":")[2]
            store = open_store(server.tcp_url(f"{host}:{port}", scheme) + query, PREFIX)
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
        assert await outcome(by_name, query=trusted) == ""
        assert await outcome(by_address, "127.0.0.1", query=trusted) == ""
        assert "certificate that we do not trust (hostname mismatch" in await outcome(by_address, query=trusted)
        assert "certificate that we do not trust (ip address mismatch" in await outcome(by_name, "127.0.0.1", trusted)
        for query in (untrusted, ""):
            assert "certificate that we do not trust (" in await outcome(by_name, query=query)
        monkeypatch.setattr(implementation, "CONNECT_S", 0.5)  # a server without TLS waits for the rest of the line
        assert "did not answer in time: see whether it is" in await outcome(None, query=trusted)
        assert "no store answers" in await outcome(by_name, scheme="redis")

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
            with pytest.raises(StoreError, match=r"TLS|no store answers"):
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

    server.permit("-info", "-time")
    try:
        run(server.url, test)
    finally:
        server.permit("+info", "+time")
