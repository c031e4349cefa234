"""Plans of faults: what may stand in one, what a seed makes, and that a fault strikes as often as it should."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from paramserver import errors, failpoints
from paramserver.errors import ConfigError
from paramserver.testing.armed import Armed
from paramserver.testing.arming import ENV_FLAG, ENV_PLAN, FLAG, arm_if_told, environment
from paramserver.testing.faults import Fault, Hit
from paramserver.testing.fired import FiredLog
from paramserver.testing.places import PLACES
from paramserver.testing.plan import Plan, Planned, load, parse
from paramserver.testing.processes import ProcessBook
from paramserver.testing.seeded import ALL_KINDS, Shape, made

ROOT = Path(__file__).parents[2]

FULL = """
seed = 7

[[fault]]
at = "push.after_stage"
who = "server-1"
step = 7
do = "kill"

[[fault]]
call = "Shard.P*"
do = "delay"
share = 0.1
times = 0
seconds = 0.05

[[fault]]
process = "worker-1"
after_s = 1.5
do = "stop"
seconds = 2
"""


def test_a_plan_is_read() -> None:
    assert parse(FULL) == Plan(
        (
            Planned("at", "push.after_stage", "kill", "server-1", step=7),
            Planned("call", "Shard.P*", "delay", share=0.1, times=0, seconds=0.05),
            Planned("process", "worker-1", "stop", "worker-1", after_s=1.5, seconds=2.0),
        ),
        seed=7,
    )


def test_a_fault_is_told_in_words() -> None:
    assert [str(fault) for fault in parse(FULL).faults] == [
        "kill server-1 at push.after_stage, step 7",
        "delay Shard.P* of * for 0.05 s, 10% of them, every time",
        "stop worker-1 for 2 s, after 1.5 s",
    ]


BAD = [
    ("seed = 1", "plans no fault: add [[fault]]"),
    ("[[fault]", "is not TOML"),
    ("faults = 3", "unknown key 'faults'"),
    ("seed = -1", "seed is a whole number of at least 0, not -1"),
    ("fault = 3", "faults are written as [[fault]]"),
    ('[[fault]]\ndo = "kill"', "fault 1 needs one of at, call, process and storage, not none"),
    ('[[fault]]\nat = "push.recv"\ncall = "Shard.Push"', "needs one of at, call, process and storage, not at and call"),
    ('[[fault]]\nat = "push.recv"\nafter_s = 1\ndo = "kill"', "unknown key 'after_s'; with at go"),
    (
        '[[fault]]\nat = "push.recv"\ndo = "explode"',
        "do = 'explode'; with at it is one of kill, stop, delay, error, note",
    ),
    ('[[fault]]\nat = "push.recv"', "do = ''"),
    ('[[fault]]\nat = "push.rec"\ndo = "kill"', "there is no place 'push.rec'; the places are push.recv,"),
    ('[[fault]]\nat = 3\ndo = "kill"', "at is a text, not 3"),
    ('[[fault]]\nat = "push.recv"\ndo = "kill"\nwho = "server"', "'server' is no member"),
    ('[[fault]]\nat = "push.recv"\ndo = "kill"\nwho = "worker-0"', "worker-0 never comes to push.recv, only a server"),
    ('[[fault]]\nat = "coord.after_generation"\ndo = "kill"\nstep = 1', "belongs to no step"),
    ('[[fault]]\nat = "apply.mid"\ndo = "error"', "an error is possible at push.recv,"),
    ('[[fault]]\nat = "push.recv"\ndo = "kill"\nstep = -1', "step is a whole number of at least 0, not -1"),
    ('[[fault]]\nat = "push.recv"\ndo = "kill"\nstep = true', "step is a whole number"),
    ('[[fault]]\nat = "push.recv"\ndo = "kill"\nnth = 0', "nth is a whole number of at least 1, not 0"),
    ('[[fault]]\nat = "push.recv"\ndo = "kill"\ntimes = 1.5', "times is a whole number"),
    (
        '[[fault]]\nat = "push.recv"\ndo = "kill"\nseconds = 1',
        "seconds goes with stop, delay, reorder, full, read_only, gone, slow, not with kill",
    ),
    ('[[fault]]\nat = "push.recv"\ndo = "stop"\nseconds = 0', "seconds is a number above 0, at most 600, not 0"),
    ('[[fault]]\nat = "push.recv"\ndo = "stop"\nseconds = nan', "seconds is a number above 0"),
    ('[[fault]]\ncall = "Shard.Shove"\ndo = "drop"', "there is no call 'Shard.Shove'; the calls are Shard."),
    ('[[fault]]\ncall = "Shard.Push"\ndo = "kill"', "with call it is one of drop,"),
    ('[[fault]]\ncall = "Shard.Push"\ndo = "drop"\nwho = "store"', "the store makes no calls"),
    ('[[fault]]\ncall = "Shard.Push"\ndo = "drop"\nshare = 1.5', "share is a number above 0, at most 1, not 1.5"),
    ('[[fault]]\nprocess = "worker-*"\ndo = "kill"\nstep = 1', "name one process, as worker-1"),
    ('[[fault]]\nprocess = "worker-1"\ndo = "kill"', "needs one of step and after_s"),
    ('[[fault]]\nprocess = "worker-1"\ndo = "kill"\nstep = 1\nafter_s = 1', "needs one of step and after_s"),
]


@pytest.mark.parametrize(("text", "complaint"), BAD, ids=[complaint for _, complaint in BAD])
def test_a_bad_plan_is_refused_with_the_fault_and_the_field(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "chaos.toml")
    assert str(caught.value).startswith("chaos.toml")
    assert complaint in str(caught.value)


def test_the_number_of_the_bad_fault_is_said() -> None:
    with pytest.raises(ConfigError, match="fault 4: unknown key 'hurry'"):
        parse(FULL + '\n[[fault]]\nat = "push.recv"\ndo = "kill"\nhurry = 1\n')


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml cannot be read: No such file"):
        load(tmp_path / "nothing.toml")


def test_every_place_is_in_the_code_and_every_place_in_the_code_is_known() -> None:
    source = "".join(path.read_text() for path in (ROOT / "paramserver").rglob("*.py"))
    assert set(re.findall(r'\breach\("([^"]+)"', source)) == PLACES.keys()


# ---- seeds


def test_a_seed_makes_the_same_plan_every_time_and_another_seed_another_one() -> None:
    shape = Shape(servers=2, workers=3, steps=40)
    plan = made(7, 20, shape)
    assert plan == made(7, 20, shape)
    assert len(plan.faults) == 20
    assert plan != made(8, 20, shape)
    assert made(7, 5, shape).faults == plan.faults[:5]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_a_seed_makes_can_be_written_and_read_again(mode: str) -> None:
    plan = made(3, 300, Shape(servers=2, workers=2, steps=12, mode=mode))
    again = parse(plan.to_toml())
    assert again.seed == 3
    assert [str(fault) for fault in again.faults] == [str(fault) for fault in plan.faults]
    assert all(0 <= (fault.step or 0) < 12 for fault in plan.faults)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_kinds_of_faults_can_be_chosen(kind: str) -> None:
    plan = made(1, 50, Shape(2, 2, 10), [kind])
    struck = {fault.kind if fault.kind in ("call", "storage") else fault.who.partition("-")[0] for fault in plan.faults}
    assert struck == {"call" if kind == "network" else kind}
    assert [str(fault) for fault in parse(plan.to_toml()).faults] == [str(fault) for fault in plan.faults]


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is no kind of fault 'disk'"):
        made(1, 5, Shape(2, 2, 10), ["disk"])
    with pytest.raises(ConfigError, match="at least one fault"):
        made(1, 0, Shape(2, 2, 10))


# ---- striking


class Blows:
    """What an armed process would have done to itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.signals: list[signal.Signals] = []
        self.naps: list[float] = []
        monkeypatch.setattr(os, "kill", self._kill)
        monkeypatch.setattr("paramserver.testing.armed.time.sleep", self.naps.append)
        # Those that are struck, this process aside; and those that do not live.
        self.struck: list[int] = []
        self.dead: set[int] = set()

    def _kill(self, pid: int, number: int) -> None:
        if pid in self.dead:
            raise ProcessLookupError
        if number:
            self.signals.append(signal.Signals(number))
            self.struck += [pid] if pid != os.getpid() else []


