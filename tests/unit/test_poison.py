"""Which slice kills each worker that computes it."""

from __future__ import annotations

from paramserver.core.work.poison import Place, Poison

S = Place(0, 3, 7)


def never(_: Place) -> bool:
    return False


def test_the_third_death_names_the_slice() -> None:
    """The first one says nothing; whoever comes after it has said where it is."""
    poison = Poison()
    poison.tells(1, S)
    assert poison.died(1, never, 0.0) is None
    assert poison.careful
    poison.begins(2, S)
    assert poison.died(2, never, 1.0) is None
    poison.begins(3, S)
    assert poison.died(3, never, 2.0) == S


def test_one_worker_that_dies_again_and_again_is_no_proof_while_another_one_lives() -> None:
    """The worker may be broken: the slice is judged when it has killed another worker, too."""
    poison = Poison()
    for life in range(6):
        poison.begins(life, S)
        assert poison.died(life, never, float(life), seat=1, alone=False) is None
    poison.begins(6, S)
    assert poison.died(6, never, 6.0, seat=0, alone=False) == S


def test_one_worker_that_dies_again_and_again_is_the_proof_if_it_is_the_only_one() -> None:
    poison = Poison()
    found = []
    for life in range(3):
        poison.begins(life, S)
        found.append(poison.died(life, never, float(life), seat=0, alone=True))
    assert found == [None, None, S]


def test_deaths_that_an_earlier_coordinator_has_counted_are_of_several_workers() -> None:
    poison = Poison()
    poison.restore([S, S], 2, 0.0)
    poison.begins(3, S)
    assert poison.died(3, never, 1.0, seat=1, alone=False) == S


def test_deaths_at_different_slices_are_bad_luck() -> None:
    poison = Poison()
    for worker in range(10):
        poison.begins(worker, Place(0, worker, 7))
        assert poison.died(worker, never, float(worker)) is None


def test_who_has_finished_its_slice_did_not_die_of_it() -> None:
    poison = Poison()
    for worker in range(10):
        poison.begins(worker, S)
        assert poison.died(worker, lambda place: place == S, float(worker)) is None


def test_while_somebody_else_computes_it_nothing_is_decided() -> None:
    """It may get through with it, and then its contribution counts."""
    poison = Poison()
    poison.died(1, never, 0.0)
    poison.begins(2, S)
    poison.died(2, never, 1.0)
    poison.tells(4, S)
    poison.begins(3, S)
    assert poison.died(3, never, 2.0) is None
    assert poison.undecided(S), "nobody else is to begin it meanwhile"
    assert not poison.undecided(Place(0, 4, 7))
    poison.begins(4, S)
    assert poison.died(4, never, 3.0) == S
    assert not poison.undecided(S)


def test_who_leaves_in_order_is_no_death() -> None:
    poison = Poison()
    poison.begins(1, S)
    poison.left(1)
    assert poison.died(1, never, 0.0) is None


def test_careful_until_the_job_gets_on() -> None:
    poison = Poison()
    poison.died(1, never, 0.0)
    poison.look(100, 8, never, 1.0)  # what was counted before the death may still be told
    poison.look(300, 8, never, 1.9)
    poison.look(307, 8, never, 3.0)
    poison.look(307, 8, never, 4.0)
    still = poison.careful
    poison.look(308, 8, never, 5.0)
    assert (still, poison.careful) == (True, False)


def test_careful_as_long_as_a_slice_at_which_somebody_died_has_not_counted() -> None:
    """Asynchronous: others get on."""
    poison = Poison()
    poison.died(1, never, 0.0)
    poison.begins(2, S)
    poison.died(2, never, 1.0)
    for now in range(2, 100):
        poison.look(1000 * now, 8, never, float(now))
    still = poison.careful
    poison.look(200_000, 8, lambda place: place == S, 100.0)
    poison.look(200_008, 8, never, 101.0)
    assert (still, poison.careful) == (True, False)
    poison.begins(3, S)
    assert poison.died(3, never, 102.0) is None, "what was is forgotten"


def test_a_slice_that_is_skipped_is_forgotten() -> None:
    poison = Poison()
    poison.died(0, never, 0.0)
    for worker in (1, 2):
        poison.begins(worker, S)
        found = poison.died(worker, never, 1.0)
    assert found == S
    poison.skipped(S)
    poison.look(10, 8, never, 10.0)
    assert not poison.careful


def test_another_coordinator_goes_on_counting() -> None:
    """It has heard of no worker yet, and the job has not got on since."""
    before, after = Poison(), Poison()
    before.died(0, never, 0.0)
    before.begins(1, S)
    assert before.died(1, never, 1.0) is None
    after.restore(before.deaths, before.in_a_row, 5.0)
    assert after.careful
    after.look(100, 8, never, 6.0)
    assert after.careful
    after.begins(2, S)
    assert after.died(2, never, 7.0) == S


def test_another_coordinator_lets_workers_be_careless_once_the_job_gets_on() -> None:
    before, after = Poison(), Poison()
    before.died(0, never, 0.0)
    after.restore(before.deaths, before.in_a_row, 5.0)
    after.look(100, 8, never, 5.1)  # counted before the death, as far as this coordinator knows
    after.look(107, 8, never, 8.0)
    still = after.careful
    after.look(108, 8, never, 9.0)
    assert (still, after.careful, after.in_a_row) == (True, False, 0)
