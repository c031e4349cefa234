"""Who is told to compute which slice: single rules, and whole jobs of workers of all speeds, simulated."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from paramserver.core.work.stealing import Ask, Assignment, Stealing
from tests.support.unit.pacing import Simulation

# Slices of 16, dealt out to 4 workers.
OF, WORKERS = 16, 4


def ask(worker: int, finished: Sequence[int] = (), work_s: float = 1.0, step: int = 0, of: int = OF) -> Ask:
    """A question of the worker of this number, from 1; its range is that of its number."""
    return Ask(Assignment(worker, worker - 1, WORKERS, work_s), step, of, frozenset(finished))


def begun(*work_s: float) -> Stealing:
    """A step that begins at time 0, with all four workers in it, of these speeds."""
    stealing = Stealing()
    stealing.begin(0, 0.0)
    for place, seconds in enumerate(work_s or (1.0, 1.0, 1.0, 4.0)):
        stealing.given(Assignment(place + 1, place, WORKERS, seconds), 0)
    return stealing


def test_the_own_range_comes_first_and_from_its_near_end() -> None:
    stealing = begun(1.0, 1.0, 1.0, 1.0)
    assert stealing.ask(ask(4), [(0, 16)], 0.0) == 12
    assert stealing.ask(ask(4, [12]), [(0, 16)], 1.0) == 13
    stealing.begin(1, 5.0)
    assert stealing.taken(1) == ()


def test_who_is_through_takes_the_far_end_of_the_slowest() -> None:
    stealing = begun()
    assert [stealing.ask(ask(n, range(4 * n - 4, 4 * n)), [(12, 16)], 4.2) for n in (1, 2, 3)] == [15, 14, 13]
    assert stealing.ask(ask(4, [12], work_s=4.0), [(13, 16)], 4.3) is None, "there is nothing left for the slow one"
    stealing.begin(1, 5.0)
    assert stealing.taken(1) == (13, 14, 15)
    assert stealing.taken(2) == ()


def test_a_slow_worker_leaves_to_others_what_they_will_do_sooner() -> None:
    stealing = begun()
    assert stealing.ask(ask(4, [12], work_s=4.0), [(0, 16)], 4.0) is None, "three others are through now, too"
    stealing = begun(1.0, 1.0, 1.0, 1.4)
    assert stealing.ask(ask(4, [12, 13], work_s=1.4), [(0, 16)], 2.8) == 14


def test_if_the_others_do_not_come_a_slow_worker_goes_on() -> None:
    stealing = begun()
    assert [stealing.ask(ask(4, [12], work_s=4.0), [(0, 16)], now) for now in (4.0, 6.0, 8.0)] == [None, None, 13]


def test_a_fast_worker_that_asks_no_more_keeps_nobody_waiting() -> None:
    """It was told to wait and hangs since. The owner must not be told for ever to leave slices to it."""
    stealing = Stealing()
    stealing.begin(0, 0.0)
    slow, fast = Assignment(1, 0, 2, 0.05), Assignment(2, 1, 2, 0.02)
    stealing.given(slow, 0)
    stealing.given(fast, 0)
    stealing.ask(Ask(fast, 0, 16, frozenset({8, 9})), [(7, 8), (10, 16)], 0.1)
    question = Ask(slow, 0, 16, frozenset(range(7)))
    assert stealing.ask(question, [(7, 8)], 0.12) is None, "the fast one is expected to come for it"
    assert stealing.ask(question, [(7, 8)], 0.5) == 7


def test_owners_that_say_nothing_are_expected_to_be_through_with_their_ranges_in_time() -> None:
    """Held back for merging, their slices cannot be seen; only when they are late does somebody compute them, too."""
    stealing = begun(1.0, 1.0, 1.0, 1.0)
    done = range(4)
    assert stealing.ask(ask(1, done), [(4, 16)], 4.1) is None
    assert stealing.ask(ask(1, done), [(4, 16)], 5.4) == 15, "of equals, the one farthest back"


def test_an_owner_that_is_not_in_this_step_yet_does_nothing_of_it() -> None:
    stealing = begun(1.0, 1.0, 1.0, 1.0)
    stealing.begin(1, 10.0)
    for place in range(3):  # worker 4 is still at an earlier step
        stealing.given(Assignment(place + 1, place, WORKERS, 1.0), 1)
    assert stealing.ask(ask(1, range(4), step=1), [(4, 16)], 14.2) == 15


def test_the_last_slice_is_computed_twice_if_that_is_faster_and_not_three_times() -> None:
    stealing = begun(1.0, 1.0, 1.0, 3.0)
    assert stealing.ask(ask(4, [12, 13, 14], work_s=3.0), [(15, 16)], 9.0) == 15
    slow, fast = ask(2, range(4, 8), work_s=2.0), ask(1, range(4))
    assert stealing.ask(slow, [(15, 16)], 10.0) is None, "it would not be sooner than the owner"
    assert stealing.ask(fast, [(15, 16)], 10.0) == 15
    assert stealing.ask(ask(3, range(8, 12), work_s=0.1), [(15, 16)], 10.1) is None
    assert stealing.ask(ask(3, range(8, 12), work_s=0.1), [(15, 16)], 12.2) == 15, "perhaps both will never come"


def test_an_answer_that_got_lost_is_given_again() -> None:
    stealing = begun()
    assert stealing.ask(ask(1, range(4)), [(4, 16)], 4.2) == 15
    assert stealing.ask(ask(1, range(4)), [(4, 16)], 4.3) == 15


def test_slices_of_lost_workers_are_free_again() -> None:
    stealing = begun()
    assert stealing.ask(ask(1, range(4)), [(12, 16)], 4.2) == 15
    stealing.keep([2, 3, 4])
    assert stealing.ask(ask(2, range(4, 8)), [(12, 16)], 4.2) == 15


def test_slices_that_are_dealt_out_anew_have_other_owners() -> None:
    stealing = begun()
    stealing.given(Assignment(1, 0, 3, 1.0), 0)
    assert stealing.ask(Ask(Assignment(1, 0, 3, 1.0), 0, OF, frozenset(range(5))), [(5, 16)], 5.2) is None


def test_a_step_that_nobody_announced_is_taken_up_where_it_stands() -> None:
    stealing = Stealing()
    assert stealing.ask(ask(2, step=7), [(0, 16)], 100.0) == 4
    assert stealing.taken(8) == ()


def test_who_has_no_range_and_no_experience_can_help_all_the_same() -> None:
    stealing = begun()
    idle = Ask(Assignment(9, -1, WORKERS), 0, OF)
    assert stealing.ask(idle, [(12, 16)], 2.0) == 15


def test_who_has_no_range_can_ask_first_when_the_slices_are_dealt_out_anew() -> None:
    stealing = begun()
    assert stealing.ask(Ask(Assignment(9, -1, WORKERS - 1), 0, OF), [(0, 16)], 20.0) is not None


# ---- whole jobs


def constant(*speeds: float) -> Callable[[int, int, float], float]:
    return lambda worker, step, now: speeds[worker]


@pytest.mark.parametrize(
    ("speeds", "of", "most"),
    [
        ((1, 1, 1, 4), 16, 5.7),  # alone, the slow one would take 16
        ((1, 1, 1, 10), 16, 7.0),
        ((1, 4), 8, 8.1),
        ((1, 2), 8, 6.4),
        ((1, 1, 1, 4), 4, 3.0),
        ((1, 1.25, 1.5, 1.75), 16, 6.5),
        ((1, 1, 1, 1), 16, 4.1),
        ((1, 1, 1, 1, 1), 4, 1.1),
    ],
)
def test_the_pace_is_not_that_of_the_slowest(speeds: Sequence[float], of: int, most: float) -> None:
    job = Simulation(len(speeds), of, constant(*speeds))
    job.run(40)
    job.check()
    times = sorted(job.step_times[4:])
    assert times[len(times) // 2] <= most
    assert job.most_copies <= 2
    assert job.duplicates <= 40, "about one in each step at most"


def test_equal_workers_hardly_ever_ask() -> None:
    job = Simulation(4, 16, constant(1, 1, 1, 1))
    job.run(100)
    job.check()
    assert job.duplicates == 0
    assert job.questions < 20


def test_a_worker_that_was_slow_is_a_full_one_again() -> None:
    job = Simulation(4, 16, lambda worker, step, now: 10.0 if worker == 3 and step < 20 else 1.0)
    job.run(80)
    job.check()
    assert job.step_times[-1] <= 4.2
    assert all(job.by[step, worker] == 4 for step in range(70, 80) for worker in range(4))


def test_a_worker_that_stops_for_good_stops_nobody() -> None:
    job = Simulation(4, 16, lambda worker, step, now: 1e9 if worker == 1 and step == 5 else 1.0)
    job.run(40)
    job.check()
    assert job.step_times[-1] <= 7.0


@pytest.mark.parametrize("seed", range(150))
def test_random_workers_always_come_to_the_end_of_a_step(seed: int) -> None:
    """Speeds that jump, hang and recover; questions that fail; every slice is covered and somebody always goes on."""
    chance = random.Random(seed)
    workers, of = chance.randint(1, 6), chance.randint(1, 24)
    base = [10 ** chance.uniform(-2, 1) for _ in range(workers)]
    hang = chance.choice([0.0, 0.02])

    def speed(worker: int, step: int, now: float) -> float:
        if worker and chance.random() < hang:  # worker 0 never hangs
            return base[worker] * 1000
        return base[worker] * chance.uniform(0.5, 2.0)

    job = Simulation(workers, of, speed, failing=chance.choice([0.0, 0.0, 0.3, 1.0]) if not hang else 0.0, seed=seed)
    job.run(12)
    job.check()