@pytest.fixture
def blows(monkeypatch: pytest.MonkeyPatch) -> Blows:
    return Blows(monkeypatch)


@pytest.fixture
def fired(tmp_path: Path) -> FiredLog:
    return FiredLog(tmp_path / "fired")


def arm(plan: Plan, name: str, fired: FiredLog) -> Armed:
    return Armed(plan, name, fired, ProcessBook(fired.path.with_name("processes")))


def plan_of(text: str) -> Plan:
    return parse(f"[[fault]]\n{text}")


def test_a_fault_strikes_at_its_place_in_its_process_on_its_step(blows: Blows, fired: FiredLog) -> None:
    plan = plan_of('at = "push.after_stage"\nwho = "server-1"\nstep = 2\ndo = "kill"')
    for name in ("server-0", "server-1"):
        armed = arm(plan, name, fired)
        for step in range(4):
            armed.reached("push.recv", step)
            armed.reached("push.after_stage", step)
    assert blows.signals == [signal.SIGKILL]
    assert [(f.fault, f.who, f.what, f.do, f.step, f.pid) for f in fired.read()] == [
        (0, "server-1", "push.after_stage", "kill", 2, os.getpid())
    ]


def test_the_fault_is_written_down_before_it_strikes(monkeypatch: pytest.MonkeyPatch, fired: FiredLog) -> None:
    seen: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: seen.append(len(fired.read())))
    arm(plan_of('at = "apply.mid"\ndo = "kill"'), "server-0", fired).reached("apply.mid", 0)
    assert seen == [1]


