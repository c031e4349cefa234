"""Which samples a slice has and which slices a step has."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise, permutations
from math import factorial
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.core.work.slices import (
    DataSpec,
    Step,
    SyncSchedule,
    assign,
    main_place,
    slice_batches,
    slice_indices,
    slice_samples,
    slice_seed,
    without_slices,
)

PINNED_SMALL = [5, 8, 6, 3, 2, 0, 4, 7, 9, 1]
PINNED_LARGE = [38656, 34895, 9195, 27570, 2705, 23512, 14596, 48768]
PINNED_HUGE = [497774349692, 572445089187, 426706304937, 887767644344]
PINNED_SEED = 4391068106887753333


def order(samples: int, seed: int = 0, epoch: int = 0) -> list[int]:
    """The whole epoch in one slice."""
    return slice_indices(DataSpec(samples, samples), seed, epoch, 0)


# ---- slices of an epoch


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 700), st.integers(1, 90), st.integers(-5, 2**70), st.integers(0, 1000), st.booleans())
def test_every_sample_once_per_epoch(samples: int, size: int, seed: int, epoch: int, shuffle: bool) -> None:
    data = DataSpec(samples, size, shuffle=shuffle)
    slices = [slice_indices(data, seed, epoch, index) for index in range(data.slices_per_epoch)]
    assert sorted(i for one in slices for i in one) == list(range(samples))
    assert [len(one) for one in slices] == [slice_samples(data, index) for index in range(len(slices))]
    assert all(len(one) == size for one in slices[:-1])
    assert 0 < len(slices[-1]) <= size
    if not shuffle:
        assert [i for one in slices for i in one] == list(range(samples))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(1, 60), st.integers(0, 50))
def test_drop_last_leaves_out_the_short_slice_only(samples: int, size: int, seed: int) -> None:
    full = DataSpec(samples, size)
    if samples < size:
        with pytest.raises(ValueError, match=f"{samples} samples, which makes no slice of {size}"):
            DataSpec(samples, size, drop_last=True)
        return
    data = DataSpec(samples, size, drop_last=True)
    assert data.slices_per_epoch == samples // size
    assert slice_samples(data, data.slices_per_epoch - 1) == size
    assert slice_indices(data, seed, 3, 0) == slice_indices(full, seed, 3, 0)


@pytest.mark.parametrize("samples", [4094, 4095, 4096, 4097, 9999, 65536, 99_991])
def test_large_epochs_are_permutations_too(samples: int) -> None:
    assert sorted(order(samples, seed=7, epoch=1)) == list(range(samples))


def test_order_does_not_depend_on_the_size_of_slices() -> None:
    small, large = DataSpec(1000, 10), DataSpec(1000, 64)
    one = [i for index in range(100) for i in slice_indices(small, 3, 4, index)]
    assert one == [i for index in range(16) for i in slice_indices(large, 3, 4, index)]


def test_order_is_pinned() -> None:
    """Every process, Python and release must find the same order of samples: these numbers may never change."""
    assert order(10, seed=1, epoch=2) == PINNED_SMALL
    assert slice_indices(DataSpec(60_000, 8), 1, 2, 3) == PINNED_LARGE
    assert slice_indices(DataSpec(10**12, 4), 1, 2, 249_999_999_999) == PINNED_HUGE
    assert slice_seed(1, 2, 3, "dropout") == PINNED_SEED


@pytest.mark.parametrize("samples", [10**9, 10**12, 2**40 - 1, 2**62])
def test_huge_data_sets_are_never_materialised(samples: int) -> None:
    data = DataSpec(samples, 64)
    seen = [i for index in range(20) for i in slice_indices(data, 1, 0, index)]
    assert len(set(seen)) == len(seen) == 20 * 64
    assert all(0 <= i < samples for i in seen)
    assert 0.4 < fmean(seen) / samples < 0.6
    assert len(slice_indices(data, 1, 0, data.slices_per_epoch - 1)) == slice_samples(data, data.slices_per_epoch - 1)


def test_a_slice_is_quick_to_compute() -> None:
    """The best of many, since other processes disturb; a wide margin over the 0.1 ms or so that it takes."""
    data = DataSpec(10**12, 64)
    times = []
    for index in range(50):
        begin = time.perf_counter()
        slice_indices(data, 1, 0, index)
        times.append(time.perf_counter() - begin)
    assert min(times) < 1e-3


# ---- the order is well mixed


@pytest.mark.parametrize("samples", [100, 1000, 5000, 20_000])
def test_neighbours_end_up_far_apart(samples: int) -> None:
    """A random order moves a sample by a third of the length on average, and so do two neighbours differ."""
    for epoch in range(3):
        shuffled = order(samples, seed=11, epoch=epoch)
        tolerance = 0.8 / samples**0.5
        assert abs(fmean(abs(i - place) for place, i in enumerate(shuffled)) / samples - 1 / 3) < tolerance
        assert abs(fmean(abs(a - b) for a, b in pairwise(shuffled)) / samples - 1 / 3) < tolerance
        rising = sum(a < b for a, b in pairwise(shuffled)) / (samples - 1)
        assert abs(rising - 0.5) < tolerance


def test_every_slice_draws_from_everywhere() -> None:
    """Counts of (slice, tenth of the data) are as even as chance makes them: chi-square, 81 degrees of freedom."""
    for seed in range(5):
        shuffled = order(10_000, seed)
        counts = Counter((place // 1000, i // 1000) for place, i in enumerate(shuffled))
        chi_square = sum((counts[a, b] - 100) ** 2 / 100 for a in range(10) for b in range(10))
        assert 30 < chi_square < 150


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    data = DataSpec(50_000, 64)
    first = [slice_indices(data, seed, epoch, 0) for seed in range(8) for epoch in range(8)]
    assert len({tuple(one) for one in first}) == 64
    # Two random slices of 64 out of 50,000 share 0.08 samples on average.
    shared = fmean(len(set(a) & set(b)) for a, b in pairwise(first))
    assert shared < 0.6
    same = sum(a == b for a, b in zip(order(50_000, 0, 0), order(50_000, 0, 1), strict=True))
    assert same < 10


@pytest.mark.parametrize("samples", [2, 3, 4, 5])
def test_all_orders_of_few_samples_are_about_as_likely(samples: int) -> None:
    trials = 40 * factorial(samples)
    counts = Counter(tuple(order(samples, seed)) for seed in range(trials))
    assert set(counts) == set(permutations(range(samples)))
    assert all(10 < count < 90 for count in counts.values())


def test_one_sample_is_easily_shuffled() -> None:
    assert order(1) == [0]


# ---- what is refused


def test_slices_that_do_not_exist_are_refused() -> None:
    data = DataSpec(10, 4)
    for index in (-1, 3):
        with pytest.raises(ValueError, match="slices 0 to 2"):
            slice_indices(data, 0, 0, index)
        with pytest.raises(ValueError, match="slices 0 to 2"):
            slice_samples(data, index)


def test_data_that_makes_no_slice_is_refused() -> None:
    for samples, size in ((0, 4), (-1, 4), (4, -1)):
        with pytest.raises(ValueError, match=r"0 or more|makes no slice"):
            DataSpec(samples, size)


def test_without_a_data_set_slices_are_only_names() -> None:
    data = DataSpec(0, 0)
    assert data.slices_per_epoch == 0
    assert slice_indices(data, 0, 0, 10**9) == []
    assert slice_samples(data, 5) == 0


# ---- seeds


def test_seeds_differ_in_everything() -> None:
    places = [(s, e, i, p) for s in (0, 1, 12) for e in (0, 1, 11) for i in (0, 1, 2, 111) for p in ("dropout", "data")]
    seeds = [slice_seed(*place) for place in places]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**61, "all bits are in use"
    assert seeds == [slice_seed(*place) for place in places]


# ---- assignment


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 500), st.integers(1, 70))
def test_assignment_tiles_the_step_evenly(slices: int, workers: int) -> None:
    ranges = assign(slices, workers)
    assert len(ranges) == workers
    assert ranges[0][0] == 0
    assert ranges[-1][1] == slices
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    lengths = [hi - lo for lo, hi in ranges]
    assert min(lengths) >= 0
    assert max(lengths) - min(lengths) <= 1


def test_assignment_of_special_numbers() -> None:
    assert assign(8, 4) == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert [hi - lo for lo, hi in assign(2, 5)].count(0) == 3
    assert assign(4, 0) == ()
    with pytest.raises(ValueError, match="0 or more"):
        assign(-1, 2)


# ---- steps


def test_last_step_of_an_epoch_is_short() -> None:
    schedule = SyncSchedule(slices_per_epoch=10, slices_per_step=4)
    assert schedule.steps_per_epoch == 3
    assert [schedule.step(v) for v in range(4)] == [
        Step(0, (0, 1, 2, 3)),
        Step(0, (4, 5, 6, 7)),
        Step(0, (8, 9)),
        Step(1, (0, 1, 2, 3)),
    ]
    assert schedule.step(3 * 10**9 + 2) == Step(10**9, (8, 9))
    assert [schedule.first_version(epoch) for epoch in (0, 1, 2)] == [0, 3, 6]
    assert [schedule.position(v) for v in (0, 2, 3)] == [(0, ((0, 10),)), (0, ((8, 10),)), (1, ((0, 10),))]


def test_schedule_goes_on_where_asynchronous_work_left_off() -> None:
    schedule = SyncSchedule(10, 3, base_version=100, epoch=2, remaining=((1, 3), (5, 6), (8, 10)))
    assert [schedule.step(v) for v in range(100, 104)] == [
        Step(2, (1, 2, 5)),
        Step(2, (8, 9)),
        Step(3, (0, 1, 2)),
        Step(3, (3, 4, 5)),
    ]
    assert [schedule.first_version(epoch) for epoch in (2, 3, 4)] == [100, 102, 106]
    assert [schedule.position(v) for v in (100, 101, 102, 103)] == [
        (2, ((1, 3), (5, 6), (8, 10))),
        (2, ((8, 10),)),
        (3, ((0, 10),)),
        (3, ((3, 10),)),
    ]


def test_nothing_remaining_means_the_next_epoch() -> None:
    schedule = SyncSchedule(4, 3, base_version=7, epoch=1, remaining=())
    assert schedule.position(7) == (2, ((0, 4),))
    assert schedule.step(7) == Step(2, (0, 1, 2))
    assert schedule.first_version(1) == schedule.first_version(2) == 7


def test_without_a_data_set_epoch_zero_never_ends() -> None:
    schedule = SyncSchedule(0, 3, base_version=5, remaining=())
    assert schedule.step(5) == Step(0, (15, 16, 17))
    assert schedule.step(10**9) == Step(0, tuple(range(3 * 10**9, 3 * 10**9 + 3)))
    assert schedule.position(9) == (0, ())
    assert schedule.steps_per_epoch == 0
    assert schedule.first_version(0) == 5
    with pytest.raises(ValueError, match="epoch 0 without end"):
        schedule.first_version(1)


@st.composite
def schedules(draw: st.DrawFn) -> SyncSchedule:
    slices = draw(st.integers(1, 60))
    remaining = None
    if draw(st.booleans()):
        flags = draw(st.lists(st.booleans(), min_size=slices, max_size=slices))
        edges = [i for i in range(slices + 1) if ([False, *flags, False][i]) != ([False, *flags, False][i + 1])]
        remaining = tuple(zip(edges[::2], edges[1::2], strict=True))
    return SyncSchedule(slices, draw(st.integers(1, 20)), draw(st.integers(0, 50)), draw(st.integers(0, 5)), remaining)


@settings(max_examples=120, deadline=None)
@given(schedules())
def test_every_slice_once_per_epoch_and_positions_agree(schedule: SyncSchedule) -> None:
    rest = ((0, schedule.slices_per_epoch),) if schedule.remaining is None else schedule.remaining
    for epoch in range(schedule.epoch, schedule.epoch + 3):
        versions = range(schedule.first_version(epoch), schedule.first_version(epoch + 1))
        steps = [schedule.step(version) for version in versions]
        assert [i for step in steps for i in step.slices] == [i for lo, hi in rest for i in range(lo, hi)]
        assert all(step.epoch == epoch for step in steps)
        assert all(len(step.slices) == schedule.slices_per_step for step in steps[:-1])
        assert all(step.slices for step in steps)
        rest = ((0, schedule.slices_per_epoch),)
    # A schedule made from any position goes on just the same.
    for version in range(schedule.base_version, schedule.base_version + 12):
        epoch, ranges = schedule.position(version)
        again = SyncSchedule(schedule.slices_per_epoch, schedule.slices_per_step, version, epoch, ranges)
        assert [again.step(v) for v in range(version, version + 9)] == [
            schedule.step(v) for v in range(version, version + 9)
        ]


def test_steps_outside_the_schedule_are_refused() -> None:
    schedule = SyncSchedule(10, 4, base_version=5, epoch=2)
    with pytest.raises(ValueError, match="before version 5"):
        schedule.step(4)
    with pytest.raises(ValueError, match="epoch 2 and later"):
        schedule.first_version(1)


@pytest.mark.parametrize("remaining", [((0, 11),), ((3, 3),), ((2, 4), (4, 6)), ((5, 6), (1, 2)), ((-1, 2),)])
def test_remaining_must_be_sorted_ranges_apart(remaining: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="sorted ranges"):
        SyncSchedule(10, 4, remaining=remaining)


def test_contradictory_schedules_are_refused() -> None:
    for arguments in ((10, 0), (-1, 2), (10, 2, -1), (10, 2, 0, -1), (0, 2, 0, 1)):
        with pytest.raises(ValueError, match=r"at least 1|0 or more|only epoch 0"):
            SyncSchedule(*arguments)


@pytest.mark.parametrize("workers", range(1, 9))
@pytest.mark.parametrize("slices", range(9))
def test_who_has_no_slices_and_who_is_the_main_one(slices: int, workers: int) -> None:
    idle = without_slices(slices, workers)
    assert len(idle) == max(0, workers - slices)
    assert main_place(slices, workers) == next((p for p in range(workers) if p not in idle), 0)


# ---- slices of several batches


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("samples", [1, 3, 5, 24, 25, 47, 48, 49, 59, 60, 71, 97])
@pytest.mark.parametrize(("batches", "per_step"), [(4, 2), (2, 4), (3, 1), (2, 3)])
def test_every_sample_is_in_one_batch_of_one_slice(samples: int, batches: int, per_step: int, drop_last: bool) -> None:
    size = 3
    if drop_last and samples < size:
        with pytest.raises(ValueError, match="makes no slice of 3"):
            DataSpec(samples, size * batches, drop_last, True, batches, per_step)
        return
    data = DataSpec(samples, size * batches, drop_last, True, batches, per_step)
    found = [slice_indices(data, 1, 2, index) for index in range(data.slices_per_epoch)]
    counted = samples - samples % size if drop_last else samples
    assert data.samples_per_epoch == counted
    assert sorted(sample for one in found for sample in one) == sorted(
        slice_indices(DataSpec(samples, samples), 1, 2, 0)[:counted]
    )
    of = [slice_batches(data, index) for index in range(data.slices_per_epoch)]
    assert of == [-(-len(one) // size) for one in found]
    assert sum(of) == data.batches_per_epoch == -(-counted // size)
    assert all(0 < one <= batches for one in of)
    assert data.even == (set(of) == {batches})
    steps = SyncSchedule(data.slices_per_epoch, per_step).steps_per_epoch
    assert steps == -(-data.batches_per_epoch // (batches * per_step)), "as many as DDP makes"
    # All slices of the last step have as many batches, except that the last ones may have fewer, or be missing.
    last = of[(steps - 1) * per_step :]
    assert len(set(last[:-1])) <= 1
    assert of[: (steps - 1) * per_step] == [batches] * ((steps - 1) * per_step)


def test_batches_that_contradict_the_slice_are_refused() -> None:
    for size, batches, per_step in ((6, 4, 2), (6, 0, 2), (6, 2, 0), (6, 1, -1)):
        with pytest.raises(ValueError, match="batches"):
            DataSpec(100, size, False, True, batches, per_step)
