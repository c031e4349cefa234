"""The slices that a shard has counted and their workers; and how often each sample of an epoch has counted.

A shard notes every contribution of every version it makes. Details are kept of the last ones only, so memory is
bounded. Of older contributions it is still known that each was counted once.

What is told of all epochs costs as much as the details that are kept, however old the job is: epochs that are alike,
and of which no details are kept, are looked at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from paramserver.core.versions.counted import Counted, Run, Runs, segments
from paramserver.core.versions.events import Arrived, Part
from paramserver.core.versions.names import SyncName
from paramserver.core.versions.ranges import RangeSet, common, complement, minus
from paramserver.core.work.slices import DataSpec, Step, SyncSchedule, samples_of

# Slices of which a shard keeps the details.
KEPT = 16_384
# Epochs that are told of one by one in one answer.
MOST_EPOCHS = 500

Row = tuple[int, int, int, int, int]  # step (of > 0) or epoch (of 0), first slice, end, slices of the step, worker


class Ledger:
    """The contributions of one shard, in the order in which they were applied."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._rows: deque[Row] = deque()
        self._slices = 0
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
            self._slices += name.slices
        while self._slices > self._kept:
            step, of = self._forget()
            while of and self._rows and self._rows[0][0] == step and self._rows[0][3]:
                self._forget()  # a step is forgotten as a whole
            if of:
                self.folded_steps = step + 1

    def _forget(self) -> tuple[int, int]:
        """Forget the oldest details; the step, or the epoch and 0."""
        first, lo, hi, of, _ = self._rows.popleft()
        self._slices -= hi - lo
        return first, of

    def rows(self) -> list[Row]:
        """The details that are kept, oldest first."""
        return list(self._rows)

    def restore(self, rows: Iterable[Row], folded_steps: int) -> None:
        """Begin with the rows of a checkpoint."""
        self._rows = deque(rows)
        self._slices = sum(hi - lo for _, lo, hi, _, _ in self._rows)
        self.folded_steps = folded_steps


@dataclass(frozen=True, slots=True)
class ShardLedger:
    """The ledger of one shard. ``counted``: the asynchronous slices in published versions."""

    rows: Sequence[Row]
    folded_steps: int = 0
    counted: Runs = ()


@dataclass(slots=True)
class Account:
    """One epoch: ``samples`` in all, and how many of them counted ``once``, ``twice`` or more, ``never``.

    ``skipped``: samples of slices that counted without them. ``workers``: slices by worker number (0: no longer known).
    ``slices``: of each stretch that the same workers have computed the first slice, the end, and the workers, each
    once per count.
    """

    epoch: int
    samples: int
    once: int = 0
    twice: int = 0
    never: int = 0
    skipped: int = 0
    workers: Counter[int] = field(default_factory=Counter)
    slices: list[tuple[int, int, list[int]]] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """True if every sample has counted."""
        return self.never == 0

    def of(self, epoch: int) -> Account:
        """The account of another epoch, which is like this one."""
        return Account(epoch, self.samples, self.once, self.twice, self.never, self.skipped, self.workers, self.slices)


