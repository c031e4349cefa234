"""Which slices a step has if several optimizer steps are made on each batch, compared with a plain enumeration."""

from __future__ import annotations

import random

import pytest

from paramserver.core.turns.turns import Turns
from paramserver.core.work.slices import DataSpec, SyncSchedule, schedule_of, slice_indices
from paramserver.errors import UserError


def plainly(left: list[int], turns: int, batches: int) -> list[tuple[int, ...]]:
    """The steps for these slices, found by looking at each one."""
    steps, left = [], list(left)
    while left:
        first = sorted({slice_ // turns for slice_ in left})[:batches]
        turn = min(slice_ % turns for slice_ in left if slice_ // turns in first)
        steps.append(tuple(slice_ for slice_ in left if slice_ // turns in first and slice_ % turns == turn))
        left = [slice_ for slice_ in left if slice_ not in steps[-1]]
    return steps


def ranges_of(slices: list[int]) -> tuple[tuple[int, int], ...]:
    """The slices as ranges apart from each other."""
    ranges: list[tuple[int, int]] = []
    for slice_ in slices:
        if ranges and ranges[-1][1] == slice_:
            ranges[-1] = ranges[-1][0], slice_ + 1
        else:
            ranges.append((slice_, slice_ + 1))
    return tuple(ranges)


@pytest.mark.parametrize("seed", range(40))
def test_steps_have_one_turn_each_and_all_slices_come_once(seed: int) -> None:
    draw = random.Random(seed)
    turns, per_step, batches = draw.randint(2, 6), draw.randint(1, 5), draw.randint(1, 17)
    everything = list(range(batches * turns))
    left = [slice_ for slice_ in everything if draw.random() < draw.choice((0.2, 0.9, 1.0))] or everything
    schedule = SyncSchedule(len(everything), per_step, 7, 1, ranges_of(left), turns)
    first, later = plainly(left, turns, per_step), plainly(everything, turns, per_step)
    assert [schedule.step(7 + number).slices for number in range(len(first))] == first
    assert schedule.first_version(2) == 7 + len(first)
    assert [schedule.step(7 + len(first) + number).slices for number in range(2 * len(later))] == [*later, *later]
    assert schedule.step(7 + len(first) + len(later)).epoch == 3
    assert schedule.steps_per_epoch == len(later)


def test_a_schedule_goes_on_from_any_of_its_positions() -> None:
    whole = schedule_of(DataSpec(22, 2, turns=3), 4)
    for version in range(2 * whole.steps_per_epoch):
        epoch, remaining = whole.position(version)
        again = SyncSchedule(whole.slices_per_epoch, 4, version, epoch, remaining, 3)
        assert [again.step(version + more) for more in range(9)] == [whole.step(version + more) for more in range(9)]


def test_all_turns_on_a_batch_have_its_samples() -> None:
    data, single = DataSpec(10, 4, turns=2), DataSpec(10, 4)
    assert data.slices_per_epoch == 2 * single.slices_per_epoch
    for index in range(data.slices_per_epoch):
        assert slice_indices(data, 5, 1, index) == slice_indices(single, 5, 1, index // 2)


def test_only_the_step_of_the_wanted_turn_contributes() -> None:
    turns = Turns(["critic", "critic", "actor"])
    turns.begin(1)
    assert [turns.step("critic"), turns.wanted, turns.step("critic")] == [False, "critic", True]
    turns.go_on(2)
    assert (turns.wanted, turns.step("actor")) == ("actor", True)
    turns.go_on(None)
    assert turns.wanted == ""
    with pytest.raises(UserError, match="steps once more on a batch"):
        turns.step("critic")


def test_a_step_out_of_turn_is_refused() -> None:
    turns = Turns(["critic", "actor"])
    turns.begin(0)
    with pytest.raises(UserError, match="the turn of 'critic'"):
        turns.step("actor")


@pytest.mark.parametrize("others", [{"batches": 2, "slices_per_step": 2}, {"drawn": True}])
def test_turns_do_not_go_with_everything(others: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="2 turns on each batch"):
        DataSpec(8, 2, turns=2, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize(("made", "refused"), [(0, False), (1, True), (2, True), (3, False)])
def test_a_batch_has_all_of_its_steps_or_none(made: int, refused: bool) -> None:
    turns = Turns(["critic", "critic", "actor"])
    turns.begin(0)
    for name in ["critic", "critic", "actor"][:made]:
        turns.step(name)
    if not refused:
        turns.end()
        return
    with pytest.raises(UserError, match=rf"where the optimizer of '{['', 'critic', 'actor'][made]}' is to step"):
        turns.end()
