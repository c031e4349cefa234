"""The phases of a job: the whole table, and random schedules."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from paramserver.core.job.life import (
    ENDED,
    Counted,
    Ends,
    Event,
    GoesBack,
    Life,
    LoadBegins,
    Loaded,
    Phase,
    Uploads,
    WentBack,
)
from paramserver.core.versions.consistency import Consistency, Mode

SETTING = Consistency(Mode.SYNC)
LETTERS = {
    "W": Phase.WAITING,
    "I": Phase.INITIALISING,
    "R": Phase.RUNNING,
    "B": Phase.RECOVERING,
    "F": Phase.FAILED,
    "S": Phase.STOPPED,
    "D": Phase.DONE,
}
# By event, the phase that follows in each phase, in the order of the lines above. "." stands for: nothing changes.
TABLE: list[tuple[Event, str]] = [
    (Counted("server-1", model=False, published=False), "WI....."),
    (Counted("server-1", model=True, published=False), "II....."),
    (Counted("worker-1", model=True, published=True), "II....."),
    (Counted("", model=True, published=False), "II....."),
    (Counted("", model=True, published=True), "RR....."),
    (GoesBack("server-1 has begun anew", published=False), "WIBB..."),
    (GoesBack("server-1 has begun anew", published=True), "BBBB..."),
    (WentBack(), "...R..."),
    (LoadBegins(), "..B...."),
    (Uploads(), "...I..."),
    (Loaded(), ".R....."),
    (Ends(Phase.FAILED, "a fault"), "FFFF.F."),
    (Ends(Phase.STOPPED, "enough"), "SSSS.S."),
    (Ends(Phase.DONE, "done"), "DDDD.D."),
]


def life_in(phase: Phase) -> Life:
    """A job that has come to this phase; a stopped one still has to be gathered."""
    life = Life(SETTING)
    life.take_over(phase, "before")
    return life


@pytest.mark.parametrize(("event", "phases"), TABLE, ids=lambda value: str(value) if isinstance(value, str) else None)
def test_the_table(event: Event, phases: str) -> None:
    for phase, letter in zip(LETTERS.values(), phases, strict=True):
        life = life_in(phase)
        changed = life.handle(event)
        if letter == ".":
            assert (changed, life.phase, life.reason) == (False, phase, "before"), phase
        else:
            assert (changed, life.phase) == (True, LETTERS[letter]), phase


def test_each_phase_has_its_reason_in_words() -> None:
    life = Life(SETTING)
    life.handle(Counted("1/2 servers; missing: server-1", model=False, published=False))
    assert life.reason == "1/2 servers; missing: server-1"
    life.handle(Counted("", model=True, published=True))
    assert life.reason == ""
    life.handle(GoesBack("server-1 has begun anew", published=True))
    assert life.reason == "server-1 has begun anew: going back to a checkpoint"
    life.handle(WentBack())
    life.handle(LoadBegins())
    assert life.reason == "the scripts load weights"
    life.handle(Ends(Phase.STOPPED, "enough", released=False))
    assert life.reason == "enough"


def test_what_was_counted_before_changes_nothing() -> None:
    life = Life(SETTING)
    counted = Counted("server-1", model=True, published=False)
    assert [life.handle(counted) for _ in range(3)] == [True, False, False]


def test_the_result_of_a_stopped_job_is_gathered_and_then_nothing_changes() -> None:
    life = life_in(Phase.RUNNING)
    life.handle(Ends(Phase.STOPPED, "enough", released=False))
    assert life.ended
    assert not life.final
    assert life.handle(Ends(Phase.STOPPED, "enough", "the summary"))
    assert (life.final, life.summary, life.released) == (True, "the summary", True)
    assert not life.handle(Ends(Phase.DONE, "done", "another summary"))
    assert (life.phase, life.summary) == (Phase.STOPPED, "the summary")


def test_a_timeline_is_above_all_that_were_heard_of() -> None:
    life = Life(SETTING)
    assert [life.begin_timeline(), life.begin_timeline(7, 3), life.begin_timeline(2)] == [1, 8, 9]


def test_random_schedules() -> None:
    """No event brings an ended job back to life, and a job runs only after a version was published."""
    dice = random.Random(4)
    makers: list[Callable[[], Event]] = [
        lambda: Counted(dice.choice(["", "worker-1"]), dice.random() < 0.8, dice.random() < 0.5),
        lambda: GoesBack("a shard is gone", dice.random() < 0.5),
        WentBack,
        LoadBegins,
        Uploads,
        Loaded,
        lambda: Ends(dice.choice(sorted(ENDED, key=str)), "the end", released=dice.random() < 0.5),
    ]
    weights = [6, 3, 3, 3, 3, 3, 1]
    reached = set()
    for _ in range(3_000):
        life, published = Life(SETTING), False
        for _ in range(20):
            event = dice.choices(makers, weights)[0]()
            before, final, told = life.phase, life.final, (life.reason, life.summary)
            changed = life.handle(event)
            published = published or isinstance(event, Loaded) or getattr(event, "published", False)
            reached.add((before, life.phase))
            assert changed or (before, told) == (life.phase, (life.reason, life.summary))
            assert not (final and changed)
            assert before not in ENDED or life.phase in ENDED
            assert published or life.phase is not Phase.RUNNING
    assert len(reached) > 20
