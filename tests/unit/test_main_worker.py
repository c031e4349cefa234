"""Which worker is the main one: it stays so, and what it does after training is done once."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from paramserver.core.job.main_worker import Candidate, MainWorker, at_work, uploader
from paramserver.core.work.slices import assign

THREE = [Candidate(11, 0), Candidate(12, 1), Candidate(13, 2)]


def after_the_start(workers: Sequence[Candidate] = THREE, slices: int = 8) -> MainWorker:
    main = MainWorker()
    main.look(workers, slices, begins=False)
    return main


def test_before_the_job_begins_nobody_comes_before_the_worker_of_rank_0() -> None:
    main, seen = MainWorker(), []
    for workers in (THREE[1:2], THREE[1:], THREE):
        main.look(workers, 8, begins=True)
        seen.append(main.member)
    assert seen == [0, 0, 11]


def test_a_newcomer_of_a_lower_rank_changes_nothing() -> None:
    main = after_the_start(THREE[1:])
    assert main.member == 12
    main.look([Candidate(14, 0), *THREE[1:]], 8, begins=False)
    assert main.member == 12


def test_another_worker_takes_over_when_the_main_one_is_lost() -> None:
    main = after_the_start()
    main.look(THREE[1:], 8, begins=False)
    assert (main.member, main.through) == (12, False)
    main.look([], 8, begins=False)
    assert main.member == 0
    main.look([Candidate(15, 1)], 8, begins=False)
    assert main.member == 15, "a worker that is started again"


def test_nobody_takes_over_when_its_script_has_come_to_its_end() -> None:
    main = after_the_start()
    main.leaves(11, was_told=False)
    for workers in (THREE[1:], [], [Candidate(15, 0)]):
        main.look(workers, 8, begins=False)
        assert (main.member, main.through) == (11, True)


def test_the_end_of_another_script_changes_nothing() -> None:
    main = after_the_start()
    main.leaves(12, was_told=False)
    main.look([THREE[0], THREE[2]], 8, begins=False)
    assert (main.member, main.through) == (11, False)


def test_a_worker_that_has_left_it_to_the_former_one_hands_on() -> None:
    """It was told that it is not the main worker, then the main one died: its script does not come back there."""
    main = after_the_start()
    main.look(THREE[1:], 8, begins=False)
    main.leaves(12, was_told=True)
    main.look(THREE[2:], 8, begins=False)
    assert (main.member, main.through) == (13, False)


def test_steps_that_are_trained_again_have_a_main_worker_again() -> None:
    main = after_the_start()
    main.undone()
    assert main.member == 11, "it is there"
    main.leaves(11, was_told=False)
    main.look(THREE[1:], 8, begins=False)
    main.undone()
    main.look(THREE[1:], 8, begins=False)
    assert (main.member, main.through) == (12, False)


@pytest.mark.parametrize(("there", "through"), [([11, 12], False), ([12], True)])
def test_another_coordinator_goes_on_with_it(there: list[int], through: bool) -> None:
    main = MainWorker()
    main.restore(11, there)
    main.look([Candidate(ident, ident - 11) for ident in there], 8, begins=False)
    assert (main.member, main.through) == (11, through)


@pytest.mark.parametrize(("slices", "workers"), [(s, w) for w in range(1, 9) for s in range(1, 9)])
def test_the_main_worker_has_slices(slices: int, workers: int) -> None:
    order = [100 + place for place in range(workers)]
    for main in order:
        places = at_work(order, main, slices)
        assert sorted(places) == order
        lo, hi = assign(slices, workers)[places.index(main)]
        assert lo < hi
        if slices >= workers:
            assert places == order
    assert at_work(order, 0, slices) == order


def test_at_most_one_script_comes_to_its_end_as_the_main_one() -> None:
    """Workers ask at the end of their script, leave, die and join in any order."""
    for seed in range(2000):
        chance = random.Random(seed)
        main, number = MainWorker(), 3
        there = {member: False for member in (1, 2, 3)}  # whether it was told no
        saved = []
        for _ in range(12):
            main.look([Candidate(member, member - 1) for member in sorted(there)], 2, begins=False)
            if not there:
                break
            member = chance.choice(sorted(there))
            match chance.choice(["ends", "dies", "joins"]):
                case "ends":
                    if main.member == member and not there[member]:
                        saved.append(member)
                    main.leaves(member, there.pop(member))
                case "dies":
                    there.pop(member)
                case "joins":
                    number += 1
                    there[number] = False
            if there and chance.random() < 0.5:
                asks = chance.choice(sorted(there))
                there[asks] = there[asks] or main.member != asks
        assert len(saved) <= 1, seed


@pytest.mark.parametrize(
    ("able", "main", "scripts", "uploads"),
    [
        ([], 7, True, 0),
        ([8], 7, True, 0),
        ([8, 7], 7, True, 7),
        ([8], 0, True, 0),
        ([8, 7], 0, False, 8),
        ([8], 7, False, 8),
        ([8, 7], 7, False, 7),
    ],
)
def test_version_0_is_that_of_the_main_worker(able: list[int], main: int, scripts: bool, uploads: int) -> None:
    """Of clients it is that of the first one that brings arrays."""
    assert uploader(able, main, scripts) == uploads
