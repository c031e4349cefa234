"""A store in memory that a test can look into, set back and lose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from paramserver.store.base import Entry
from paramserver.store.memory import MemoryStore


class FragileStore(MemoryStore):
    """What a test does to it counts as no operation of the job."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """What it has now, by key."""
        return MappingProxyType(self._entries)

    def put(self, key: str, entry: Entry) -> None:
        """An entry that no coordinator of this job has written."""
        self._entries[key] = entry

    def forget(self) -> None:
        """It has lost everything: entries, lease and term."""
        self._entries.clear()
        self._lease, self._term = None, 0

    def remember(self) -> Callable[[], None]:
        """A function that sets it back to what it has now, lease and term included."""
        entries, lease, term = dict(self._entries), self._lease, self._term

        def restore() -> None:
            self._entries = dict(entries)
            self._lease, self._term = lease, term

        return restore
