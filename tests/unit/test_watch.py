"""For whom the job waits, and when it gives up. The clock is the test's."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from paramserver.coordinator.options import JobOptions
from paramserver.coordinator.watching import watch as watching
from paramserver.coordinator.watching.watch import Watch
from paramserver.core.job.life import Ends, Life, Phase
from paramserver.core.job.membership import Joined, Left, Member, Membership, Role
from paramserver.core.job.seats import Facts, Gone, Seats, Taken
from paramserver.core.versions.consistency import Consistency, Mode


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Log:
    """In the place of the module's own, whatever the log of this process is set to."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def info(self, text: str) -> None:
        self.said.append(text)


@dataclass
class NoCheckpoints:
    possible: bool = False


@dataclass
class End:
    finished: bool = False


@dataclass
class Job:
    """As much of a job as the watch looks at."""

    options: JobOptions
    life: Life = field(default_factory=lambda: Life(Consistency(Mode.SYNC)))
    lacking: str = "0/1 servers; missing: server-0"
    members: Membership = field(default_factory=lambda: Membership(1e9, 1.0))
    failures: list[tuple[str, int]] = field(default_factory=list)
    recovery: NoCheckpoints = field(default_factory=NoCheckpoints)
    ending: End = field(default_factory=End)

    def __post_init__(self) -> None:
        self.seats = Seats(self.members)

    def missing(self) -> str:
        return self.lacking

    async def fail(self, reason: str, exit_code: int = 1) -> None:
        self.failures.append((reason, exit_code))
        self.life.handle(Ends(Phase.FAILED, reason))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(watching, "time", made)
    return made


def job(join_timeout_s: float = 60.0, max_idle_s: float = 100.0) -> Job:
    return Job(JobOptions("test", 1, 1, Consistency(Mode.SYNC), join_timeout_s=join_timeout_s, max_idle_s=max_idle_s))


def watch(of: Job) -> Watch:
    return Watch(of)


def lose(of: Job, server: Member, clock: Clock) -> None:
    of.seats.handle(Gone(server, lost=True, reason="silence", facts=Facts("test", 1, "digest")), clock.now)


def look(at: Watch) -> list[str]:
    """What it says."""
    log = Log()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watching, "log", log)
        asyncio.run(at.look())
    return log.said


SERVER = Member(1, Role.SERVER, 0, "server-0", 0.0, address="there:1")


def test_the_start_is_waited_for_and_given_up_in_time(clock: Clock) -> None:
    one = job()
    at = watch(one)
    clock.now += 60.0
    look(at)
    assert not one.failures
    clock.now += 0.1
    look(at)
    assert one.failures == [
        ("waited 60 s (cluster.join_timeout_s): 0/1 servers; missing: server-0", 6),
    ]


def test_a_start_without_a_limit(clock: Clock) -> None:
    one = job(join_timeout_s=0.0)
    at = watch(one)
    clock.now += 1e6
    assert look(at) == ["waiting for 0/1 servers; missing: server-0"]
    assert not one.failures


def test_it_says_every_five_seconds_for_whom_it_waits(clock: Clock) -> None:
    one = job()
    at = watch(one)
    said = []
    for _ in range(21):
        said += look(at)
        clock.now += 0.5
    assert said == ["waiting for 0/1 servers; missing: server-0"] * 2
    one.lacking = ""
    assert look(at) == []


def test_a_server_has_max_idle_s_to_come_back(clock: Clock) -> None:
    one = job()
    one.life.take_over(Phase.RUNNING)
    one.members.handle(Joined(Role.WORKER), 0.0)
    at = watch(one)
    lose(one, SERVER, clock)
    clock.now += 100.0
    assert look(at) == ["waiting for server-0 at there:1 to come back"]
    assert not one.failures
    clock.now += 0.1
    look(at)
    assert one.failures == [
        (
            "server-0 at there:1 has been gone for 100 s (cluster.max_idle_s); its shard of the model is gone",
            1,
        )
    ]


def test_a_server_that_came_back_is_counted_anew(clock: Clock) -> None:
    one = job()
    one.life.take_over(Phase.RUNNING)
    one.members.handle(Joined(Role.WORKER), 0.0)
    at = watch(one)
    lose(one, SERVER, clock)
    clock.now += 99.0
    one.seats.handle(Taken(0, with_shard=True), clock.now)
    assert look(at) == []
    clock.now += 50.0
    lose(one, SERVER, clock)
    clock.now += 99.0
    assert look(at) == ["waiting for server-0 at there:1 to come back"]
    assert not one.failures


def test_it_names_the_last_of_several_and_what_else_would_help(clock: Clock) -> None:
    one = job()
    one.life.take_over(Phase.RUNNING)
    one.members.handle(Joined(Role.WORKER), 0.0)
    one.recovery.possible = True
    at = watch(one)
    lose(one, replace(SERVER, index=1, name="server-1"), clock)
    lose(one, SERVER, clock)
    clock.now += 5.0
    assert look(at) == ["waiting for server-1 at there:1 to come back, or to be started again"]


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.INITIALISING])
def test_workers_have_max_idle_s_to_come(clock: Clock, phase: Phase) -> None:
    """Counted from the moment the last one was gone."""
    one = job()
    one.life.take_over(phase)
    one.members.handle(Joined(Role.WORKER), 0.0)
    at = watch(one)
    clock.now += 500.0
    look(at)
    one.members.handle(Left(1), 0.0)
    look(at)
    clock.now += 100.0
    assert look(at) == ["waiting for workers: all are gone; the servers keep the model"]
    assert not one.failures
    clock.now += 0.1
    look(at)
    assert one.failures == [("no worker has come for 100 s (cluster.max_idle_s)", 1)]


def test_a_worker_in_between_starts_the_time_anew(clock: Clock) -> None:
    one = job()
    one.life.take_over(Phase.RUNNING)
    at = watch(one)
    look(at)
    clock.now += 99.0
    one.members.handle(Joined(Role.WORKER), 0.0)
    look(at)
    one.members.handle(Left(1), 0.0)
    look(at)
    clock.now += 99.0
    look(at)
    assert not one.failures


@pytest.mark.parametrize(
    ("phase", "finished"),
    [
        (Phase.RUNNING, True),
        (Phase.DONE, False),
        (Phase.STOPPED, False),
        (Phase.FAILED, False),
    ],
)
def test_a_job_that_has_come_to_its_end_waits_for_nobody(clock: Clock, phase: Phase, finished: bool) -> None:
    one = job()
    one.life.take_over(phase)
    one.ending.finished = finished
    at = watch(one)
    for _ in range(5):
        assert look(at) == []
        clock.now += 1000.0
    assert not one.failures
