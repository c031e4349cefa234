"""The rounds of process groups: who has come, what is complete, what may be forgotten."""

from __future__ import annotations

import random

import pytest

from paramserver.core.collectives.rounds import (
    Complete,
    Effect,
    Forget,
    Refused,
    RoundName,
    Rounds,
    RoundsError,
    StepOverError,
    Terms,
    UnknownGroupError,
)


def name(number: int = 0, piece: int = 0, group: str = "g") -> RoundName:
    return RoundName(group, "", number, piece)


def terms(ranks: int = 3, what: str = "all_reduce (sum) of 8 float32", nbytes: int = 32) -> Terms:
    return Terms(what, tuple(range(ranks)), 1, "float32", nbytes)


def opened(size: int = 3) -> Rounds:
    rounds = Rounds(10.0)
    assert rounds.open("g", size, 0.0) == []
    return rounds


def test_a_round_is_complete_when_the_last_rank_has_come_whatever_the_order() -> None:
    for seed in range(50):
        order = list(range(5))
        random.Random(seed).shuffle(order)
        rounds = opened(5)
        found: list[Effect] = []
        for rank in order:
            assert found == []
            found = rounds.come(name(), terms(5), rank, rank != 2, 0.0)
        assert found == [Complete(name(), (0, 1, 3, 4))]


def test_what_is_repeated_changes_nothing() -> None:
    rounds = opened()
    for rank in (1, 1, 0, 1, 0):
        assert rounds.come(name(), terms(), rank, True, 0.0) == []
    assert rounds.missing(name()) == (2,)
    assert rounds.come(name(), terms(), 2, True, 0.0) == [Complete(name(), (0, 1, 2))]
    assert rounds.come(name(), terms(), 2, True, 0.0) == []


def test_ranks_that_disagree_are_all_told() -> None:
    rounds = opened()
    assert rounds.come(name(), terms(), 2, True, 0.0) == []
    [effect] = rounds.come(name(), terms(what="broadcast from rank 0 of 8 float32"), 0, True, 0.0)
    assert isinstance(effect, Refused)
    assert effect.why.startswith(
        "rank 2 calls all_reduce (sum) of 8 float32, and rank 0 calls broadcast from rank 0 of 8 float32: all ranks"
    )
    assert rounds.come(name(), terms(), 1, True, 0.0) == []
    assert rounds.refusal(name()) == effect.why


def test_a_difference_that_the_words_hide_is_shown_in_bytes() -> None:
    rounds = opened()
    rounds.come(name(), terms(), 0, True, 0.0)
    [effect] = rounds.come(name(), terms(nbytes=16), 1, True, 0.0)
    assert isinstance(effect, Refused)
    assert "with 32 bytes of ranks 0, 1, 2, and rank 1 calls" in effect.why


def test_a_round_stays_known_until_all_ranks_have_its_result() -> None:
    rounds = opened()
    for number in range(2):
        for rank in range(3):
            rounds.come(name(number), terms(), rank, True, 0.0, done=0)
    assert rounds.known == 2
    assert rounds.come(name(2), terms(), 0, True, 0.0, done=1) == []
    assert rounds.come(name(2), terms(), 1, True, 0.0, done=2) == []
    found = rounds.come(name(2), terms(), 2, True, 0.0, done=1)
    assert found == [Forget((name(0),)), Complete(name(2), (0, 1, 2))]
    assert rounds.known == 2


def test_messages_between_two_ranks_are_counted_by_themselves() -> None:
    rounds = opened()
    pair = Terms("message", (0, 2), 0, "", 8)
    first = RoundName("g", "message 0>2", 0, 0)
    assert rounds.come(first, pair, 2, False, 0.0) == []
    assert rounds.come(name(), terms(), 0, True, 0.0) == []
    assert rounds.come(first, pair, 0, True, 0.0) == [Complete(first, (0,))]
    with pytest.raises(RoundsError, match="rank 1 does not belong"):
        rounds.come(first, pair, 1, True, 0.0)


def test_the_sentence_about_late_ranks_names_them() -> None:
    rounds = opened()
    rounds.come(name(), terms(), 1, True, 0.0)
    assert rounds.late(name(), 5.0).startswith(
        "all_reduce (sum) of 8 float32 has waited 5 s for ranks 0, 2: look there"
    )


def test_a_group_that_this_server_has_not_opened_is_unknown() -> None:
    with pytest.raises(UnknownGroupError):
        Rounds(10.0).come(name(), terms(), 0, True, 0.0)


def test_a_group_has_one_size() -> None:
    rounds = opened()
    with pytest.raises(RoundsError, match="has 3 ranks, another one says 4"):
        rounds.open("g", 4, 0.0)
    with pytest.raises(RoundsError, match="1 to"):
        rounds.open("h", 0, 0.0)


