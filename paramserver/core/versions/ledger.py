"""The slices that a shard has counted and their workers; and how often each sample of an epoch has counted.

A shard notes every contribution of every version it makes. Details are kept of the last ones only, so memory is
bounded. Of older contributions it is still known that each was counted once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from paramserver.core.versions.events import Arrived, Part
from paramserver.core.versions.names import SyncName
from paramserver.core.work.slices import DataSpec, Step, slice_samples

# Contributions of which a shard keeps the details.
KEPT = 16_384

Row = tuple[int, int, int, int, int]  # step (of > 0) or epoch (of 0), first slice, end, slices of the step, worker


class Ledger:
    """The contributions of one shard, in the order in which they were applied."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._rows: deque[Row] = deque()
        # Synchronous steps below this number are complete, and their details forgotten.
        self.folded_steps = 0

    def note(self, parts: Iterable[Part | Arrived]) -> None:
        """These contributions made a version."""
        for part in parts:
            name = part.name
            if isinstance(name, SyncName):
                self._rows.append((name.step, name.lo, name.hi, name.of, part.worker))
            else:
                self._rows.append((name.epoch, name.index, name.index + 1, 0, part.worker))
        while len(self._rows) > self._kept:
            step, _, _, of, _ = self._rows.popleft()
            while of and self._rows and self._rows[0][0] == step and self._rows[0][3]:
                self._rows.popleft()  # a step is forgotten as a whole
            if of:
                self.folded_steps = step + 1

    def rows(self) -> list[Row]:
        """The details that are kept, oldest first."""
        return list(self._rows)

    def restore(self, rows: Iterable[Row], folded_steps: int) -> None:
        """Begin with the rows of a checkpoint."""
        self._rows = deque(rows)
        self.folded_steps = folded_steps


@dataclass(frozen=True, slots=True)
class ShardLedger:
    """The ledger of one shard. ``counted``: by epoch, the asynchronous slices in published versions."""

    rows: Sequence[Row]
    folded_steps: int = 0
    counted: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)


@dataclass(slots=True)
class Account:
    """One epoch: ``samples`` in all, and how many of them counted ``once``, ``twice`` or more, ``never``.

    ``workers``: slices by worker number (0: no longer known). ``slices``: by slice, its workers, once per count.
    """

    epoch: int
    samples: int
    once: int = 0
    twice: int = 0
    never: int = 0
    workers: Counter[int] = field(default_factory=Counter)
    slices: dict[int, list[int]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """True if every sample has counted."""
        return self.never == 0


def accounts(shards: Sequence[ShardLedger], data: DataSpec, step_of: Callable[[int], Step | None]) -> list[Account]:
    """The accounts of all shards together, by epoch. ``step_of``: which slices a synchronous step had.

    A slice has counted as often as on the shard that has it least; but once too often on any is too often.
    """
    told = [_by_slice(shard, step_of) for shard in shards]
    brought: dict[int, set[int]] = {}  # a slice that nobody has brought costs nothing, however many there are
    for epoch, index in {key for counts in told for key in counts}:
        if index < data.slices_per_epoch:
            brought.setdefault(epoch, set()).add(index)
    made = []
    for epoch in sorted(brought):
        account = Account(epoch, data.samples_per_epoch * data.turns)
        for index in sorted(brought[epoch]):
            found = [counts.get((epoch, index), []) for counts in told]
            most = max(found, key=len)
            times = len(most) if len(most) > 1 else min(len(one) for one in found)
            samples = slice_samples(data, index)
            if times == 0:
                continue
            account.once += samples if times == 1 else 0
            account.twice += samples if times > 1 else 0
            account.slices[index] = most
            account.workers.update(most)
        account.never = account.samples - account.once - account.twice
        made.append(account)
    return made


def _by_slice(shard: ShardLedger, step_of: Callable[[int], Step | None]) -> dict[tuple[int, int], list[int]]:
    """(epoch, slice) to the workers whose contributions of it this shard has counted."""
    found: dict[tuple[int, int], list[int]] = {}
    for number in range(shard.folded_steps):
        step = step_of(number)
        for index in step.slices if step else ():
            found.setdefault((step.epoch if step else 0, index), []).append(0)
    for first, lo, hi, of, worker in shard.rows:
        if of == 0:
            found.setdefault((first, lo), []).append(worker)
            continue
        step = step_of(first)
        for index in step.slices[lo:hi] if step else ():
            found.setdefault((step.epoch if step else 0, index), []).append(worker)
    for epoch, ranges in shard.counted.items():
        for lo, hi in ranges:
            for index in range(lo, hi):
                found.setdefault((epoch, index), [0])
    return found
