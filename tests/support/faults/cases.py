"""What is run: the crash matrix (every place × every role × four steps) and random campaigns, as plans."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from paramserver.testing.places import PLACES
from paramserver.testing.plan import Plan, Planned
from paramserver.testing.seeded import KINDS, Shape, made

SERVERS, WORKERS, SLICES = 2, 2, 4
# Of the small job: 48 samples, two in a slice, two epochs.
STEPS, ASYNC_SLICES = 12, 48
CHECKPOINT_EVERY = 3
# First, second, middle, last.
WHEN = {"first": 0, "second": 1, "middle": 6, "last": STEPS - 1}
# Every server has at least so many.
CHUNKS = 2
# The step of a process's fault that the test itself carries out.
NEVER = 10**9
# Checkpoints are of versions: the first one is of the initial weights.
_SAVED = {"first": 0, "second": CHECKPOINT_EVERY, "middle": 2 * CHECKPOINT_EVERY, "last": STEPS}


@dataclass(frozen=True, slots=True)
class Job:
    """The command that is run under faults. ``pace_s``: how long a slice takes at least.

    With replicas, workers write down what they see (`history`). ``transport``: of weights and gradients.
    """

    mode: str = "sync"
    workers: int = WORKERS
    epochs: int = 2
    pace_s: float = 0.0
    checkpoints: bool = True
    keep: int = 3
    replicas: int = 0
    transport: str = "auto"

    @property
    def steps(self) -> int:
        """Steps, or asynchronous: slices."""
        return (STEPS if self.mode == "sync" else ASYNC_SLICES) * self.epochs // 2

    @property
    def limit_s(self) -> float:
        """After this a run counts as hanging, on a busy machine, too."""
        return max(240.0 if self.pace_s else 120.0, 0.1 * self.contributions)

    @property
    def contributions(self) -> int:
        """What every server must have counted in the end."""
        return ASYNC_SLICES * self.epochs // 2

    def words(self, script: str, summary: str, checkpoints: str, history: str) -> list[str]:
        """The words after "paramserver"."""
        words = ["run", script, "--servers", str(SERVERS), "--workers", str(self.workers), "--summary", summary]
        words += ["--set", "training.chunk_bytes=64", "--set", f"cluster.transport={self.transport}"]
        words += ["--replicas", str(self.replicas)] if self.replicas else []
        words += ["--slices-per-step", str(SLICES)] if self.mode == "sync" else ["--mode", "async"]
        if self.checkpoints:
            every = CHECKPOINT_EVERY * (1 if self.mode == "sync" else SLICES)
            words += [
                "--checkpoint-every",
                str(every),
                "--checkpoint-dir",
                checkpoints,
                "--set",
                f"checkpoint.keep={self.keep}",
            ]
        words += ["--", "--epochs", str(self.epochs)]
        words += ["--pace", str(self.pace_s)] if self.pace_s else []
        words += ["--history", history] if self.replicas else []
        return [*words, "--ledger"] if self.mode == "async" else words


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a plan of faults.

    ``stays``: kills of servers whose shards have backups. The job must not go back to a checkpoint, and do no step
    again. The test kills as many of them as the run leaves time for.
    """

    name: str
    who: str
    place: str
    when: str
    job: Job
    plan: Plan
    stays: bool = False


def matrix() -> list[Case]:
    """Every place × who comes there × when. The order is fixed, so that a range of numbers is a range of cases."""
    without = [*_of_servers(), *_of_workers(), *_of_coordinator(), *_of_processes(), *_of_answers(), *_of_calls()]
    return [*without, *_of_copies()]


def _case(fault: Planned, when: str, *before: Planned, mode: str = "sync", replicas: int = 0) -> Case:
    place = "(anywhere)" if fault.kind == "process" else fault.what
    if fault.do != "kill":
        place = f"{place}: {fault.do}"
    name = f"{fault.who} {place} {when}" + (" async" if mode == "async" else "") + (" replicas" if replicas else "")
    return Case(name, fault.who, place, when, Job(mode, replicas=replicas), Plan((fault, *before)))


def _of_servers() -> Iterator[Case]:
    for place, facts in PLACES.items():
        if facts.role != "server" or facts.replicas:
            continue
        for who in ("server-0", "server-1"):
            for when, step in WHEN.items():
                if place.startswith("restore."):  # while it comes back from being lost
                    lost = Planned("at", "push.after_stage", "kill", "server-1", step=step)
                    yield _case(Planned("at", place, "kill", who), when, lost)
                elif place.startswith("ckpt."):
                    yield _case(Planned("at", place, "kill", who, step=_SAVED[when]), when)
                elif place == "apply.mid":
                    for chunk in range(1, CHUNKS + 1):
                        yield _case(Planned("at", place, "kill", who, step=step, nth=chunk), f"{when}, chunk {chunk}")
                else:
                    yield _case(Planned("at", place, "kill", who, step=step), when)


