"""The time line of a job, and rates of counters: pure functions of what was seen at which time."""

from __future__ import annotations

from dataclasses import replace

from paramserver.core.job.events import MAX_EVENTS, Event, Events, Facts, Gone
from paramserver.core.records.rates import WINDOW_S, Rates

RUNNING = Facts(phase="running", mode="sync", version=7, members={"server-0": 1, "worker-0": 2, "worker-1": 3})


def after(*looks: Facts) -> list[tuple[str, str, str]]:
    """The events that the last look adds."""
    events = Events()
    for at_s, facts in enumerate(looks[:-1]):
        events.look(facts, at_s)
    known = len(list(events))
    events.look(looks[-1], 99.0)
    return [(event.kind, event.subject, event.text) for event in list(events)[known:]]


def test_the_first_look_says_that_the_job_begins_and_who_is_there() -> None:
    found = after(RUNNING)
    assert [kind for kind, _, _ in found] == ["begun", "joined", "joined", "joined", "state"]
    assert found[0][2] == "the job begins, mode sync"


def test_nothing_new_is_no_event() -> None:
    assert after(RUNNING, replace(RUNNING, version=8)) == []


def test_a_worker_that_dies_is_lost_with_its_reason() -> None:
    gone = replace(
        RUNNING,
        members={"server-0": 1, "worker-0": 2},
        gone={"worker-1": Gone(3, False, "its process is gone")},
    )
    assert after(RUNNING, gone) == [("lost", "worker-1", "worker-1 is lost: its process is gone")]


def test_a_worker_that_leaves_in_order_is_not_lost() -> None:
    gone = replace(RUNNING, members={"server-0": 1, "worker-0": 2}, gone={"worker-1": Gone(3, True)})
    assert after(RUNNING, gone) == [("left", "worker-1", "worker-1 left")]


def test_a_server_that_nobody_asked_to_leave_is_lost() -> None:
    """Backups take over before the reason is known."""
    gone = replace(RUNNING, members={"worker-0": 2, "worker-1": 3})
    assert after(RUNNING, gone) == [("lost", "server-0", "server-0 is lost")]
    assert after(replace(RUNNING, asked=frozenset({1})), gone) == [("left", "server-0", "server-0 left")]
    assert [kind for kind, _, _ in after(RUNNING, replace(gone, phase="done", ended=True))] == ["left", "state"]


def test_another_process_in_the_same_seat_is_a_loss_and_a_join() -> None:
    """The loss is not missed even if the next process came between two looks."""
    replaced = replace(RUNNING, members={**RUNNING.members, "worker-1": 9}, gone={"worker-1": Gone(3, False, "killed")})
    assert [kind for kind, _, _ in after(RUNNING, replaced)] == ["lost", "joined"]


def test_changes_of_the_job() -> None:
    later = replace(RUNNING, mode="async with staleness 4", checkpoint="step-9-t0", rollbacks=1, takeovers=1)
    assert [(kind, text) for kind, _, text in after(RUNNING, later)] == [
        ("takeover", "backups took over the shards of a lost server"),
        ("went back", "the job went back to step-9-t0"),
        ("mode", "the mode is async with staleness 4 now"),
        ("checkpoint", "checkpoint step-9-t0 is complete"),
    ]


def test_the_next_coordinator_goes_on_with_the_time_line() -> None:
    first, second = Events(), Events()
    first.look(RUNNING, 5.0)
    second.restore(first)
    second.look(RUNNING, 8.0)
    assert list(second)[:-1] == list(first)
    assert list(second)[-1] == Event(8.0, "taken over", "", "another coordinator leads the job now", 7)


def test_old_events_are_forgotten() -> None:
    events = Events()
    for number in range(3 * MAX_EVENTS):
        events.look(replace(RUNNING, checkpoint=f"step-{number}"), float(number))
    kept = list(events)
    assert len(kept) == MAX_EVENTS
    assert kept[-1].text == f"checkpoint step-{3 * MAX_EVENTS - 1} is complete"


def test_a_rate_is_that_of_the_last_seconds() -> None:
    rates = Rates()
    for second in range(60):
        rates.hear(1, 10 * second if second < 30 else 300 + 100 * (second - 30), float(second))
    assert rates.of(1, 59.0) == 100.0
    assert rates.of(2, 59.0) == 0.0


def test_a_member_that_reports_no_more_has_no_rate() -> None:
    rates = Rates()
    rates.hear(1, 0, 0.0)
    rates.hear(1, 10, 1.0)
    assert rates.of(1, 1.0) == 10.0
    assert rates.of(1, 1.5 + WINDOW_S) == 0.0
    rates.forget(1)
    assert rates.of(1, 1.0) == 0.0


def test_a_total_that_falls_begins_anew() -> None:
    rates = Rates()
    rates.hear(1, 1000, 0.0)
    rates.hear(1, 5, 1.0)
    assert rates.of(1, 1.0) == 0.0
    rates.hear(1, 9, 2.0)
    assert rates.of(1, 2.0) == 4.0
