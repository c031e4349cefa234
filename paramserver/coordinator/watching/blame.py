"""Which worker or server made steps wait, and why: collects what members report, and has `core.blame` judge it."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import structlog

from paramserver.coordinator import ports
from paramserver.coordinator.watching.main import Main
from paramserver.coordinator.watching.stalls import Stalls
from paramserver.core.blame.facts import SILENT_S, Open, Worked, under_way
from paramserver.core.blame.judge import Judge
from paramserver.core.blame.sentences import of_now, of_step
from paramserver.core.job.membership import Member, Role
from paramserver.core.versions.consistency import Mode
from paramserver.core.work.slices import assign
from paramserver.v1 import coordinator_pb2, shard_pb2
from paramserver.wire.blame import (
    blamed_to_proto,
    held_from_proto,
    made_from_proto,
    spent_from_proto,
    worked_from_proto,
)
from paramserver.wire.bounds import MAX_MEMBERS

log = structlog.get_logger("paramserver.coordinator")

# Records of a worker that are kept for judging the steps before.
_KEPT = 64
_DEALS = 8
# Between two reports of a server.
_REPORT_S = 0.5
# For so long the sentence tells of the last step that waited.
_SAID_S = 60.0
# Between two lines of the log about steps that waited.
_LOG_S = 10.0
_HELD_SHOWN = 10
# Shards tell of the same wait within so many seconds.
_SAME_WAIT_S = 10.0
_GONE = 64
# Pairs of workers of which one was held by the other, and waits of the last seconds.
_PAIRS, _WAITS = 4096, 10_000
_STALENESS = 64


class _Job(ports.Stage, Protocol):
    stalls: Stalls
    main: Main


class BlameWatch:
    """Collects the times that members report. Messages are read when a step is judged, not when they come."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._judge = Judge()
        self._timeline = 0
        # By worker, its last slices, and when it reported what it does.
        self._records: dict[int, deque[coordinator_pb2.WorkerStep]] = {}
        self._doing: dict[int, tuple[float, coordinator_pb2.WorkerReport]] = {}
        # The workers that left or were lost last, by number.
        self._gone: dict[int, str] = {}
        # Since when slices have been dealt to these workers.
        self._deals: deque[tuple[float, tuple[int, ...]]] = deque(maxlen=_DEALS)
        # By shard, its open step, and when that was reported.
        self._open: dict[int, tuple[float, shard_pb2.StatsResponse]] = {}
        # By name who was held, and by whom: how often and for how long in all.
        self._held: dict[tuple[str, str], tuple[int, float]] = {}
        # By worker and slowest clock, waits that were counted lately: when, who waited for whom, and for how long.
        self._counted: dict[tuple[int, int], tuple[float, tuple[str, str], float]] = {}
        # By shard, contributions by how many updates their weights lacked.
        self._staleness: dict[int, Counter[int]] = {}
        self._told_at = float("-inf")
        self._told_chronic = ""

    # ---- reports

    def hear(self, member: Member, request: coordinator_pb2.SessionRequest) -> None:
        """A member reports."""
        now = time.monotonic()
        if self._timeline != self._job.timeline:
            self._timeline = self._job.timeline
            self._judge.anew()
            self._records.clear()
            self._open.clear()
            self._counted.clear()
        if (active := tuple(worker.ident for worker in self._active())) != (self._deals[-1][1] if self._deals else ()):
            self._deals.append((now, active))
        if request.HasField("worker") and member.role is Role.WORKER:
            self._records.setdefault(member.ident, deque(maxlen=_KEPT)).extend(map(_copy, request.worker.steps))
            self._doing[member.ident] = now, request.worker
        for stats in request.shards:
            self._shard(member, stats, now)

    def _shard(self, server: Member, stats: shard_pb2.StatsResponse, now: float) -> None:
        if stats.shard >= MAX_MEMBERS:
            return
        for times in stats.times:
            if times.timeline == self._timeline:
                self._judge.made(made_from_proto(times, stats.shard, server.name, self._owner(times, now)), now)
        for hold in stats.held:
            self._judge.held(held_from_proto(hold), now)
            self._hold(hold, now)
        self._staleness.setdefault(stats.shard, Counter()).update(dict(enumerate(stats.staleness[:_STALENESS])))
        if stats.HasField("open") and stats.timeline == self._timeline:
            self._open[stats.shard] = now, stats
        elif not stats.backup:
            self._open.pop(stats.shard, None)

    def _hold(self, hold: shard_pb2.Hold, now: float) -> None:
        """A shard tells that a worker was held at the bound; other shards tell of the same wait, which counts once."""
        while self._counted and next(iter(self._counted.values()))[0] < now - _SAME_WAIT_S:
            del self._counted[next(iter(self._counted))]
        wait = hold.worker, hold.clock
        if len(self._counted) >= _WAITS:
            del self._counted[next(iter(self._counted))]
        _, names, told = self._counted.pop(wait, (now, (self._name(hold.worker), self._name(hold.by)), 0.0))
        times_, seconds = self._held.get(names, (0, 0.0))
        if names not in self._held and len(self._held) >= _PAIRS:
            del self._held[min(self._held, key=lambda pair: self._held[pair][1])]
        self._held[names] = times_ + (told == 0.0), seconds + max(0.0, hold.seconds - told)
        self._counted[wait] = now, names, max(told, hold.seconds)

    def gone(self, worker: Member) -> None:
        """A worker is no longer a member; steps that waited for it are judged all the same."""
        self._doing.pop(worker.ident, None)
        self._gone[worker.ident] = worker.name
        if len(self._gone) > _GONE:
            ident = next(iter(self._gone))
            del self._gone[ident]
            self._records.pop(ident, None)

    # ---- judgement

    def look(self) -> None:
        """Judge the steps whose time has come; the log hears of those that waited noticeably, now and then."""
        now = time.monotonic()
        names = {worker.ident: worker.name for worker in self._job.members.of(Role.WORKER)} | self._gone
        found = self._judge.look(now, names, self._read)
        if found and now - self._told_at >= _LOG_S:
            self._told_at = now
            log.info(of_step(max(found, key=lambda blamed: blamed.waited)))
        if self._judge.chronic and not self._told_chronic:
            log.warning(self._judge.chronic)
        self._told_chronic = self._judge.chronic

    def _owner(self, times: shard_pb2.VersionTimes, heard: float) -> int | None:
        """To which worker the slices that came last had been dealt; None: not known.

        A worker that has left or stalled since the step began keeps its slices; one that joined before the middle of
        the wait has its share. A report may be half a second younger than the version.
        """
        begun = self._deal(heard - times.published_s - _REPORT_S)
        workers = self._deal(heard - (times.last_s - times.others_s + _REPORT_S) / 2)
        if set(begun) - set(workers):
            workers = begun
        ranges = zip(workers, assign(times.of, len(workers)), strict=True) if workers else ()
        return next((worker for worker, (lo, hi) in ranges if lo <= times.lo < hi), None)

    def _deal(self, at: float) -> tuple[int, ...]:
        """The workers to whom slices were dealt at this moment."""
        former = [workers for since, workers in self._deals if since <= at]
        return former[-1] if former else self._deals[0][1] if self._deals else ()

    def _dealt(self, slices: int) -> Iterator[tuple[Member, int, int]]:
        """To whom the slices of a step are dealt now: the range of each worker."""
        workers = self._active()
        if not slices or not workers:
            return
        for worker, (lo, hi) in zip(workers, assign(slices, len(workers)), strict=True):
            yield worker, lo, hi

    def _active(self) -> list[Member]:
        """The workers to whom slices are dealt, in the order of their places."""
        stalled = self._job.stalls.members
        return [worker for worker in self._job.main.places() if worker.ident not in stalled]

    def _read(self, worker: int) -> Sequence[Worked]:
        """The last slices of a worker, and the one that it is at work on, as far as it has said."""
        records = [worked_from_proto(step) for step in self._records.get(worker, ())]
        if worker in self._doing:
            said_at, report = self._doing[worker]
            silent = time.monotonic() - said_at
            if report.untold and silent < SILENT_S:  # the slices before the one under way come with the next report
                return records
            step = report.clock if self._job.consistency.mode is Mode.ASYNC else report.version
            # After a slice it waits for the next version.
            step += bool(records) and records[-1].step == step and report.phase in ("send", "wait", "receive")
            since = spent_from_proto(report.since)
            records.append(under_way(step, since, report.phase, silent, first=not report.slices))
        return records

    def _name(self, ident: int) -> str:
        member = self._job.members.get(ident)
        return member.name if member is not None else self._gone.get(ident, f"worker number {ident}")

    # ---- what people are shown

    def sentence(self) -> str:
        """About the step that waits now, or the last one that did; empty if there is none."""
        now = time.monotonic()
        waiting = [found for heard, stats in self._open.values() if (found := self._waits(heard, stats, now))]
        if waiting:
            return of_now(max(waiting, key=lambda found: found.waited))
        newest = self._judge.newest
        return of_step(newest) if newest is not None and now - newest.at < _SAID_S else ""

    def _waits(self, heard: float, stats: shard_pb2.StatsResponse, now: float) -> Open | None:
        """The open step of a shard, if it waits noticeably for a single worker."""
        waited = stats.open.last_s - stats.open.others_s + now - heard
        if not self._judge.noticed(waited):
            return None
        gaps = [(gap.start, gap.stop) for gap in stats.missing]
        owing = [
            worker
            for worker, lo, hi in self._dealt(stats.missing_of)
            if any(start < hi and lo < stop for start, stop in gaps)
        ]
        if len(owing) != 1 or len(gaps) != 1:
            return None
        said_at, report = self._doing.get(owing[0].ident, (now, coordinator_pb2.WorkerReport()))
        silent = now - said_at
        doing_s = report.phase_s + silent
        return Open(stats.open.step, owing[0].name, *gaps[0], waited, report.phase, doing_s, silent)

    def page(self) -> coordinator_pb2.Blame:
        """Everything that the status tells."""
        judge = self._judge
        held = sorted(self._held.items(), key=lambda item: -item[1][1])[:_HELD_SHOWN]
        stale = max(self._staleness.values(), key=lambda counts: counts.total(), default=Counter[int]())
        return coordinator_pb2.Blame(
            sentence=self.sentence(),
            chronic=judge.chronic,
            worst=[blamed_to_proto(blamed, time.time() - time.monotonic()) for blamed in judge.worst],
            held=[
                coordinator_pb2.HeldWorker(worker=worker, by=by, times=times, seconds=seconds)
                for (worker, by), (times, seconds) in held
            ],
            staleness=[stale[lag] for lag in range(max((lag for lag in stale if stale[lag]), default=-1) + 1)],
            steps=judge.steps,
            waited_s=judge.waited,
            usual_s=judge.usual_s,
        )


def _copy(step: coordinator_pb2.WorkerStep) -> coordinator_pb2.WorkerStep:
    """A record that does not keep the report around it in memory."""
    copy = coordinator_pb2.WorkerStep()
    copy.CopyFrom(step)
    return copy