def test_a_group_is_forgotten_when_all_have_left_or_nobody_has_called_for_long() -> None:
    rounds = opened(2)
    rounds.come(name(), terms(2), 0, True, 0.0)
    assert rounds.leave("g", 0) == []
    assert rounds.leave("g", 1) == [Forget((name(),))]
    assert (rounds.groups, rounds.known) == (0, 0)
    rounds.open("killed", 2, 0.0)
    rounds.come(name(group="killed"), terms(2), 0, True, 5.0)
    assert rounds.open("new", 2, 15.0) == []
    assert rounds.open("newer", 2, 15.1) == [Forget((name(group="killed"),))]


def test_random_arrivals_lose_and_keep_no_round() -> None:
    """Each round is complete once, and at the end only the last ones are known."""
    for seed in range(30):
        chance = random.Random(seed)
        size, numbers = chance.randint(1, 6), 12
        rounds, at, complete = opened(size), [0] * size, []
        while min(at) < numbers:
            rank = chance.choice([r for r in range(size) if at[r] <= min(at) and at[r] < numbers])
            for effect in rounds.come(name(at[rank]), terms(size), rank, True, 0.0, done=at[rank]):
                if isinstance(effect, Complete):
                    complete.append(effect.name.number)
            at[rank] += 1
        assert complete == list(range(numbers))
        assert rounds.known == 1


# ---- rounds of slices


def of_slices(slices: int = 2) -> Terms:
    return Terms("the statistics of a layer in step 5", tuple(range(slices)), 1, "float64", 24, "slice")


def test_a_slice_that_is_computed_again_gets_the_same_round() -> None:
    """Another worker computes slice 1 once more, after the round was complete; slice 0 is at a later round."""
    rounds = Rounds(10.0)
    group, effects = rounds.follow(3, 2, 0.0)
    assert (group, effects) == ("slices of timeline 3", [])
    first, second = RoundName(group, "0", 500, 0), RoundName(group, "0", 501, 0)
    assert rounds.come(first, of_slices(), 0, True, 0.0, done=500) == []
    assert rounds.come(first, of_slices(), 1, True, 0.0, done=500) == [Complete(first, (0, 1))]
    assert rounds.come(second, of_slices(), 0, True, 0.0, done=500) == []
    assert rounds.come(first, of_slices(), 1, True, 0.0, done=500) == []
    assert (rounds.missing(first), rounds.missing(second)) == ((), (1,))


def test_rounds_of_a_step_are_forgotten_when_all_slices_are_in_the_next_step() -> None:
    rounds = Rounds(10.0)
    group, _ = rounds.follow(1, 2, 0.0)
    old, new = RoundName(group, "0", 100, 0), RoundName(group, "0", 200, 0)
    for slice_ in (0, 1):
        rounds.come(old, of_slices(), slice_, True, 0.0, done=100)
    assert rounds.come(new, of_slices(), 1, True, 0.0, done=200) == []
    assert rounds.come(new, of_slices(), 0, True, 0.0, done=200) == [Forget((old,)), Complete(new, (0, 1))]
    assert rounds.known == 1
    with pytest.raises(StepOverError, match="the step is over"):
        rounds.come(old, of_slices(), 1, True, 0.0, done=100)  # a worker that was given up for stalled comes back


def test_a_new_timeline_forgets_the_rounds_of_the_former_one() -> None:
    """Whoever waits there hears it, and a worker that has not followed the job back is refused."""
    rounds = Rounds(10.0)
    group, _ = rounds.follow(1, 2, 0.0)
    waiting = RoundName(group, "0", 100, 0)
    rounds.come(waiting, of_slices(), 0, True, 0.0, done=100)
    assert rounds.follow(2, 2, 0.0) == ("slices of timeline 2", [Forget((waiting,))])
    assert rounds.follow(2, 2, 0.0) == ("slices of timeline 2", [])
    assert (rounds.groups, rounds.known) == (1, 0)
    with pytest.raises(RoundsError, match="timeline 1 is over, and timeline 2 has begun"):
        rounds.follow(1, 2, 0.0)


def test_slices_are_called_slices() -> None:
    rounds = Rounds(10.0)
    group, _ = rounds.follow(1, 2, 0.0)
    name = RoundName(group, "0", 100, 0)
    with pytest.raises(RoundsError, match=r"slice 2 does not belong to .* of slices 0, 1"):
        rounds.come(name, of_slices(), 2, True, 0.0)
    rounds.come(name, of_slices(), 0, True, 0.0)
    other = Terms("the statistics of a layer in step 5", (0, 1), 1, "float64", 48, "slice")
    [effect] = rounds.come(name, other, 1, True, 0.0)
    assert isinstance(effect, Refused)
    assert "with 24 bytes of slices 0, 1, and slice 1 calls" in effect.why
