"""A store that lives and dies with the process: for tests, and for a job that needs none."""

from __future__ import annotations

from paramserver.store.base import Entry, conflict


class MemoryStore:
    """See `base.Store`."""

    def __init__(self) -> None:
        self.operations = 0
        self._entries: dict[str, Entry] = {}

    async def load(self, key: str) -> Entry | None:
        """See `base.Store`."""
        self.operations += 1
        return self._entries.get(key)

    async def save(self, key: str, value: bytes, expected: int) -> int:
        """See `base.Store`."""
        self.operations += 1
        entry = self._entries.get(key)
        revision = entry.revision if entry else 0
        if revision != expected:
            raise conflict(key, expected, revision)
        self._entries[key] = Entry(bytes(value), revision + 1)
        return revision + 1

    async def delete(self, key: str) -> None:
        """See `base.Store`."""
        self.operations += 1
        self._entries.pop(key, None)

    async def keys(self, prefix: str = "") -> list[str]:
        """See `base.Store`."""
        self.operations += 1
        return sorted(key for key in self._entries if key.startswith(prefix))

    async def ping(self) -> None:
        """See `base.Store`."""
        self.operations += 1

    async def close(self) -> None:
        """See `base.Store`."""
