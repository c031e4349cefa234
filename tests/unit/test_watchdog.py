"""When a job counts as stuck, with hope or without."""

from __future__ import annotations

from dataclasses import replace

from paramserver.core.job.watchdog import Sight, Verdict, Watchdog

WAITING = Sight(0, 8.0, waits=["worker-0 waits for step 7: slice 2 (worker-1)", "worker-1 waits for server-0"])


def test_nobody_at_work_is_stuck_without_hope_until_something_counts() -> None:
    dog = Watchdog()
    assert dog.look(WAITING, 100.0) == Verdict()
    assert dog.look(WAITING, 108.0) == Verdict()
    assert dog.look(WAITING, 109.0) == Verdict(
        "nothing has counted for 9 s: worker-0 waits for step 7: slice 2 (worker-1); worker-1 waits for server-0",
        1.0,
        hopeless=True,
    )
    assert dog.look(WAITING, 708.5).for_s == 600.5
    assert dog.look(replace(WAITING, progress=1), 709.0) == Verdict()
    assert dog.look(replace(WAITING, progress=1), 710.0) == Verdict()


def test_scripts_at_work_have_four_times_as_long_and_never_end_the_job() -> None:
    dog, sight = Watchdog(), replace(WAITING, at_work=["worker-1"])
    dog.look(sight, 0.0)
    assert dog.look(sight, 32.0) == Verdict()
    verdict = dog.look(sight, 33.0)
    assert verdict.stuck.startswith("nothing has counted for 33 s: worker-1 is at work, but hand")
    assert (verdict.for_s, verdict.hopeless) == (1.0, False)


def test_scripts_that_owe_nothing_are_not_watched() -> None:
    """Clients push when they like."""
    dog, sight = Watchdog(), replace(WAITING, at_work=["worker-1"], watched=False)
    dog.look(sight, 0.0)
    assert dog.look(sight, 1e6) == Verdict()


def test_who_is_missed_is_named_at_once_and_may_still_come() -> None:
    """Even though a script is at work: what it hands in has nowhere to go."""
    dog, sight = Watchdog(), replace(WAITING, at_work=["worker-1"], missed=["server-1 at a:1 is lost"])
    dog.look(sight, 0.0)
    assert dog.look(sight, 10.0) == Verdict("nothing has counted for 10 s: server-1 at a:1 is lost", 2.0)


def test_four_times_as_long_as_it_has_lately_taken() -> None:
    dog = Watchdog()
    for step in range(3):
        dog.look(replace(WAITING, progress=step), 10.0 * step)
    last = replace(WAITING, progress=2)
    assert dog.look(last, 20.0 + 40.0) == Verdict()
    assert dog.look(last, 20.0 + 41.0).hopeless
    # A single long step is forgotten after eight others.
    for step in range(3, 12):
        dog.look(replace(WAITING, progress=step), 61.0 + step)
    assert dog.look(replace(WAITING, progress=11), 72.0 + 8.5).hopeless


def test_while_there_is_nothing_to_watch_no_time_passes() -> None:
    dog = Watchdog()
    dog.look(WAITING, 0.0)
    assert dog.look(WAITING, 20.0).hopeless
    assert dog.look(None, 21.0) == Verdict()
    assert dog.look(WAITING, 500.0) == Verdict()
    assert dog.look(WAITING, 507.0) == Verdict()
    assert dog.look(WAITING, 509.0).hopeless


def test_long_lists_are_cut() -> None:
    dog, sight = Watchdog(), Sight(0, 1.0, waits=[f"worker-{i} waits for server-0" for i in range(9)])
    dog.look(sight, 0.0)
    assert dog.look(sight, 2.0).stuck.endswith("worker-3 waits for server-0; ...")
