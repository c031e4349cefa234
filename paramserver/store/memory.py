"""A store that ends with the process: for tests, and for a job that needs no lasting store."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from paramserver.store.base import Entry, Lead, StoreFacts, conflict, fenced


@dataclass(frozen=True, slots=True)
class _Lease:
    token: str
    holder: str
    until: float


class MemoryStore:
    """See `base.Store`. ``clock``: in seconds, for the lease."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.operations = 0
        self._clock = clock
        self._entries: dict[str, Entry] = {}
        self._term = 0
        self._lease: _Lease | None = None

    async def load(self, key: str) -> Entry | None:
        """See `base.Store`."""
        self.operations += 1
        return self._entries.get(key)

    async def save(self, key: str, value: bytes, expected: int, term: int = 0) -> int:
        """See `base.Store`."""
        self.operations += 1
        self._check_term(key, term)
        entry = self._entries.get(key)
        revision = entry.revision if entry else 0
        if revision != expected:
            raise conflict(key, expected, revision)
        self._entries[key] = Entry(bytes(value), revision + 1)
        return revision + 1

    async def delete(self, key: str, term: int = 0) -> None:
        """See `base.Store`."""
        self.operations += 1
        self._check_term(key, term)
        self._entries.pop(key, None)

    async def lead(self, token: str, holder: str, ttl_s: float, term: int = 0, floor: int = 0) -> Lead:
        """See `base.Store`."""
        self.operations += 1
        now = self._clock()
        lease = self._lease if self._lease is not None and self._lease.until > now else None
        if lease is not None and lease.token != token:
            if term <= self._term:
                return Lead(False, self._term, lease.holder, lease.until - now)
            lease = None
        known = max(self._term, floor)
        if term == 0:
            term = self._term if lease is not None and self._term == known > 0 else known + 1
        elif lease is not None:
            term = max(term, self._term)
        if known > term:
            return Lead(False, known, "", 0.0)
        self._term = term
        self._lease = _Lease(token, holder, now + ttl_s)
        return Lead(True, term, holder, ttl_s)

    async def resign(self, token: str) -> None:
        """See `base.Store`."""
        self.operations += 1
        if self._lease is not None and self._lease.token == token:
            self._lease = None

    async def leader(self) -> Lead | None:
        """See `base.Store`."""
        self.operations += 1
        now = self._clock()
        if self._lease is None or self._lease.until <= now:
            return None
        return Lead(False, self._term, self._lease.holder, self._lease.until - now)

    async def inspect(self) -> StoreFacts:
        """See `base.Store`."""
        self.operations += 1
        return StoreFacts("memory", persistence=False, clock_offset_s=0.0)

    async def ping(self) -> None:
        """See `base.Store`."""
        self.operations += 1

    async def close(self) -> None:
        """See `base.Store`."""

    def _check_term(self, key: str, term: int) -> None:
        if 0 < term < self._term:
            raise fenced(key, term, self._term)
