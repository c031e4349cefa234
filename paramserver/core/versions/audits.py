"""Slices that two workers compute, to compare what both bring: which slices these are, and what the comparison says.

The names of slices decide, so all workers agree without a message. Servers count the contribution of the worker to
which a slice is dealt, as always; its auditor tells the coordinator a digest of each tensor, and brings nothing.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

# So many slices wait at most for the report of their second worker, and so many digests of them. So many pairs of
# workers are kept that have brought different contributions.
_OPEN, _DIGESTS, _PAIRS = 4096, 1 << 20, 10_000
# By tensor; empty: the contribution has nothing for it.
Digests = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Audit:
    """The share of slices that are computed by a second worker. ``seed``: that of the job."""

    share: float
    seed: int

    def number(self, step: int, slice_: int) -> int | None:
        """A number that chooses the second worker of a slice; None: the slice has none."""
        digest = hashlib.blake2b(f"{self.seed} {step} {slice_}".encode(), digest_size=16).digest()
        chosen = int.from_bytes(digest[:8], "little") < self.share * 2**64
        return int.from_bytes(digest[8:], "little") if chosen else None

    def of(self, step: int, ranges: Sequence[tuple[int, int]], place: int) -> Iterator[int]:
        """The slices of a step that the worker at ``place`` audits. ``ranges``: the slices dealt to each place."""
        for owner, (lo, hi) in enumerate(ranges):
            if owner == place or place < 0:
                continue
            for slice_ in range(lo, hi):
                number = self.number(step, slice_)
                if number is not None and (owner + 1 + number % (len(ranges) - 1)) % len(ranges) == place:
                    yield slice_


@dataclass(frozen=True, slots=True)
class Told:
    """What a worker has brought for a slice, or would have brought."""

    worker: str
    digests: Digests


@dataclass(frozen=True, slots=True)
class Difference:
    """Two workers differ. ``tensor``: the first one in which they do, by index; None: in which tensors there are."""

    step: int
    slice_: int
    one: str
    other: str
    tensor: int


@dataclass(slots=True)
class Comparison:
    """What all workers have told so far. ``compared``: slices of which two workers told."""

    compared: int = 0
    differ: int = 0
    first: Difference | None = None
    # Pairs of workers whose contributions were different at some time.
    unlike: set[frozenset[str]] = field(default_factory=set)
    _digests: int = 0
    _open: OrderedDict[tuple[int, int, int], list[Told]] = field(default_factory=OrderedDict)

    def hear(self, timeline: int, step: int, slice_: int, told: Told) -> Difference | None:
        """A worker tells of a slice; a difference from the worker that told first."""
        key = (timeline, step, slice_)
        if key not in self._open:
            self._keep(key, told)
            return None
        known = self._open[key]
        if any(one.worker == told.worker for one in known):  # a report that comes twice, or a slice computed again
            return None
        self.compared += len(known) == 1
        first = known[0]
        self._keep(key, told)
        if first.digests == told.digests:
            return None
        both = zip(first.digests, told.digests, strict=False)
        tensor = next((index for index, (a, b) in enumerate(both) if a != b), 0)
        found = Difference(step, slice_, first.worker, told.worker, tensor)
        self.differ, self.first = self.differ + 1, self.first or found
        if len(self.unlike) < _PAIRS:
            self.unlike.add(frozenset((found.one, found.other)))
        return found

    def _keep(self, key: tuple[int, int, int], told: Told) -> None:
        """Keep what was told until it is compared; the oldest slices go if that is too much."""
        self._open.setdefault(key, []).append(told)
        self._digests += 1 + len(told.digests)
        while self._open and (len(self._open) > _OPEN or self._digests > _DIGESTS):
            _, gone = self._open.popitem(last=False)
            self._digests -= sum(1 + len(one.digests) for one in gone)

    def odd(self) -> str:
        """The worker that differs from two others or more, where no two others differ; empty: that cannot be told."""
        suspects = frozenset.intersection(*self.unlike) if self.unlike else frozenset()
        if len(suspects) != 1 or len(frozenset().union(*self.unlike)) < 3:
            return ""
        return next(iter(suspects))
