"""The interface between the coordinator and the store of its state: a few small values, and the leader of the job."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Protocol

from paramserver.errors import FencedError, StoreError


class ConflictError(StoreError):
    """The value has changed since it was read: another process writes it."""


class TransientStoreError(StoreError):
    """The store cannot do the operation now: it is away, slow, full or loading. Ask again later, with back-off.

    A write that ends with this error may have been done: load the value before writing it again.
    """


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored value with the number of its revision, which rises with every save of its key and begins at 1."""

    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Lead:
    """The leader of the job. ``leads``: whether it is the caller. ``term``: the fencing number, which rises with every
    new leader.

    ``holder``: address of the leader, empty if there is none. ``left_s``: how long its lease lasts if not extended.
    """

    leads: bool
    term: int
    holder: str
    left_s: float


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """Facts about a store. A fact that cannot be found out is None, empty or 0."""

    # "redis", "valkey" or "memory"
    kind: str
    version: str = ""
    # 0: no limit
    maxmemory_bytes: int = 0
    maxmemory_policy: str = ""
    # Whether the store writes every change to disk.
    persistence: bool | None = None
    # Seconds that the store's clock is ahead of ours.
    clock_offset_s: float | None = None
    warnings: list[str] = field(default_factory=list)
    # Reasons why the store must not be used; empty if it may be used.
    refusal: str = ""


class Store(Protocol):
    """Values by key, and the lease of the job's leader. All keys have the store's prefix; other keys are not touched.

    Every method raises StoreError when the store cannot be used, TransientStoreError when another attempt may help.
    """

    @property
    def operations(self) -> int:
        """Number of operations that were asked of this store so far."""
        ...

    async def load(self, key: str) -> Entry | None:
        """The value, or None if there is none."""
        ...

    async def save(self, key: str, value: bytes, expected: int, term: int = 0) -> int:
        """Write if the key's revision is still ``expected`` (0: the key does not exist). Returns the new revision.

        ``term``: the writer's, 0 if it is no leader. Raises ConflictError if the key has another revision, FencedError
        if the store knows a higher term. After an error the value is unchanged.
        """
        ...

    async def delete(self, key: str, term: int = 0) -> None:
        """Remove the key if it exists. Its next revision is 1 again. Raises FencedError as :meth:`save` does."""
        ...

    async def lead(self, token: str, holder: str, ttl_s: float, term: int = 0, floor: int = 0) -> Lead:
        """Take or extend the leadership for ``ttl_s`` from now, by the store's clock. Safe to repeat.

        ``token``: secret name of this candidate. ``holder``: address to show to others. ``floor``: the highest term
        known elsewhere. ``term`` 0: become the leader under a new term, above all known terms. Otherwise: go on
        under this term, also when the lease ran out or the store forgot it; refused if a higher term is known. The
        holder of a lease keeps the lease. Another candidate gets the holder's term and address, unless the candidate's
        term is higher, which happens when the store came back with an older state. The term in the answer is the term
        in force.
        """
        ...

    async def resign(self, token: str) -> None:
        """Give the leadership back, if this token has it. The term stays known."""
        ...

    async def leader(self) -> Lead | None:
        """The present leader, or None. ``leads`` is False, since the caller shows no token."""
        ...

    async def inspect(self) -> StoreFacts:
        """Kind and settings of the store."""
        ...

    async def ping(self) -> None:
        """Return if the store answers."""
        ...

    async def close(self) -> None:
        """Give connections back. May be repeated."""
        ...


def redacted(url: str) -> str:
    """The URL without its secrets, for messages: no user, no password, no query."""
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


def fenced(key: str, term: int, known: int) -> FencedError:
    """The one sentence for it."""
    return FencedError(
        f"{key} is not written for term {term}: the store knows term {known}, so another coordinator leads this job"
    )