def test_the_nth_time_counts(blows: Blows, fired: FiredLog) -> None:
    armed = arm(plan_of('at = "apply.mid"\nstep = 5\nnth = 3\ndo = "delay"\nseconds = 0.25'), "server-0", fired)
    for step in (4, 5, 5, 5, 5):
        armed.reached("apply.mid", step)
    assert blows.naps == [0.25]


def test_a_process_that_begins_anew_does_not_suffer_again(blows: Blows, fired: FiredLog) -> None:
    plan = plan_of('at = "push.recv"\ndo = "kill"\ntimes = 2')
    for _ in range(4):  # each a process that begins anew and comes there again
        arm(plan, "server-0", fired).reached("push.recv", 0)
    assert blows.signals == [signal.SIGKILL] * 2
    assert fired.counts() == {0: 2}


def test_a_pattern_strikes_whoever_comes_first(blows: Blows, fired: FiredLog) -> None:
    plan = plan_of('at = "worker.*"\nwho = "worker-*"\ndo = "kill"')
    for name in ("server-0", "worker-2", "worker-0"):
        arm(plan, name, fired).reached("worker.after_pull", 3)
    assert [f.who for f in fired.read()] == ["worker-2"]


def test_without_a_limit_it_strikes_every_time(blows: Blows, fired: FiredLog) -> None:
    armed = arm(plan_of('at = "push.recv"\ndo = "delay"\nseconds = 0.1\ntimes = 0'), "server-0", fired)
    for step in range(5):
        armed.reached("push.recv", step)
    assert len(blows.naps) == len(fired.read()) == 5


@pytest.mark.parametrize(("do", "reading"), [("full", False), ("read_only", False), ("gone", True)])
def test_the_storage_fails_for_all_processes_from_a_step_on_for_a_while(
    do: str, reading: bool, monkeypatch: pytest.MonkeyPatch, fired: FiredLog
) -> None:
    """Writing fails; reading fails as well if the storage is gone."""
    plan = plan_of(f'storage = "checkpoints"\nstep = 3\ndo = "{do}"\nseconds = 5')
    server, coordinator = arm(plan, "server-0", fired), arm(plan, "coordinator", fired)
    server.reached("apply.mid", 2)
    coordinator.touched(writes=True)
    server.reached("apply.mid", 3)
    for armed in (server, coordinator):
        with pytest.raises(OSError, match="as planned"):
            armed.touched(writes=True)
        with pytest.raises(OSError, match="as planned") if reading else contextlib.nullcontext():
            armed.touched(writes=False)
    now = fired.read()[0].at
    monkeypatch.setattr("paramserver.testing.armed.time.time", lambda: now + 5.1)
    coordinator.touched(writes=True)
    assert [(one.who, one.do) for one in fired.read()] == [("storage", do)]


def test_slow_storage_takes_its_time_for_each_write(blows: Blows, fired: FiredLog) -> None:
    armed = arm(plan_of('storage = "checkpoints"\nstep = 0\ndo = "slow"\nseconds = 600'), "server-0", fired)
    armed.reached("apply.mid", 0)
    armed.touched(writes=True)
    armed.touched(writes=False)
    assert blows.naps == [30.0]


def test_an_error_is_one_that_the_caller_meets_in_life(blows: Blows, fired: FiredLog) -> None:
    armed = arm(plan_of('at = "push.recv"\ndo = "error"'), "server-0", fired)
    with pytest.raises(errors.UnavailableError, match=r"push\.recv: an error, as planned"):
        armed.reached("push.recv", 0)
    armed.reached("push.recv", 1)
    storage = arm(plan_of('at = "ckpt.mid_write"\ndo = "error"'), "server-0", FiredLog(fired.path.with_name("2")))
    with pytest.raises(OSError, match="as planned"):
        storage.reached("ckpt.mid_write", 1)


