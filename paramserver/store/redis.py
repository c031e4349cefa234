"""A store in a Redis or Valkey server. Each entry is a hash; a save is one Lua script, so that it is atomic.

The operations used are EVALSHA, EVAL, SCRIPT LOAD, HMGET, DEL, SCAN and PING.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from paramserver.errors import ConfigError, StoreError
from paramserver.store.base import Entry, conflict, redacted

_TIMEOUT_S = 5.0

# Compare and set.
#   KEYS[1]  the entry: a hash of value, revision and the request that wrote it
#   ARGV[1]  the expected revision; 0: there must be no entry
#   ARGV[2]  the new value
#   ARGV[3]  a name for this request: if the connection broke after it was done, it may be sent again
#   returns  {1, new revision} if this request has written, {0, present revision} if the expectation does not hold
_SAVE = """
local revision = tonumber(redis.call('HGET', KEYS[1], 'revision') or '0')
local expected = tonumber(ARGV[1])
if revision == expected + 1 and redis.call('HGET', KEYS[1], 'request') == ARGV[3] then
  return {1, revision}
end
if revision ~= expected then
  return {0, revision}
end
redis.call('HSET', KEYS[1], 'value', ARGV[2], 'revision', expected + 1, 'request', ARGV[3])
return {1, expected + 1}
"""


class RedisStore:
    """See `base.Store`. ``prefix`` and a colon begin every key in the server."""

    def __init__(self, url: str, prefix: str) -> None:
        self.operations = 0
        self._where = redacted(url)
        self._prefix = f"{prefix}:"
        # One retry: after a restart of the server, a connection of the pool turns out to be dead only when used.
        retry = Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,))
        try:
            self._client = Redis.from_url(
                url,
                protocol=2,
                socket_timeout=_TIMEOUT_S,
                socket_connect_timeout=_TIMEOUT_S,
                retry=retry,
                retry_on_error=[RedisConnectionError],
            )
        except (ValueError, TypeError):
            raise ConfigError(f"cluster.store {self._where!r} is malformed: write redis://host:6379/0") from None
        self._script = self._client.register_script(_SAVE)

    async def load(self, key: str) -> Entry | None:
        """See `base.Store`."""
        with self._errors("read"):
            value, revision = await cast(
                Awaitable[list[bytes | None]], self._client.hmget(self._prefix + key, ["value", "revision"])
            )
            if value is None or revision is None:
                return None
            return Entry(value, int(revision))

    async def save(self, key: str, value: bytes, expected: int) -> int:
        """See `base.Store`."""
        with self._errors("write"):
            done, revision = await self._script(
                keys=[self._prefix + key], args=[expected, bytes(value), secrets.token_hex(8)]
            )
        if not done:
            raise conflict(key, expected, revision)
        return int(revision)

    async def delete(self, key: str) -> None:
        """See `base.Store`."""
        with self._errors("write"):
            await self._client.delete(self._prefix + key)

    async def keys(self, prefix: str = "") -> list[str]:
        """See `base.Store`."""
        pattern = "".join(f"\\{char}" if char in "*?[]^-\\" else char for char in self._prefix + prefix) + "*"
        with self._errors("read"):
            found = {name.decode() async for name in self._client.scan_iter(match=pattern, count=1000)}
        return sorted(name.removeprefix(self._prefix) for name in found)

    async def ping(self) -> None:
        """See `base.Store`."""
        with self._errors("ping"):
            await self._client.ping()

    async def close(self) -> None:
        """See `base.Store`."""
        close = getattr(self._client, "aclose", None) or self._client.close  # redis-py 5.0.0 has no aclose
        await close()

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        self.operations += 1
        try:
            yield
        except (RedisError, OSError, ValueError) as error:
            raise StoreError(self._reason(error, what)) from error

    def _reason(self, error: BaseException, what: str) -> str:
        # redis-py may hide a refused password in the history of a connection error.
        history: BaseException | None = error
        while history is not None:
            if isinstance(history, AuthenticationError | NoPermissionError):
                return (
                    f"the store at {self._where} does not let us {what}: "
                    "correct user and password in cluster.store, or the user's permissions"
                )
            history = history.__cause__ or history.__context__
        if isinstance(error, RedisConnectionError | RedisTimeoutError | OSError):
            return f"no store answers at {self._where}: start Redis or Valkey there, or correct cluster.store"
        return f"the store at {self._where} could not {what}: {error}"
