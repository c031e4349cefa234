"""Opens the store at an address: in memory, or Redis."""

from __future__ import annotations

from paramserver.errors import ConfigError
from paramserver.store.base import Store, redacted

REDIS_SCHEMES = ("redis", "rediss", "unix")


def open_store(url: str, prefix: str, password_file: str = "") -> Store:
    """The store at ``url``: "memory", "redis://host:6379/0", "rediss://…" (TLS), or "unix:///path/to/socket?db=0".

    ``prefix`` begins all its keys there. ``password_file`` holds the password, which is then not in the URL. Nothing is
    connected yet. Raises ConfigError if the URL has another form, or if a file that it names cannot be used.
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
    from paramserver.store.address import parse
    from paramserver.store.redis import RedisStore

    return RedisStore(parse(url, password_file), prefix)
