"""Which worker or server made a step wait, and why, from facts as members report them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.core.blame.causes import SHARE, Cause, of_server, of_worker
from paramserver.core.blame.facts import Blamed, Held, Made, Open, Worked, under_way
from paramserver.core.blame.judge import NOTICED_S, OPENING, RIPE_S, WORST, Judge
from paramserver.core.blame.sentences import of_now, of_step, slices
from paramserver.core.blame.spent import Lost, Spent, lost_within, total, usual
from tests.support.unit.steps import NAMES, USUAL, Clocks, Run

SLOW, STEP = 11, 12
ONE_STEP = {
    "its loader": (replace(USUAL, data=3.1), Cause.DATA),
    "its loader computes, and is starved a little": (replace(USUAL, data=3.1, starved=0.9), Cause.DATA),
    "its computation": (replace(USUAL, compute=3.4), Cause.COMPUTE),
    "its computation, with a loader that is a bit slow": (replace(USUAL, compute=3.4, data=0.4), Cause.COMPUTE),
    "its script between steps": (replace(USUAL, other=3.0), Cause.OTHER),
    "garbage while it computes": (replace(USUAL, compute=3.4, gc=3.0), Cause.GC),
    "garbage while it loads": (replace(USUAL, data=3.0, gc=2.8), Cause.GC),
    "a starved core while it computes": (replace(USUAL, compute=3.4, starved=2.9), Cause.STARVED),
    "a starved core while it loads": (replace(USUAL, data=3.0, starved=2.6), Cause.STARVED),
    "paused while it computes": (replace(USUAL, compute=3.4, paused=3.1), Cause.PAUSED),
    "paused while it loads": (replace(USUAL, data=3.4, paused=3.3), Cause.PAUSED),
    "weights that come slowly": (replace(USUAL, receive=3.0), Cause.LINK),
    "a bit of everything": (replace(USUAL, data=1.0, compute=1.3, other=1.0), Cause.UNKNOWN),
}


@pytest.mark.parametrize(("spent", "cause"), ONE_STEP.values(), ids=ONE_STEP)
def test_one_late_step_has_the_right_worker_and_cause(spent: Spent, cause: Cause) -> None:
    found = Run(late={(SLOW, STEP): spent}).play()
    assert [(one.step, one.member, one.cause) for one in found] == [(STEP, "worker-1", cause)]
    assert found[0].waited == pytest.approx(spent.busy - USUAL.busy, abs=0.1)


@pytest.mark.parametrize(("spent", "cause"), ONE_STEP.values(), ids=ONE_STEP)
def test_a_worker_that_holds_the_others_at_the_bound_has_the_right_cause(spent: Spent, cause: Cause) -> None:
    found = Clocks(spent, spent.busy - USUAL.busy - 0.3).play()
    assert [(one.step, one.member, one.cause, one.asynchronous) for one in found] == [(12, "worker-1", cause, True)]


def test_messages_that_take_long_are_the_workers_link() -> None:
    found = Run(links={(SLOW, STEP): 2.0}).play()
    assert [(one.member, one.cause) for one in found] == [("worker-1", Cause.LINK)]
    # The record after the one of a clock begins with the way of its contribution.
    slow = replace(USUAL, send=2.5)
    assert [(one.member, one.cause) for one in Clocks(USUAL, 2.0, after=slow).play()] == [("worker-1", Cause.LINK)]
    assert [(one.member, one.cause) for one in Clocks(slow, 2.0).play()] == [("worker-1", Cause.UNKNOWN)]


@pytest.mark.parametrize(
    ("starved", "paused", "cause"), [(0.1, 0.0, Cause.SERVER), (2.4, 0.0, Cause.STARVED), (0.0, 2.5, Cause.PAUSED)]
)
def test_a_server_that_all_wait_for_is_named_itself(starved: float, paused: float, cause: Cause) -> None:
    found = Run(slow={(1, STEP): (2.5, starved, paused)}).play()
    assert [(one.step, one.member, one.cause) for one in found] == [(STEP, "server-1", cause)]


def test_a_server_that_was_paused_before_the_contributions_were_read_is_named_not_a_worker() -> None:
    """All contributions lay in its sockets meanwhile, and the last one was read a little later than the others."""
    judge = Judge()
    for step in range(20):
        judge.made(Made(step, 0, "server-0", 0.30, 0.31, 0.32, 11, 10), step)
    judge.made(Made(20, 0, "server-0", 0.30, 3.3, 3.32, 11, 10, 11, paused=2.9), 20.0)
    (found,) = judge.look(40.0, NAMES, lambda _: [])
    assert (found.member, found.cause) == ("server-0", Cause.PAUSED)


def test_a_worker_that_joins_late() -> None:
    found = Run(joined={SLOW: STEP}, late={(SLOW, STEP): replace(USUAL, compute=2.3)}).play()
    assert [(one.step, one.member, one.cause) for one in found] == [(STEP, "worker-1", Cause.JOINED)]
    held = Clocks(replace(USUAL, compute=2.3), 2.0, first=True).play()
    assert [(one.member, one.cause) for one in held] == [("worker-1", Cause.JOINED)]


@pytest.mark.parametrize("cause", ["data", "compute", "other"])
def test_who_is_always_slow_is_said_in_one_sentence(cause: str) -> None:
    run = Run(late={(SLOW, step): replace(USUAL, **{cause: 0.6}) for step in range(40)}, steps=40)
    run.play()
    phase = {"data": Cause.DATA, "compute": Cause.COMPUTE, "other": Cause.OTHER}[cause]
    assert run.judge.chronic.startswith("worker-1 held up 32 of the last 32 steps, ")
    assert run.judge.chronic.endswith(f" of their time, for {phase}")


def test_one_long_wait_is_not_most_of_the_steps() -> None:
    """Worker 1 is the last one by a little, and server-0 slower by a little, in all steps; each stood still once."""
    worker, server = Judge(), Judge()
    for step in range(40):
        last = 5.0 if step == 30 else 0.31
        worker.made(Made(step, 0, "server-0", 0.30, last, last + 0.02, 11, 12, paused=0.0), step)
        for shard, making in enumerate([5.0 if step == 30 else 0.021, 0.02]):
            server.made(Made(step, shard, f"server-{shard}", 0.30, 0.31, 0.31 + making, 11, 12), step)
    loads = [Worked(step, replace(USUAL, data=5.0 if step == 30 else 0.01)) for step in range(40)]
    records = {10: [Worked(39, USUAL)], 11: loads, 12: [Worked(39, USUAL)]}
    for judge, member in ((worker, "worker-1"), (server, "server-0")):
        assert [one.member for one in judge.look(60.0, NAMES, lambda who: records.get(who, []))] == [member]
        assert judge.chronic == ""


def test_a_server_that_is_always_slow_is_compared_with_the_others() -> None:
    run = Run(slow={(1, step): (0.4, 0.0, 0.0) for step in range(40)}, steps=40)
    assert {(one.member, one.cause) for one in run.play()} == {("server-1", Cause.SERVER)}
    assert run.judge.chronic.startswith("server-1 held up ")


def held_lately(by: Callable[[int], int], slow: Spent) -> str:
    """What is said after a worker, another one by clock, held worker-0 at the bound for 0.6 s of each of 40 seconds."""
    judge, said = Judge(), ""
    for clock in range(OPENING, 40):
        records: Callable[[int], list[Worked]] = lambda who, clock=clock: [  # type: ignore[misc] # noqa: E731
            Worked(earlier, slow if who == by(earlier) else USUAL) for earlier in range(max(0, clock - 20), clock + 2)
        ]
        for worker in NAMES:
            if worker != by(clock):
                judge.held(Held(worker, by(clock), clock, 0.6), clock)
        judge.look(clock + RIPE_S, NAMES, records)
        said = judge.chronic
    return said


def test_who_always_holds_the_others_at_the_bound_is_said_in_one_sentence() -> None:
    slow = replace(USUAL, data=USUAL.data + 0.6)
    assert held_lately(lambda _: SLOW, slow) == (
        "worker-1 held workers at the bound for 62% of the last 30 s, for its data loader"
    )
    assert held_lately(lambda clock: list(NAMES)[clock % len(NAMES)], slow) == "", "each in turn is nobody's fault"
    assert held_lately(lambda clock: SLOW + clock % 2, slow) == "", "two in turn"
    assert held_lately(lambda _: SLOW, USUAL) == "", "the data does not say why"


# ---- nobody is named without need


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), jitter=st.floats(0.0, 0.6), shards=st.integers(1, 3))
def test_healthy_runs_name_nobody(seed: int, jitter: float, shards: int) -> None:
    run = Run(seed=seed, jitter=jitter, shards=shards, steps=40)
    assert run.play() == []
    assert run.judge.chronic == ""
    assert run.judge.steps == 40 - OPENING


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    more=st.floats(0.0, 3.0),
    phase=st.sampled_from(["data", "compute", "other", "receive"]),
    loss=st.sampled_from(["gc", "starved", "paused"]),
)
def test_a_name_means_that_the_step_waited_so_long_and_that_the_cause_explains_it(
    seed: int, more: float, phase: str, loss: str
) -> None:
    spent = replace(USUAL, **{phase: getattr(USUAL, phase) + more, loss: more / 2})
    run = Run(seed=seed, late={(SLOW, STEP): spent})
    for one in run.play():
        assert one.waited >= max(NOTICED_S, run.judge.usual_s / 2 - 0.02)
        assert one.cause is Cause.UNKNOWN or one.seconds >= SHARE * one.waited
    if more < NOTICED_S:
        assert run.judge.worst == []


def test_a_server_that_was_paused_is_named_in_asynchronous_mode_if_workers_waited_for_answers() -> None:
    paused = Made(20, 0, "server-0", 0.0, 0.01, 0.02, paused=2.0, asynchronous=True)

    def judged(spent: Spent) -> list[tuple[str, Cause]]:
        judge = Judge()
        for step in range(20):
            judge.made(Made(step, 0, "server-0", 0.0, 0.01, 0.02, asynchronous=True), 0.0)
        judge.made(paused, 0.0)
        records = [*(Worked(clock, USUAL) for clock in range(9)), Worked(9, spent)]
        return [(one.member, one.cause) for one in judge.look(20.0, NAMES, lambda _: records)]

    assert judged(replace(USUAL, send=1.9)) == [("server-0", Cause.PAUSED)]
    assert judged(USUAL) == [], "it stood still while nobody needed it"


def test_a_worker_that_has_computed_the_slice_of_another_one_in_the_step_before_is_not_late() -> None:
    judge = Judge()
    for step in range(20):
        judge.made(Made(step, 0, "server-0", 0.30, 0.31, 0.32, 11, 10), step)
    judge.made(Made(20, 0, "server-0", 0.30, 0.65, 0.66, 11, 10, 11, 1, 2), 20.0)
    others = [Worked(step, USUAL) for step in range(22)]
    helper = [Worked(step, USUAL) for step in range(22) for _ in range(1 + (step == 19))]
    assert judge.look(40.0, NAMES, lambda who: helper if who == 11 else others) == []


def test_a_server_that_gets_no_core_now_and_then_does_not_hide_a_slow_link() -> None:
    """It lost a fourth of its time in the whole step, and so a fourth of the wait."""
    judge = Judge()
    for step in range(20):
        judge.made(Made(step, 0, "server-0", 0.40, 0.41, 0.42, 11, 10, starved=0.1), step)
    judge.made(Made(20, 0, "server-0", 0.40, 0.83, 0.84, 11, 10, 11, 1, 2, starved=0.21), 20.0)
    records = [Worked(step, replace(USUAL, wait=0.5)) for step in range(22)]
    (found,) = judge.look(40.0, NAMES, lambda _: records)
    assert (found.member, found.cause) == ("worker-1", Cause.LINK)


def test_many_short_delays_of_a_server_are_nothing_to_slices_that_take_long() -> None:
    judge = Judge()
    for step in range(40):
        for shard, published in ((0, 0.02), (1, 0.06)):
            judge.made(Made(step, shard, f"server-{shard}", 0.0, 0.01, published, asynchronous=True), 0.0)
    records = [Worked(clock, USUAL) for clock in range(20)]
    assert judge.look(20.0, NAMES, lambda _: records) == []
    assert judge.chronic == ""


def test_a_loss_that_is_a_small_part_of_what_made_a_worker_late_is_not_the_cause() -> None:
    """Others have done its slice after a second, so that the wait alone is as long as the loss."""
    spent = replace(USUAL, data=5.0, starved=0.9)
    assert of_worker(1.0, spent, USUAL, 0.0, first=False).cause is Cause.DATA


def test_the_first_steps_are_not_judged() -> None:
    assert Run(late={(SLOW, 0): replace(USUAL, compute=5.0), (SLOW, 1): replace(USUAL, data=5.0)}).play() == []


def test_a_worker_with_more_slices_than_others_is_not_late() -> None:
    """Five slices and four workers: one of them has two, each as quick as those of the others."""
    judge = Judge()
    records = {
        worker: [Worked(step, USUAL) for step in range(20) for _ in range(1 + (worker == 10))] for worker in NAMES
    }
    for step in range(20):
        judge.made(Made(step, 0, "server-0", 0.35, 0.70, 0.72, 10, 13, 10, 0, 2), step)
    assert judge.look(60.0, NAMES, lambda who: records[who]) == []
    assert judge.chronic == ""


# ---- who was waited for, where it is less plain


def judged(
    made: Made, records: dict[int, list[Worked]], names: dict[int, str] | None = None
) -> list[tuple[str, Cause]]:
    """Who is blamed for a step after 20 usual ones."""
    judge = Judge()
    for step in range(20):
        judge.made(Made(step, 0, "server-0", 0.30, 0.31, 0.33, 10 + step % 2, 12), step)
    assert judge.look(30.0, NAMES, lambda _: []) == []
    judge.made(made, 40.0)
    found = judge.look(60.0, NAMES if names is None else names, lambda who: records.get(who, []))
    return [(one.member, one.cause) for one in found]


def test_the_owner_of_a_slice_is_blamed_not_the_worker_that_computed_it_in_its_place() -> None:
    made = Made(20, 0, "server-0", 0.3, 0.9, 0.92, worker=10, before=12, owner=11, lo=1, hi=2)
    loads = [Worked(19, USUAL), Worked(20, replace(USUAL, data=4.0))]
    assert judged(made, {11: loads, 10: [Worked(20, USUAL), Worked(20, USUAL)]}) == [("worker-1", Cause.DATA)]


def test_a_worker_that_is_still_at_work_on_an_older_step_is_blamed_for_what_it_does_there() -> None:
    made = Made(20, 0, "server-0", 0.3, 0.9, 0.92, worker=10, before=12, owner=11)
    skipped = [Worked(18, USUAL), Worked(19, replace(USUAL, compute=4.0)), Worked(21, USUAL)]
    assert judged(made, {11: skipped}) == [("worker-1", Cause.COMPUTE)]
    still = [Worked(18, USUAL), under_way(19, Spent(data=5.0), "data", 0.4, first=False)]
    assert judged(made, {11: still}) == [("worker-1", Cause.DATA)]
    silent = [Worked(18, USUAL), under_way(19, Spent(), "compute", 5.0, first=False)]
    assert judged(made, {11: silent}) == [("worker-1", Cause.PAUSED)]
    garbage = [Worked(18, USUAL), under_way(19, Spent(compute=5.0, gc=4.5), "compute", 0.4, first=False)]
    assert judged(made, {11: garbage}) == [("worker-1", Cause.GC)]


def test_a_worker_that_waits_for_a_version_all_the_time_is_blamed_for_its_link() -> None:
    made = Made(20, 0, "server-0", 0.3, 0.9, 0.92, worker=10, before=12, owner=11)
    waited = [Worked(18, USUAL), Worked(19, USUAL), Worked(21, replace(USUAL, wait=2.0))]
    assert judged(made, {11: waited}) == [("worker-1", Cause.LINK)]
    waits = [Worked(18, USUAL), Worked(19, USUAL), under_way(20, Spent(wait=5.0), "wait", 0.4, first=False)]
    assert judged(made, {11: waits}) == [("worker-1", Cause.LINK)]


def test_a_push_that_does_not_arrive_while_another_worker_computes_the_slice_again() -> None:
    made = Made(20, 0, "server-0", 0.3, 0.9, 0.92, worker=10, before=12, owner=11)
    records = [Worked(19, USUAL), Worked(20, USUAL), Worked(21, replace(USUAL, wait=0.6))]
    assert judged(made, {11: records}) == [("worker-1", Cause.LINK)]


def test_a_worker_that_begins_a_step_late_is_blamed_for_the_step_before() -> None:
    """The version had been published when it came for it: that is no slow link."""
    made = Made(20, 0, "server-0", 0.3, 2.3, 2.32, worker=11, before=12, owner=11)
    records = [Worked(19, replace(USUAL, data=3.0)), Worked(20, replace(USUAL, wait=0.001)), Worked(21, USUAL)]
    assert judged(made, {11: records}) == [("worker-1", Cause.DATA)]


def test_a_worker_that_is_gone_or_says_nothing_has_no_cause() -> None:
    made = Made(20, 0, "server-0", 0.3, 2.3, 2.32, worker=11, before=12, owner=11)
    assert judged(made, {}) == [("worker-1", Cause.UNKNOWN)]
    assert judged(made, {}, {10: "worker-0"}) == [("", Cause.UNKNOWN)]


def test_a_step_is_judged_when_reports_have_come_and_steps_of_another_timeline_never() -> None:
    judge = Judge()
    for step in range(20):
        judge.made(Made(step, 0, "server-0", 0.3, 3.0 if step == 15 else 0.31, 3.1, 11, 10, 11), 0.0)
    late = {11: [Worked(15, replace(USUAL, data=3.0))]}
    assert judge.look(RIPE_S / 2, NAMES, lambda who: late.get(who, [])) == []
    assert [one.step for one in judge.look(RIPE_S, NAMES, lambda who: late.get(who, []))] == [15]
    judge.made(Made(20, 0, "server-0", 0.3, 3.0, 3.1, 11, 10, 11), 10.0)
    judge.anew()
    assert judge.look(20.0, NAMES, lambda _: []) == []


def test_the_worst_steps_are_the_longest_and_are_bounded() -> None:
    late = {(SLOW, step): replace(USUAL, data=1.0 + step / 10) for step in range(3, 30, 2)}
    run = Run(late=late)
    run.play()
    assert len(run.judge.worst) == WORST
    waits = [one.waited for one in run.judge.worst]
    assert waits == sorted(waits, reverse=True)
    assert run.judge.worst[0].step == 29


def test_short_holds_at_the_bound_and_those_at_the_beginning_are_not_blamed() -> None:
    judge = Judge()
    judge.held(Held(10, 11, 12, 0.2), 0.0)
    judge.held(Held(10, 11, 1, 9.0), 0.0)
    assert judge.look(9.0, NAMES, lambda _: [Worked(12, USUAL)]) == []


# ---- times


def test_a_loss_counts_by_its_share_in_an_interval() -> None:
    losses = [Lost(0.0, 1.0, 0.5, 0.0), Lost(2.0, 4.0, 0.0, 2.0)]
    assert lost_within(losses, 0.5, 3.0) == (0.25, 1.0)
    assert lost_within(losses, 1.0, 2.0) == (0.0, 0.0)


def test_sums_and_usual_times() -> None:
    parts = [Spent(data=1.0), Spent(data=3.0, gc=1.0), Spent(compute=2.0)]
    assert total(parts) == Spent(data=4.0, compute=2.0, gc=1.0)
    assert usual(parts) == Spent(data=1.0)
    assert Spent(data=1.0, send=2.0, wait=3.0).all == 6.0


def test_a_cause_is_named_only_if_it_explains_most_of_the_wait() -> None:
    assert of_worker(1.0, Spent(data=0.5), Spent(), 0.0, first=False).cause is Cause.UNKNOWN
    assert of_worker(1.0, Spent(data=0.7), Spent(), 0.0, first=False).cause is Cause.DATA
    assert of_worker(1.0, Spent(data=0.7), Spent(data=0.5), 0.0, first=False).cause is Cause.UNKNOWN
    assert of_server(1.0, 0.1, 0.1).cause is Cause.SERVER


# ---- words


def test_sentences() -> None:
    def said(cause: Cause, seconds: float) -> str:
        return of_step(Blamed(812, 3.4, "worker-3", cause, seconds, 5, 6))

    assert said(Cause.DATA, 3.1) == "step 812 waited 3.4 s for slice 5 on worker-3, 3.1 s of them in its data loader"
    assert said(Cause.PAUSED, 3.4) == "step 812 waited 3.4 s for slice 5 on worker-3, which did not run"
    assert said(Cause.UNKNOWN, 0.0) == "step 812 waited 3.4 s for slice 5 on worker-3; the data does not say why"
    assert slices(4, 8) == "4 to 7"
    assert slices(0, 0) == ""


def test_the_sentence_about_a_step_that_waits_now() -> None:
    now = Open(812, "worker-3", 5, 6, 3.4, "data", 3.1, 0.2)
    assert of_now(now) == "step 812 has waited 3.4 s for slice 5 on worker-3: its data loader has kept it for 3.1 s"
    silent = of_now(replace(now, silent=2.5))
    assert silent == "step 812 has waited 3.4 s for slice 5 on worker-3: nothing was heard of it for 2.5 s"
