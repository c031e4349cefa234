"""Which samples a slice has, which slices a step has, and which worker begins with which: all pure functions.

A slice is a stretch of the epoch's order of samples. That order is a permutation that can be asked for any single
place, so a worker finds the samples of its slices at the cost of those slices, however large the data set is.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt

from paramserver.core.turns.schedule import after_turns, next_turn, steps_with_turns

Range = tuple[int, int]

_MASK = (1 << 64) - 1
# An odd number with well spread bits. Another number would do, but would change every order of samples.
_MULTIPLIER = 0xD1B54A32D192ED03
# Six rounds mix well when the halves are large. Few samples need more rounds until all their orders are as likely.
_ROUNDS, _ROUNDS_IF_SMALL, _SMALL = 6, 12, 4096


@dataclass(frozen=True, slots=True)
class DataSpec:
    """The training data as slices see it: ``samples`` samples, ``slice_size`` in a slice, in ``batches`` batches.

    ``batches`` above 1: the script adds up the gradients of a slice's batches and steps once. All batches that are left
    in the last step of an epoch are then shared out evenly to ``slices_per_step`` slices, which have fewer batches.
    ``turns`` above 1: so many optimizer steps are made on each batch, and each of them is a slice of its own. Slice
    ``index`` then is turn ``index % turns`` on batch ``index // turns`` of the epoch.
    ``drawn``: a sampler of the script's gives the order, which only workers know. ``samples`` is then its length, and a
    "sample" is an entry that it gives, for a batch sampler a batch. An epoch may have fewer than that.
    ``slice_size`` 0 means that there is no data set: slices are only names, and epoch 0 never ends. Raises ValueError
    for negative numbers, numbers that contradict each other, and if an epoch would have no slice at all.
    """

    samples: int
    slice_size: int
    drop_last: bool = False
    shuffle: bool = True
    batches: int = 1
    slices_per_step: int = 0
    drawn: bool = False
    turns: int = 1

    def __post_init__(self) -> None:
        if self.turns < 1 or (self.turns > 1 and (self.batches > 1 or self.drawn)):
            raise ValueError(f"{self.turns} turns on each batch do not go with accumulate, or with a sampler's order")
        if self.samples < 0 or self.slice_size < 0:
            raise ValueError(f"samples ({self.samples}) and slice_size ({self.slice_size}) must be 0 or more")
        if self.batches < 1 or self.slice_size % self.batches:
            raise ValueError(f"a slice of {self.slice_size} samples cannot have {self.batches} equal batches")
        if self.slices_per_step < (1 if self.batches > 1 else 0):
            raise ValueError(f"slices of several batches need slices_per_step, not {self.slices_per_step}")
        if self.slice_size and not self.slices_per_epoch:
            raise ValueError(
                f"the data set has {self.samples} samples, which makes no slice of {self.batch_size}: use more data, "
                "or a smaller batch size, or drop_last=False"
            )

    @property
    def batch_size(self) -> int:
        """Samples in a batch. The last batch of an epoch may be short, unless drop_last."""
        return self.slice_size // self.batches

    @property
    def slices_per_epoch(self) -> int:
        """Slices in an epoch; the last one may be short, unless drop_last. 0: no data set."""
        if not self.slice_size:
            return 0
        full, rest, size = self._cut
        return (full + (-(-rest // size) if rest else 0)) * self.turns

    @property
    def samples_per_epoch(self) -> int:
        """Samples in all slices of an epoch."""
        if not self.drop_last or not self.slice_size:
            return self.samples
        return self.samples // self.batch_size * self.batch_size

    @property
    def batches_per_epoch(self) -> int:
        """Batches in all slices of an epoch; 0 without a data set."""
        return -(-self.samples_per_epoch // self.batch_size) if self.slice_size else 0

    @property
    def even(self) -> bool:
        """Whether every slice is known to have as many batches as every other one."""
        batches = self.slices_per_epoch // self.turns * self.batches
        return not (self.drawn and self.batches > 1) and self.batches_per_epoch == batches

    @property
    def _cut(self) -> tuple[int, int, int]:
        """Of an epoch: full slices at its beginning, samples after them, and how many of these a slice takes."""
        samples = self.samples_per_epoch
        if self.batches == 1:
            full, rest = divmod(samples, self.slice_size)
            return full, rest, self.slice_size
        steps, rest = divmod(samples, self.slices_per_step * self.slice_size)
        batches = -(-rest // self.batch_size)
        return steps * self.slices_per_step, rest, -(-batches // self.slices_per_step) * self.batch_size


def slice_samples(data: DataSpec, index: int) -> int:
    """How many samples slice ``index`` of an epoch has; 0 without a data set. Raises ValueError for other indices."""
    start, stop = places_of(data, index)
    return stop - start


def samples_of(data: DataSpec, lo: int, hi: int) -> int:
    """How many samples the slices [lo, hi) of an epoch have together. Raises ValueError for other indices.

    >>> samples_of(DataSpec(samples=22, slice_size=4), 0, 6)
    22
    """
    return _samples_below(data, hi) - _samples_below(data, lo)


def _samples_below(data: DataSpec, index: int) -> int:
    if index == data.slices_per_epoch:
        return data.samples_per_epoch * data.turns if data.slice_size else 0
    start, stop = places_of(data, index)
    return start * data.turns + index % data.turns * (stop - start)


def slice_batches(data: DataSpec, index: int) -> int:
    """How many batches slice ``index`` of an epoch has; 1 without a data set. Raises ValueError for other indices."""
    return -(-slice_samples(data, index) // data.batch_size) if data.slice_size else 1


def slice_indices(data: DataSpec, seed: int, epoch: int, index: int, most: int | None = None) -> list[int]:
    """The samples of slice ``index`` of ``epoch``, as indices into the data set, in order. ``most``: the first so many.

    The slices of an epoch share no sample, and (unless drop_last) together have every one. Takes time and memory for
    this slice only. Without a data set the list is empty. Raises ValueError if the epoch has no such slice.
    """
    start, stop = places_of(data, index)
    stop = stop if most is None else min(stop, start + most)
    if not data.shuffle or data.samples < 2:
        return list(range(start, stop))
    return _permuted(range(start, stop), data.samples, _round_keys(data.samples, seed, epoch))


def slice_seed(seed: int, epoch: int, index: int, purpose: str) -> int:
    """A seed in [0, 2**63) for what happens at random inside a slice; each ``purpose`` gets one of its own."""
    return int.from_bytes(_key(seed, epoch, index, purpose, 8), "little") >> 1


def places_of(data: DataSpec, index: int) -> Range:
    """The places of a slice in the order of the epoch, half-open. Raises ValueError if the epoch has no such slice."""
    if not data.slice_size:
        return 0, 0
    if not 0 <= index < data.slices_per_epoch:
        raise ValueError(f"there is no slice {index}: an epoch has slices 0 to {data.slices_per_epoch - 1}")
    full, _, size = data._cut
    index //= data.turns
    if index < full:
        return index * data.slice_size, (index + 1) * data.slice_size
    start = full * data.slice_size + (index - full) * size
    return start, min(start + size, data.samples_per_epoch)


def _key(seed: int, epoch: int, index: int, purpose: str, length: int) -> bytes:
    """Bytes that depend on all arguments; the numbers come first, so that no two lists of arguments read the same."""
    return hashlib.shake_256(f"{seed}/{epoch}/{index}/{purpose}".encode()).digest(length)


def _round_keys(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    """One 64-bit key per round of the permutation of an epoch."""
    rounds = _ROUNDS_IF_SMALL if size < _SMALL else _ROUNDS
    return struct.unpack(f"<{rounds}Q", _key(seed, epoch, 0, "order of samples", 8 * rounds))


def _permuted(places: Sequence[int], size: int, keys: Sequence[int]) -> list[int]:
    """Where a permutation of [0, size), size >= 2, that belongs to these keys (an even number) sends these places.

    A Feistel network over pairs (left, right) of [0, a) x [0, b), where a * b is ``size`` or little more: each round
    adds to one half a hash of the other, modulo the half's size, so a round can be undone and the network is a
    permutation. A result beyond ``size`` is sent through again until it lies inside; that keeps it a permutation.
    """
    a = isqrt(size - 1) + 1
    b = -(-size // a)
    pairs = tuple(zip(keys[::2], keys[1::2], strict=True))
    results: list[int] = []
    for place in places:
        value = place
        while True:
            left, right = divmod(value, b)
            # Two rounds at a time, written out, since a call would take longer than the round. The hash is the upper
            # half of the square of a product, which depends on all bits of what goes in.
            for key_1, key_2 in pairs:
                mixed = (right + key_1) * _MULTIPLIER & _MASK
                left = (left + (mixed * mixed >> 64)) % a
                mixed = (left + key_2) * _MULTIPLIER & _MASK
                right = (right + (mixed * mixed >> 64)) % b
            value = left * b + right
            if value < size:
                break
        results.append(value)
    return results


def assign(slices: int, workers: int) -> tuple[Range, ...]:
    """Cut ``[0, slices)`` into contiguous ranges, one per worker, whose lengths differ by at most one.

    Ranges are half-open and may be empty. Raises ValueError for negative numbers.
    """
    if slices < 0 or workers < 0:
        raise ValueError(f"slices ({slices}) and workers ({workers}) must be 0 or more")
    cuts = [slices * worker // workers for worker in range(workers)] + [slices]
    return tuple(itertools.pairwise(cuts))


def without_slices(slices: int, workers: int) -> list[int]:
    """The places of the workers that :func:`assign` gives no slice.

    >>> without_slices(2, 3)
    [0]
    """
    return [place for place, (lo, hi) in enumerate(assign(slices, workers)) if lo == hi]


def main_place(slices: int, workers: int) -> int:
    """The lowest place of a worker that :func:`assign` gives a slice; 0 if there are no slices.

    >>> main_place(2, 4)
    1
    """
    return next((place for place, (lo, hi) in enumerate(assign(slices, workers)) if lo < hi), 0)


@dataclass(frozen=True, slots=True)
class Step:
    """The slices of the epoch that a step consists of; the place in the tuple is the slice's index within the step."""

    epoch: int
    slices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SyncSchedule:
    """Which slices each synchronous step has.

    The step at ``base_version`` takes the first slices of ``remaining`` (half-open ranges of ``epoch``, sorted, apart
    from each other; None: the whole epoch), later steps go on from there, full epochs follow. A step has
    ``slices_per_step`` slices; the last one of an epoch may have fewer, since no step spans two epochs.

    ``slices_per_epoch`` 0 means that there is no data set: epoch 0 never ends, and step t has the slices named
    t * slices_per_step and on; ``base_version`` and ``remaining`` then mean nothing.

    ``turns`` above 1: see `DataSpec`. A step then has slices of one turn only, on ``slices_per_step`` batches; the
    following steps have the next turns on the same batches.

    Raises ValueError if the numbers contradict each other.
    """

    slices_per_epoch: int
    slices_per_step: int
    base_version: int = 0
    epoch: int = 0
    remaining: tuple[Range, ...] | None = None
    turns: int = 1

    def __post_init__(self) -> None:
        if self.turns < 1 or self.slices_per_epoch % self.turns:
            raise ValueError(f"an epoch of {self.slices_per_epoch} slices cannot have {self.turns} turns on each batch")
        if self.slices_per_step < 1:
            raise ValueError(f"slices_per_step must be at least 1, not {self.slices_per_step}")
        if min(self.slices_per_epoch, self.base_version, self.epoch) < 0:
            raise ValueError(
                f"slices_per_epoch ({self.slices_per_epoch}), base_version ({self.base_version}) and epoch "
                f"({self.epoch}) must be 0 or more"
            )
        if not self.slices_per_epoch and self.epoch:
            raise ValueError(f"without a data set there is only epoch 0, not epoch {self.epoch}")
        at = -1
        for lo, hi in self.remaining or () if self.slices_per_epoch else ():
            if not at < lo < hi <= self.slices_per_epoch:
                raise ValueError(
                    f"remaining {self.remaining} must be sorted ranges apart from each other within the "
                    f"{self.slices_per_epoch} slices of an epoch"
                )
            at = hi

    @property
    def steps_per_epoch(self) -> int:
        """Steps in a full epoch; 0 without a data set."""
        return -(-(self.slices_per_epoch // self.turns) // self.slices_per_step) * self.turns

    def step(self, version: int) -> Step:
        """The step that turns ``version`` into the next. Raises ValueError for versions before ``base_version``."""
        epoch, ranges = self.position(version)
        if not self.slices_per_epoch:
            first = version * self.slices_per_step
            return Step(0, tuple(range(first, first + self.slices_per_step)))
        if self.turns > 1:
            return Step(epoch, next_turn(ranges, self.turns, self.slices_per_step))
        slices: list[int] = []
        for lo, hi in ranges:
            slices.extend(range(lo, min(hi, lo + self.slices_per_step - len(slices))))
            if len(slices) == self.slices_per_step:
                break
        return Step(epoch, tuple(slices))

    def first_version(self, epoch: int) -> int:
        """The version at which ``epoch`` begins (the schedule's own epoch: goes on).

        Raises ValueError for epochs before the schedule's own, and without a data set for every epoch but 0.
        """
        if epoch < self.epoch or (epoch and not self.slices_per_epoch):
            only = f"epoch {self.epoch} and later" if self.slices_per_epoch else "epoch 0 without end"
            raise ValueError(f"epoch {epoch} is not in this schedule, which has {only}")
        if epoch == self.epoch:
            return self.base_version
        return self.base_version + self._first_steps + (epoch - self.epoch - 1) * self.steps_per_epoch

    def position(self, version: int) -> tuple[int, tuple[Range, ...]]:
        """The epoch of this version's step and the ranges of it still to do before that step; never an empty rest.

        Without a data set (0, ()). Raises ValueError for versions before ``base_version``.
        """
        if not self.slices_per_epoch:
            return 0, ()
        steps = version - self.base_version
        if steps < 0:
            raise ValueError(f"version {version} is before version {self.base_version}, where this schedule begins")
        epoch, ranges = self.epoch, self._first_ranges
        if steps >= self._first_steps:
            more, steps = divmod(steps - self._first_steps, self.steps_per_epoch)
            epoch, ranges = self.epoch + 1 + more, ((0, self.slices_per_epoch),)
        if self.turns > 1:
            return epoch, after_turns(ranges, self.turns, self.slices_per_step, steps)
        return epoch, _without(ranges, steps * self.slices_per_step)

    @property
    def _first_ranges(self) -> tuple[Range, ...]:
        return ((0, self.slices_per_epoch),) if self.remaining is None else self.remaining

    @property
    def _first_steps(self) -> int:
        if self.turns > 1:
            return steps_with_turns(self._first_ranges, self.turns, self.slices_per_step)
        return -(-sum(hi - lo for lo, hi in self._first_ranges) // self.slices_per_step)


def schedule_of(data: DataSpec, slices_per_step: int) -> SyncSchedule:
    """The schedule of a job that begins with synchronous steps on this data."""
    return SyncSchedule(data.slices_per_epoch, slices_per_step, turns=data.turns)


def _without(ranges: tuple[Range, ...], count: int) -> tuple[Range, ...]:
    """The ranges without their first ``count`` numbers. The ranges hold more than ``count`` numbers."""
    for i, (lo, hi) in enumerate(ranges):
        if count < hi - lo:
            return ((lo + count, hi), *ranges[i + 1 :])
        count -= hi - lo
    raise AssertionError(f"nothing is left of {ranges}")