def _of_copies() -> Iterator[Case]:
    """Shards have backups: a primary, a backup, both or a new backup are killed, or the coordinator with them."""
    for place, facts in PLACES.items():
        for who in ("server-0", "server-1") if facts.replicas and facts.role == "server" else ():
            other = "server-1" if who == "server-0" else "server-0"
            for when, step in WHEN.items():
                if place.startswith("promote."):  # then all copies of a shard are gone
                    lost = Planned("at", "push.after_stage", "kill", other, step=step)
                    yield _case(Planned("at", place, "kill", who), when, lost, replicas=1)
                elif place.startswith("catch_up."):
                    yield _while_catching_up(place, who, other, when)
                else:
                    yield _case(Planned("at", place, "kill", who, step=step), when, replicas=1)
    for place in ("push.after_stage", "apply.mid", "commit.before_log", "commit.after_log_before_reply"):
        for who in ("server-0", "server-1"):
            for when, step in WHEN.items():
                yield _case(Planned("at", place, "kill", who, step=step), when, replicas=1)
    for who in ("coordinator", "store", "server-0", "server-1", "worker-0"):
        for when, step in WHEN.items():
            yield _case(Planned("process", who, "kill", who, step=step), when, replicas=1)
    for when, step in WHEN.items():
        lost = Planned("at", "push.after_stage", "kill", "server-1", step=step)
        yield _case(Planned("at", "coord.before_promotion", "kill", "coordinator"), when, lost, replicas=1)
        # The backup dies when it is about to take over: if it died any earlier, it might not have answered yet.
        for beside, both in (
            ("coordinator", Planned("process", "coordinator", "kill", "coordinator", step=step)),
            ("server-0", Planned("at", "promote.before", "kill", "server-0")),
        ):
            fault = Planned("at", "forward.after_ack", "kill", "server-1", step=step)
            yield _case(fault, f"{when}, with {beside}", both, replicas=1)


def _while_catching_up(place: str, who: str, other: str, when: str) -> Case:
    """A server brings another one its shard, or is brought it: the first copy, or that of a server that has come back.

    Slices take long enough for a server to be back before the last step.
    """
    if when == "first":
        return _case(Planned("at", place, "kill", who), when, replicas=1)
    brings = place == "catch_up.after_chunks"
    # A server that has been started again is brought two shards, and the first copies are of one shard.
    fault = Planned("at", place, "kill", who, nth=2)
    step = {"second": 1, "middle": 3, "last": STEPS - 1}[when]
    lost = Planned("at", "push.after_stage", "kill", other if brings else who, step=step)
    case = _case(fault, when, lost, replicas=1)
    return replace(case, job=replace(case.job, pace_s=0.0 if when == "last" else 0.6))


def _of_answers() -> Iterator[Case]:
    """A server answers with an error, before it has counted a contribution or after that."""
    for place in ("push.recv", "reply.drop"):
        for who in ("server-0", "server-1"):
            for when, step in WHEN.items():
                yield _case(Planned("at", place, "error", who, step=step), when)


def _of_calls() -> Iterator[Case]:
    """What a network does to messages, from a step on."""
    faults = [("Shard.Push", do) for do in ("drop", "lose_reply", "delay", "duplicate", "reorder", "cut")]
    faults += [("Shard.Pull", do) for do in ("drop", "lose_reply", "delay", "duplicate")]
    for method, do in faults:
        for when, step in WHEN.items():
            yield _case(Planned("call", method, do, "worker-1", step=step, seconds=0.2), when)


def _of_workers() -> Iterator[Case]:
    for place, facts in PLACES.items():
        if facts.role == "worker":
            for when, step in WHEN.items():
                yield _case(Planned("at", place, "kill", "worker-1", step=step), when)


# How often a coordinator of the small job comes to a place in a run without faults.
_JOINS = SERVERS + WORKERS


