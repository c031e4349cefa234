"""When a slot of shared weights may be used again."""

from __future__ import annotations

from paramserver.core.layout.slots import Slots


def test_a_slot_is_given_out_once_until_its_version_is_gone() -> None:
    slots = Slots(2)
    assert (slots.take(), slots.take(), slots.take()) == (0, 1, None)
    slots.drop(0)
    assert slots.take() == 0
    assert slots.take() is None


def test_two_versions_of_the_same_weights_share_a_slot() -> None:
    slots = Slots(1)
    slot = slots.take()
    assert slot is not None
    slots.use(slot)
    slots.drop(slot)
    assert slots.take() is None
    slots.drop(slot)
    assert slots.take() == slot


def test_what_a_reader_reads_is_not_given_out() -> None:
    slots = Slots(3)
    slots.join(7)
    for slot in (slots.take(), slots.take()):
        assert slot is not None
        slots.lend(7, slot)
        slots.drop(slot)
    assert slots.used == {0, 1}
    slots.reads(7, [1])
    assert slots.take() == 0
    slots.leave(7)
    assert slots.take() == 1


def test_every_reader_counts() -> None:
    slots = Slots(1)
    slots.join(1)
    slots.join(2)
    slots.reads(1, [0])
    slots.reads(2, [0])
    slots.leave(1)
    assert slots.take() is None
    slots.reads(2, [])
    assert slots.take() == 0


def test_a_limit_leaves_the_slots_that_have_memory() -> None:
    slots = Slots(4)
    first, second = slots.take(), slots.take()
    assert (first, second) == (0, 1)
    slots.drop(1)
    slots.limit([0])
    assert slots.take() is None
    slots.drop(0)
    assert slots.take() == 0


def test_in_step_three_slots_are_enough_and_each_comes_back_after_two_versions() -> None:
    """Two versions are kept, the third is being made, and readers follow the newest."""
    slots = Slots(8)
    slots.join(1)
    kept: list[int] = []
    seen = []
    for _ in range(9):
        made = slots.take()
        assert made is not None
        seen.append(made)
        kept.append(made)
        for old in kept[:-2]:
            slots.drop(old)
        del kept[:-2]
        slots.lend(1, made)
        slots.reads(1, [made])
    assert seen == [0, 1, 2] * 3