def test_a_process_learns_its_name_when_it_joins(blows: Blows, fired: FiredLog) -> None:
    armed = arm(plan_of('at = "push.recv"\nwho = "server-1"\ndo = "kill"'), "server-?", fired)
    armed.reached("push.recv", 0)
    armed.named("server-1")
    armed.reached("push.recv", 1)
    assert [f.step for f in fired.read()] == [1]


def test_a_call_is_hit_from_its_step_on(fired: FiredLog) -> None:
    armed = arm(plan_of('call = "Shard.Push"\nstep = 2\ndo = "lose_reply"'), "worker-0", fired)
    pulls: list[Hit | None] = []
    pushes: list[Hit | None] = []
    for step in range(4):
        armed.reached("worker.after_grad", step)
        pulls.append(armed.next_call("Shard.Pull"))
        pushes.append(armed.next_call("Shard.Push"))
    assert pulls == [None] * 4
    assert [hit.fault if hit else None for hit in pushes] == [None, None, Fault.LOSE_REPLY, None]
    assert [f.step for f in fired.read()] == [2]


def test_a_share_of_the_calls_is_hit_and_always_the_same(fired: FiredLog, tmp_path: Path) -> None:
    plan = plan_of('call = "Shard.*"\nshare = 0.25\ntimes = 0\ndo = "drop"')

    def hits(name: str, log: FiredLog) -> list[bool]:
        armed = arm(plan, name, log)
        return [armed.next_call("Shard.Push") is not None for _ in range(200)]

    first = hits("worker-0", fired)
    assert 30 < sum(first) < 70
    assert first == hits("worker-0", FiredLog(tmp_path / "again"))
    assert first != hits("worker-1", fired)


def test_only_planned_places_are_planned(fired: FiredLog) -> None:
    armed = arm(plan_of('at = "worker.between_shards"\nwho = "worker-1"\ndo = "kill"'), "worker-1", fired)
    assert armed.plans("worker.between_shards")
    assert not armed.plans("worker.after_pull")
    armed.named("worker-0")
    assert not armed.plans("worker.between_shards")


def test_a_process_is_struck_once_the_job_has_come_to_the_step(blows: Blows, fired: FiredLog) -> None:
    """By whoever comes there first, and once; whoever is not there at that moment is struck when it is back."""
    plan = plan_of('process = "worker-1"\nstep = 3\ndo = "kill"')
    book = ProcessBook(fired.path.with_name("processes"))
    # Numbers that no process of a machine has.
    book.note("worker-1", 1 << 30)
    blows.dead.add(1 << 30)
    servers = [arm(plan, f"server-{index}", fired) for index in range(2)]
    for step in range(5):
        for server in servers:
            server.reached("push.recv", step)
    assert blows.struck == []
    book.note("worker-1", (1 << 30) + 1)
    for server in servers:
        server.reached("push.recv", 6)
    assert blows.struck == [(1 << 30) + 1]
    assert blows.signals == [signal.SIGKILL]
    assert [(f.who, f.do, f.step, f.pid) for f in fired.read()] == [("worker-1", "kill", 6, (1 << 30) + 1)]


# ---- arming (J22)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "chaos.toml"
    path.write_text('[[fault]]\nat = "push.after_stage"\nwho = "server-1"\nstep = 7\ndo = "kill"\n')
    return path


@pytest.fixture(autouse=True)
def _disarmed() -> object:
    yield
    failpoints.arm(None)


@pytest.mark.parametrize("flag", ["", "1", "true"])
def test_a_plan_without_the_flag_is_ignored_with_a_warning(
    written: Path, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_PLAN, str(written))
    monkeypatch.setenv(ENV_FLAG, flag)
    with capture_logs() as logs:
        assert not arm_if_told("server-1")
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert "no faults are injected" in logs[0]["event"]
    assert not failpoints.planned("push.after_stage")
    channel = object()
    assert failpoints.through(channel) is channel


def test_the_flag_alone_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_FLAG, FLAG)
    with capture_logs() as logs:
        assert not arm_if_told("server-1")
    assert logs == []


def test_plan_and_flag_arm_the_process(written: Path, monkeypatch: pytest.MonkeyPatch, blows: Blows) -> None:
    for key, value in environment(written).items():
        monkeypatch.setenv(key, value)
    with capture_logs() as logs:
        assert arm_if_told("server-1")
    assert "faults are planned" in logs[0]["event"]
    failpoints.reach("push.after_stage", 7)
    assert blows.signals == [signal.SIGKILL]
    assert len(FiredLog.beside(written).read()) == 1


def test_a_bad_plan_stops_the_process(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written.write_text("fault = 3")
    for key, value in environment(written).items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match=r"chaos\.toml"):
        arm_if_told("server-1")