class Accounts:
    """The accounts of all epochs of which something has counted, as all shards tell.

    A slice has counted as often as on the shard that has it least; but once too often on any is too often.
    ``poisoned``: (epoch, slice) of slices that counted without their samples.
    """

    def __init__(
        self,
        shards: Sequence[ShardLedger],
        data: DataSpec,
        schedule: SyncSchedule,
        poisoned: Iterable[tuple[int, int]] = (),
    ) -> None:
        skipped: dict[int, list[int]] = defaultdict(list)
        for epoch, index in poisoned:
            skipped[epoch].append(index)
        # The first epoch of each stretch of epochs that are alike, how many they are, and the account of the first.
        self._alike = sorted(_Reading(shards, data, schedule, skipped).alike(), key=lambda alike: alike[0])
        self._firsts = [first for first, _, _ in self._alike]
        self.begun = sum(epochs for _, epochs, _ in self._alike)
        last = self._alike[-1][0] + self._alike[-1][1] - 1 if self._alike else 0
        self.total = Account(last, 0)
        for _, epochs, one in self._alike:
            for name in ("samples", "once", "twice", "never", "skipped"):
                setattr(self.total, name, getattr(self.total, name) + epochs * getattr(one, name))
            for worker, slices in one.workers.items():
                self.total.workers[worker] += epochs * slices

    def page(self, first: int | None = None, most: int = MOST_EPOCHS) -> list[Account]:
        """At most ``most`` epochs from ``first`` on.

        None: the newest epochs; half of them may be earlier ones of which samples counted twice, or not at all.
        """
        if first is not None or self.begun <= most:
            return self._from(first or 0, most)
        odd = [
            one.of(epoch)
            for begin, epochs, one in self._alike
            if one.twice or one.never or one.skipped
            for epoch in range(begin, begin + min(epochs, most // 2))
        ][: most // 2]
        newest = self._newest(most - len(odd))
        return [one for one in odd if one.epoch < newest[0].epoch] + newest

    def _from(self, first: int, most: int) -> list[Account]:
        found: list[Account] = []
        for begin, epochs, one in self._alike[max(0, bisect_right(self._firsts, first) - 1) :]:
            at = max(begin, first)
            found += [one.of(epoch) for epoch in range(at, min(begin + epochs, at + most - len(found)))]
            if len(found) == most:
                break
        return found

    def _newest(self, most: int) -> list[Account]:
        found: list[Account] = []
        for begin, epochs, one in reversed(self._alike):
            end = begin + epochs
            found += [one.of(epoch) for epoch in range(end - 1, max(begin, end - most + len(found)) - 1, -1)]
            if len(found) == most:
                break
        return found[::-1]


class _Reading:
    """Reads the ledgers of all shards. The order of ``shards`` says which workers are named where shards differ."""

    def __init__(
        self,
        shards: Sequence[ShardLedger],
        data: DataSpec,
        schedule: SyncSchedule,
        poisoned: dict[int, list[int]],
    ) -> None:
        # Shards that tell the same are read once.
        shards = list({(tuple(sorted(one.rows)), one.folded_steps, one.counted): one for one in shards}.values())
        self._data, self._poisoned, self._number = data, poisoned, len(shards)
        self._details = [_details(shard, schedule) for shard in shards]
        # Before the present synchronous steps began, each slice counted: in earlier steps, or asynchronously.
        base = schedule.base_version
        self._sets = [
            _before(schedule, base),
            *(_before(schedule, max(base, shard.folded_steps)) for shard in shards),
            *(shard.counted for shard in shards),
        ]

    def alike(self) -> Iterator[tuple[int, int, Account]]:
        """Stretches of epochs: the first epoch, how many are alike, and the account of the first."""
        detailed = {epoch for details in self._details for epoch in details}
        cuts = {cut for epoch in (*detailed, *self._poisoned) for cut in (epoch, epoch + 1)}
        for first, epochs, found in segments(self._sets, cuts):
            detailed.discard(first)
            yield first, epochs, self._account(first, found)
        for epoch in detailed:
            yield epoch, 1, self._account(epoch, [RangeSet()] * len(self._sets))

    def _account(self, epoch: int, found: Sequence[RangeSet]) -> Account:
        data, number = self._data, self._number
        before, folded, counted = found[0], found[1 : number + 1], found[number + 1 :]
        details = [details.get(epoch, {}) for details in self._details]
        somewhere = _union(counted)
        plain = []
        for steps, one in zip(folded, counted, strict=True):
            # Of what was asynchronous before the present steps, this shard lacks what it has not counted.
            lost = common([before, minus(somewhere, one)]) if before and one != somewhere else RangeSet()
            plain.append(_union([minus(steps, lost) if lost else steps, one]))
        account = Account(epoch, data.samples_per_epoch * data.turns)
        stretches: list[tuple[int, int, list[int]]] = []
        told = RangeSet()
        for index in sorted({index for one in details for index in one}):
            told.add(index)
            each = [
                [0] * (index in steps and index not in before) + mine.get(index, []) or [0] * (index in other)
                for steps, other, mine in zip(folded, plain, details, strict=True)
            ]
            most = max(each, key=len)
            if len(most) > 1 or all(each):
                stretches.append((index, index + 1, most))
        rest = minus(common(plain), told) if told else common(plain)
        stretches += [(lo, hi, [0]) for lo, hi in rest.ranges()]
        self._fill(account, sorted(stretches, key=lambda stretch: stretch[0]))
        return account

    def _fill(self, account: Account, stretches: Iterable[tuple[int, int, list[int]]]) -> None:
        for lo, end, workers in stretches:
            hi = min(end, self._data.slices_per_epoch)
            if lo >= hi:
                continue
            samples = samples_of(self._data, lo, hi)
            if len(workers) == 1:
                account.once += samples
            else:
                account.twice += samples
            for worker in workers:
                account.workers[worker] += hi - lo
            last = account.slices[-1] if account.slices else None
            if last is not None and last[1] == lo and last[2] == workers:
                account.slices[-1] = last[0], hi, workers
            else:
                account.slices.append((lo, hi, workers))
        account.never = account.samples - account.once - account.twice
        for index in self._poisoned.get(account.epoch, ()):
            samples = samples_of(self._data, index, index + 1)
            if account.once >= samples:
                account.once, account.skipped = account.once - samples, account.skipped + samples


def _before(schedule: SyncSchedule, version: int) -> Runs:
    """The slices of all epochs that are done when synchronous steps stand at this version."""
    size = schedule.slices_per_epoch
    epoch, left = schedule.position(version)
    return Counted(
        [*([Run(0, epoch, ((0, size),))] if epoch else ()), Run(epoch, 1, tuple(complement(left, size)))]
    ).runs()


def _details(shard: ShardLedger, schedule: SyncSchedule) -> dict[int, dict[int, list[int]]]:
    """By epoch and slice, the workers whose contributions this shard has counted, as far as it has details.

    Of steps before the present synchronous ones it is not known any more which slices they had.
    """
    found: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    step, number = Step(0, ()), -1
    for first, lo, hi, of, worker in shard.rows:
        if of == 0:
            found[first][lo].append(worker)
        elif first >= schedule.base_version:
            if first != number:
                step, number = schedule.step(first), first
            for index in step.slices[lo:hi]:
                found[step.epoch][index].append(worker)
    return found


def _union(sets: Sequence[RangeSet]) -> RangeSet:
    if all(one == sets[0] for one in sets[1:]):
        return sets[0]
    return RangeSet.from_ranges(part for one in sets for part in one.ranges())
