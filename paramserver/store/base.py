"""The seam between the coordinator and whatever keeps its state: a few small values with compare-and-set."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paramserver.errors import ConfigError, StoreError

REDIS_SCHEMES = ("redis", "rediss", "unix")


class ConflictError(StoreError):
    """The value has changed since it was read: somebody else writes it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored value with the number of its revision, which rises with every save of its key and begins at 1."""

    value: bytes
    revision: int


class Store(Protocol):
    """Values by key. Keys are non-empty text and belong to the store's prefix; others' keys are never touched.

    Every method raises StoreError when the store cannot be reached or answers with an error.
    """

    @property
    def operations(self) -> int:
        """How many operations were asked of this store so far."""
        ...

    async def load(self, key: str) -> Entry | None:
        """The value, or None if there is none."""
        ...

    async def save(self, key: str, value: bytes, expected: int) -> int:
        """Write if the key's revision is still ``expected`` (0: there is no such key); returns the new revision.

        Raises ConflictError otherwise, and nothing changes.
        """
        ...

    async def delete(self, key: str) -> None:
        """Remove the key if it exists. Its next revision is 1 again."""
        ...

    async def keys(self, prefix: str = "") -> Sequence[str]:
        """All keys that begin with ``prefix``, sorted, without the store's own prefix."""
        ...

    async def ping(self) -> None:
        """Return if the store answers."""
        ...

    async def close(self) -> None:
        """Give connections back. May be repeated."""
        ...


def open_store(url: str, prefix: str) -> Store:
    """The store at ``url``: "memory", "redis://host:6379/0", "rediss://…" (TLS), or "unix:///path/to/socket?db=0".

    ``prefix`` begins all its keys there. Nothing is connected yet. Raises ConfigError if the URL is none of these.
    """
    if url == "memory":
        from paramserver.store.memory import MemoryStore

        return MemoryStore()
    scheme = url.partition("://")[0]
    if scheme not in REDIS_SCHEMES or "://" not in url:
        raise ConfigError(
            f"cluster.store {redacted(url)!r} is no store: write memory, redis://host:6379/0, rediss://host:6379/0 "
            "or unix:///path/to/socket"
        )
    from paramserver.store.redis import RedisStore

    return RedisStore(url, prefix)


def redacted(url: str) -> str:
    """The URL without its secrets, for messages: no user, no password, no query; rather too little than too much."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url if "@" not in url else "…"
    shown, _, hidden = re.sub("[?#]", "?", rest, count=1).partition("?")
    if "@" in shown:
        shown = "…@" + shown.rpartition("@")[2]
    elif "@" in hidden:
        shown = "…"
    return f"{scheme}://{shown}"


def conflict(key: str, expected: int, found: int) -> ConflictError:
    """The one sentence for it."""
    return ConflictError(
        f"{key} is at revision {found} of the store, not {expected}: another coordinator writes it; "
        "stop one of them, or give the jobs different names"
    )