def _of_coordinator() -> Iterator[Case]:
    for place in ("coord.before_generation", "coord.after_generation"):
        yield _case(Planned("at", place, "kill", "coordinator"), "first")
        yield _case(Planned("at", place, "kill", "coordinator", nth=2), "second")
        for when in ("middle", "last"):  # only a loss makes a generation while the job trains
            lost = Planned("at", "worker.after_grad", "kill", "worker-1", step=WHEN[when])
            yield _case(Planned("at", place, "kill", "coordinator", nth=_JOINS + 1), when, lost)
    for place in ("coord.before_timeline", "coord.after_timeline"):
        for when, step in WHEN.items():
            lost = Planned("at", "push.after_stage", "kill", "server-1", step=step)
            yield _case(Planned("at", place, "kill", "coordinator"), when, lost)
    for place in ("slice.leased", "slice.before_done"):
        for when, nth in {"first": 1, "second": 2, "middle": 4, "last": 6}.items():
            yield _case(Planned("at", place, "kill", "coordinator", nth=nth), when, mode="async")
    for place in ("redis.before_script", "redis.after_script"):
        for when, nth in {"first": 1, "second": 2, "middle": 5, "last": 8}.items():
            yield _case(Planned("at", place, "kill", "coordinator", nth=nth), when)
    for place in ("ckpt.manifest", "ckpt.pointer"):
        for when, version in _SAVED.items():
            yield _case(Planned("at", place, "kill", "coordinator", step=version), when)
    for nth, when in enumerate(WHEN, 1):
        case = _case(Planned("at", "ckpt.gc", "kill", "coordinator", nth=nth), when)
        yield replace(case, job=replace(case.job, keep=1))


def _of_processes() -> Iterator[Case]:
    """Not at a place: whoever else is at the step strikes it."""
    for who in ("coordinator", "store", "server-0", "server-1", "worker-0"):
        for when, step in WHEN.items():
            yield _case(Planned("process", who, "kill", who, step=step), when)


def sampled() -> list[Case]:
    """The fixed few that run with every test."""
    wanted = (
        r"server-0 ckpt\.tmp_open first",
        r"worker-1 worker\.between_shards middle",
        r"server-1 apply\.mid last, chunk 2",
        r"server-1 push\.after_stage middle",
        r"server-0 commit\.after_log_before_reply second",
        r"coordinator \(anywhere\) middle",
        r"store \(anywhere\) middle",
    )
    cases = {pattern: [case for case in matrix() if re.fullmatch(pattern, case.name)] for pattern in wanted}
    return [found[0] for found in cases.values()]


def campaign(seed: int, runs: int, each: int, kinds: tuple[str, ...] = KINDS, replicas: int = 0) -> list[Case]:
    """Random runs of several faults; every fourth one is asynchronous."""
    cases = []
    for number in range(runs):
        job = Job("async" if number % 4 == 3 else "sync", workers=2 + number % 2, epochs=4, replicas=replicas)
        shape = Shape(SERVERS, job.workers, job.steps, job.mode)
        plan = made(seed * 1000 + number, each, shape, kinds)
        if replicas:  # a server that has come back may hold backups only, and counts no contributions then
            faults = (replace(one, who="server-*") if one.who.startswith("server") else one for one in plan.faults)
            plan = replace(plan, faults=tuple(faults))
        name = f"campaign {seed}{' with replicas' if replicas else ''}, run {number}"
        cases.append(Case(name, "several", "several", "random", job, plan))
    return cases


def kills(role: str, runs: int, each: int) -> list[Case]:
    """Runs in which a process of a role is killed again and again, while steps go on at a fixed pace."""
    cases = []
    # A worker that is lost stops nobody, so others go on until its successor is there.
    gap = {"worker": 120, "server": 40}[role]
    for number in range(runs):
        job = Job(workers=3, epochs=-(-2 * (each + 1) * gap // STEPS), pace_s=_PACE_S)
        faults = []
        for time in range(each):
            who = f"{role}-{(number + time) % (SERVERS if role == 'server' else job.workers)}"
            faults.append(Planned("process", who, "kill", who, step=(time + 1) * gap))
        cases.append(
            Case(f"kills of {role}s, run {number}", role, "(anywhere)", "every so often", job, Plan(tuple(faults)))
        )
    return cases


_PACE_S = 0.02
# Steps, or asynchronous slices, in which a server that was killed has copies of all shards again.
_WHOLE = {"sync": 60, "async": 300}


def kills_of_copies(mode: str, runs: int, each: int) -> list[Case]:
    """The same with replicas. Servers are killed at random moments at which all shards have backups (`strikes`)."""
    cases = []
    for number in range(runs):
        epochs = math.ceil(2 * _WHOLE[mode] * each / (STEPS if mode == "sync" else ASYNC_SLICES))
        job = Job(mode, 3, epochs, _PACE_S, checkpoints=False, replicas=1)  # there is nothing to go back to
        whos = [f"server-{(number + time) % SERVERS}" for time in range(each)]
        plan = Plan(tuple(Planned("process", who, "kill", who, step=NEVER) for who in whos), number)
        name = f"kills of servers with replicas, {mode}, run {number}"
        cases.append(Case(name, f"server, {mode}", "(anywhere)", "at random moments", job, plan, stays=True))
    return cases
