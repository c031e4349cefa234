"""The coordinator's side of blame: what it keeps of reports until steps are judged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paramserver.coordinator.watching.blame import BlameWatch
from paramserver.core.job.membership import Role
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.v1 import coordinator_pb2, shard_pb2

JOINER = SimpleNamespace(ident=13, name="worker-3", role=Role.WORKER)
WORKERS = [SimpleNamespace(ident=10 + rank, name=f"worker-{rank}", role=Role.WORKER) for rank in range(3)]
SERVER = SimpleNamespace(ident=1, name="server-0", role=Role.SERVER)


class Job:
    """Three workers and a server, and a clock that stands until it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.workers = list(WORKERS)
        self.stalls = SimpleNamespace(members=frozenset())
        stage: Any = SimpleNamespace(
            timeline=1,
            consistency=Consistency(Mode.SYNC),
            stalls=self.stalls,
            main=SimpleNamespace(places=lambda: self.workers),
            members=SimpleNamespace(of=lambda role: self.workers, get=lambda ident: None),
        )
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        monkeypatch.setattr("paramserver.coordinator.watching.blame.time", clock)
        self.watch = BlameWatch(stage)

    def hears(self, member: Any, **report: Any) -> None:
        self.watch.hear(member, coordinator_pb2.SessionRequest(**report))

    def made(self, step: int, others_s: float, last_s: float, last: int, lo: int = 1) -> None:
        """A report of the server about a slice of a step, which came last."""
        times = shard_pb2.VersionTimes(step=step, timeline=1, last=last, lo=lo, hi=lo + 1, of=3, others=10)
        times.others_s, times.last_s, times.published_s = others_s, last_s, last_s
        self.hears(SERVER, shards=[shard_pb2.StatsResponse(shard=0, timeline=1, times=[times])])

    def named(self) -> list[tuple[int, str]]:
        self.now += 10.0
        self.watch.look()
        return [(step.step, step.member) for step in self.watch.page().worst]


def test_who_was_to_bring_a_slice_is_who_had_it_when_the_step_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the step waited, the worker stalled, and its slices were dealt to the others."""
    job = Job(monkeypatch)
    for step in range(8):
        job.now = float(step)
        job.made(step, 0.3, 0.31, 11)
    job.now = 10.0
    job.stalls.members = frozenset({11})
    job.made(8, 0.3, 1.5, 12)
    assert job.named() == [(8, "worker-1")]


def test_a_worker_that_joins_as_a_step_begins_has_its_share_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices 1 and 2 of three workers are slices of the second and third; with a fourth, slice 2 is the last one's."""
    job = Job(monkeypatch)
    for step in range(8):
        job.now = float(step)
        job.made(step, 0.3, 0.31, 11)
    job.now = 8.4
    job.workers.append(JOINER)
    job.hears(JOINER)
    job.now = 9.5
    job.made(8, 0.3, 1.4, 12, lo=2)
    assert job.named() == [(8, "worker-3")]


def test_a_worker_that_joins_while_a_step_waits_for_another_one_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    for step in range(8):
        job.now = float(step)
        job.made(step, 0.3, 0.31, 11)
    job.now = 12.0
    job.workers.append(JOINER)
    job.hears(JOINER)
    job.now = 12.3
    job.made(8, 0.3, 4.0, 12, lo=2)
    assert job.named() == [(8, "worker-2")]


def test_a_wait_at_the_bound_of_which_two_shards_tell_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later wait of the same worker counts again, and the longer report of one wait is taken."""
    job = Job(monkeypatch)
    for clock in (7, 8):
        for shard, seconds in enumerate((0.4, 0.5)):
            hold = shard_pb2.Hold(worker=10, by=11, clock=clock, seconds=seconds)
            job.now += 0.3
            job.hears(SERVER, shards=[shard_pb2.StatsResponse(shard=shard, timeline=1, held=[hold])])
    (held,) = job.watch.page().held
    assert held.times == 2
    assert held.seconds == pytest.approx(1.0)


def told(step: int, data_s: float = 0.0) -> coordinator_pb2.WorkerStep:
    return coordinator_pb2.WorkerStep(step=step, phases=coordinator_pb2.Phases(data_s=data_s, compute_s=0.3))


def report(*steps: coordinator_pb2.WorkerStep, version: int, untold: bool = False) -> coordinator_pb2.WorkerReport:
    return coordinator_pb2.WorkerReport(steps=steps, version=version, untold=untold, phase="compute", slices=9)


def trained(monkeypatch: pytest.MonkeyPatch) -> Job:
    """Eight usual steps are done, and worker-1 has told of its slices."""
    job = Job(monkeypatch)
    for step in range(8):
        job.now = float(step)
        job.made(step, 0.3, 0.31, 10)
        job.hears(WORKERS[1], worker=report(told(step), version=step + 1))
    return job


def test_a_step_is_judged_when_the_slice_that_made_it_wait_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is at a later step when it reports, and the slice that it handed in follows in the next report."""
    job = trained(monkeypatch)
    job.now = 9.0
    job.made(8, 0.3, 1.2, 11)
    job.now = 10.0
    job.hears(WORKERS[1], worker=report(version=10, untold=True))
    job.now = 10.5
    job.watch.look()
    job.hears(WORKERS[1], worker=report(told(8, data_s=2.0), version=10))
    job.now = 11.0
    job.watch.look()
    found = job.watch.page().worst
    assert [(step.step, step.member, step.cause) for step in found] == [(8, "worker-1", "its data loader")]


def test_a_worker_that_falls_silent_before_it_tells_of_its_slice_was_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = trained(monkeypatch)
    job.now = 8.5
    job.hears(WORKERS[1], worker=report(version=8, untold=True))
    job.now = 14.0
    job.made(8, 0.3, 5.5, 11)
    job.now = 18.5
    job.watch.look()
    assert [(step.step, step.member, step.cause) for step in job.watch.page().worst] == [(8, "worker-1", "paused")]
