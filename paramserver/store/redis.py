"""A store in a Redis or Valkey server, of any version from 6.2 on, through redis-py 5 to 8.

docs/store.md lists the commands that this file uses. A call whose connection breaks is sent once more: the scripts
recognise a request that they have done already. A server that cannot be reached is not tried twice.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection, Connection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError

from paramserver.failpoints import reach
from paramserver.store import scripts
from paramserver.store.address import Address
from paramserver.store.base import Entry, Lead, StoreFacts, conflict, fenced
from paramserver.store.facts import judge
from paramserver.store.failures import ForbiddenError, explain

# To connect; then for each answer. A whole call, with its login and a second attempt, takes the sum at most.
CONNECT_S = 5.0
CALL_S = 5.0

# So that redis-py does not introduce itself, which takes a permission and, in version 5, two round trips.
_ANONYMOUS: dict[str, Any] = (
    {"driver_info": None}
    if "driver_info" in inspect.signature(AbstractConnection.__init__).parameters
    else {"lib_name": None, "lib_version": None}
)


class RedisStore:
    """See `base.Store`. ``prefix``, with a colon at its end, begins every key in the server."""

    def __init__(self, address: Address, prefix: str) -> None:
        self.operations = 0
        self._where = address.where
        self._secrets = (address.password,)
        self._pool = _pool(address)
        self._client = Redis(connection_pool=self._pool)
        prefix = prefix if prefix.endswith(":") else prefix + ":"
        self._entries, self._leader, self._term = prefix + "entry:", prefix + "leader", prefix + "term"

    async def load(self, key: str) -> Entry | None:
        """See `base.Store`."""
        value, revision = await self._call("read", "HMGET", self._entries + key, "value", "revision")
        if value is None or revision is None:
            return None
        return Entry(value, int(revision))

    async def save(self, key: str, value: bytes, expected: int, term: int = 0) -> int:
        """See `base.Store`."""
        new = expected + 1
        done, number = await self._run(
            "write",
            scripts.SAVE,
            [self._entries + key, self._term],
            [expected, new, bytes(value), secrets.token_hex(8), term, new - scripts.KEPT_REQUESTS],
        )
        if done == 2:
            raise fenced(key, term, int(number))
        if not done:
            raise conflict(key, expected, int(number))
        return int(number)

    async def delete(self, key: str, term: int = 0) -> None:
        """See `base.Store`."""
        known = await self._run("write", scripts.DELETE, [self._entries + key, self._term], [term])
        if known:
            raise fenced(key, term, known)

    async def lead(self, token: str, holder: str, ttl_s: float, term: int = 0, floor: int = 0) -> Lead:
        """See `base.Store`."""
        leads, new, who, left_ms = await self._run(
            "write",
            scripts.LEAD,
            [self._leader, self._term],
            [token, holder, max(1, round(ttl_s * 1000)), term, floor],
        )
        return Lead(bool(leads), new, _text(who), int(left_ms) / 1000)

    async def resign(self, token: str) -> None:
        """See `base.Store`."""
        await self._run("write", scripts.RESIGN, [self._leader], [token])

    async def leader(self) -> Lead | None:
        """See `base.Store`."""
        found = await self._run("read", scripts.LEADER, [self._leader, self._term], [])
        return Lead(False, found[0], _text(found[1]), found[2] / 1000) if found else None

    async def inspect(self) -> StoreFacts:
        """See `base.Store`. Facts that the user may not ask for are unknown."""
        info: Mapping[str, object] | None = None
        offset_s: float | None = None
        with suppress(ForbiddenError):
            info = await self._call("ask for INFO", "INFO")
        with suppress(ForbiddenError):
            before = time.time()
            seconds, microseconds = await self._call("ask for TIME", "TIME")
            offset_s = int(seconds) + int(microseconds) / 1e6 - (before + time.time()) / 2
        return judge(info, offset_s, self._where)

    async def ping(self) -> None:
        """See `base.Store`."""
        await self._call("ping", "PING")

    async def close(self) -> None:
        """See `base.Store`."""
        await self._pool.disconnect()

    async def _run(self, what: str, script: scripts.Script, keys: list[str], arguments: list[str | bytes | int]) -> Any:
        reach("redis.before_script")
        answer = await self._call(what, "EVALSHA", script.sha, len(keys), *keys, *arguments, text=script.text)
        reach("redis.after_script")
        return answer

    async def _call(self, what: str, *command: str | bytes | int, text: str = "") -> Any:
        """Send a command. ``text``: of its script. Raises a StoreError with the reason if the command fails."""
        self.operations += 1
        before = sys.exception()
        try:
            async with asyncio.timeout(CONNECT_S + CALL_S):
                try:
                    return await self._send(command, text)
                except _UnreachableError:
                    raise
                except RedisConnectionError:
                    return await self._send(command, text)
        except (RedisError, OSError, ValueError) as error:
            failure = explain(error, what, self._where, self._secrets, before)
        raise failure  # out here it has no history, in which a secret might stand

    async def _send(self, command: tuple[str | bytes | int, ...], text: str) -> Any:
        execute: Callable[..., Awaitable[Any]] = self._client.execute_command
        try:
            return await execute(*command)
        except NoScriptError:
            return await execute("EVAL", text, *command[2:])


class _UnreachableError(RedisConnectionError):
    """No connection could be made. The cause of this error has the reason."""


class _OnceConnection(AbstractConnection):
    """Limits the time of an answer itself: redis-py does so by `asyncio.wait_for`, which may lose a cancellation."""

    async def read_response(self, *arguments: Any, **options: Any) -> Any:
        async with asyncio.timeout(CALL_S):
            return await super().read_response(*arguments, **options)

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        try:
            await super().send_packed_command(command, check_health)
        except (AttributeError, TypeError) as error:
            # CPython 3.12 and 3.13 stumble so if the server has closed the connection (gh-136234).
            raise RedisConnectionError("the server has closed the connection") from error

    async def connect(self) -> None:
        try:
            await super().connect()  # type: ignore[no-untyped-call]
        # IndexError: redis-py 5 stumbles over an OSError without a text
        except (RedisError, OSError, IndexError) as error:
            # else redis-py 5 would take a Unix socket that is open for one on which the login has succeeded
            await self.disconnect(nowait=True)
            raise _UnreachableError(str(error)) from error


class _TcpConnection(_OnceConnection, Connection):
    """``context``: for TLS, None without."""

    def __init__(self, *, context: ssl.SSLContext | None, **options: Any) -> None:
        self._context = context
        super().__init__(**options)

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {**super()._connection_arguments(), "ssl": self._context}


class _UnixConnection(_OnceConnection, UnixDomainSocketConnection):
    pass


def _pool(address: Address) -> ConnectionPool:
    place: dict[str, Any]
    if address.path:
        place = {"connection_class": _UnixConnection, "path": address.path}
    else:
        place = {
            "connection_class": _TcpConnection,
            "host": address.host,
            "port": address.port,
            "context": address.tls,
            "socket_keepalive": True,
        }
    return ConnectionPool(
        **place,
        **_ANONYMOUS,
        db=address.database,
        username=address.user or None,
        password=address.password or None,
        protocol=2,
        socket_timeout=None,
        socket_connect_timeout=CONNECT_S,
        retry=Retry(NoBackoff(), 0),
    )


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
