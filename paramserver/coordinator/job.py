"""One job as its coordinator knows it: where the job stands, its members, its end, and the parts that decide.

The RPCs are in `service`. Each part owns its fields, and names in a protocol the parts of the job that it uses.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import structlog

from paramserver.checkpoint.manifest import Manifest
from paramserver.coordinator.changes import Changes
from paramserver.coordinator.history.checkpoints import Checkpoints
from paramserver.coordinator.history.loads import Loads
from paramserver.coordinator.history.manifests import load_to_proto, manifest_of
from paramserver.coordinator.history.recovery import Recovery
from paramserver.coordinator.history.timeline import TimeLine, gone_of
from paramserver.coordinator.leadership.cluster import Connect, Servers, Shards
from paramserver.coordinator.leadership.journal import Journal
from paramserver.coordinator.leadership.keeping import Keeping
from paramserver.coordinator.leadership.members import JobRoll, member_to_record
from paramserver.coordinator.leadership.snapshots import Snapshots
from paramserver.coordinator.model import ModelRegistry
from paramserver.coordinator.options import JobOptions
from paramserver.coordinator.promises import Promises
from paramserver.coordinator.reports import Reports
from paramserver.coordinator.scaling import Scaling
from paramserver.coordinator.tasks import Tasks
from paramserver.coordinator.watching.audit import AuditWatch
from paramserver.coordinator.watching.blame import BlameWatch
from paramserver.coordinator.watching.course import Course
from paramserver.coordinator.watching.ending import Ending
from paramserver.coordinator.watching.idle import Idle
from paramserver.coordinator.watching.main import Main
from paramserver.coordinator.watching.poison import PoisonWatch
from paramserver.coordinator.watching.records import Records
from paramserver.coordinator.watching.stalls import Stalls
from paramserver.coordinator.watching.stuck import Stuck
from paramserver.coordinator.watching.tracing import Tracing
from paramserver.coordinator.watching.watch import Watch
from paramserver.coordinator.work.accounts import Accounting
from paramserver.coordinator.work.agreeing import Agreeing
from paramserver.coordinator.work.evaluating import Evaluating
from paramserver.coordinator.work.leasing import Leasing
from paramserver.coordinator.work.mode_change import ModeChange
from paramserver.coordinator.work.registered import Registered
from paramserver.coordinator.work.replication import Replication
from paramserver.coordinator.work.resizing import Resizing
from paramserver.coordinator.work.schedule import Schedule
from paramserver.core.job.events import Facts
from paramserver.core.job.holders import Holders
from paramserver.core.job.life import Counted, Ends, Life, Phase
from paramserver.core.job.membership import Membership, Role
from paramserver.core.job.seats import Seats
from paramserver.core.versions.consistency import Consistency
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.wire.messages import (
    consistency_to_proto,
    data_to_proto,
    mode_to_proto,
    origin_to_proto,
)

log = structlog.get_logger("paramserver.coordinator")

_IDENT_BITS = 16
_STATES = {
    Phase.WAITING: types_pb2.JOB_STATE_WAITING,
    Phase.INITIALISING: types_pb2.JOB_STATE_INITIALISING,
    Phase.RUNNING: types_pb2.JOB_STATE_RUNNING,
    Phase.RECOVERING: types_pb2.JOB_STATE_RECOVERING,
    Phase.FAILED: types_pb2.JOB_STATE_FAILED,
    Phase.STOPPED: types_pb2.JOB_STATE_STOPPED,
    Phase.DONE: types_pb2.JOB_STATE_DONE,
}


def _beginning() -> int:
    return secrets.randbits(63) | 1


async def _nothing() -> None:
    """There is no other coordinator to ask for."""


async def _so_it_is() -> bool:
    """There is no store to ask."""
    return True


class Job:
    """The state of one job, and its parts. All of it runs in one event loop."""

    def __init__(self, options: JobOptions, connect: Connect, journal: Journal) -> None:
        self.options = options
        # Where members and operators reach this coordinator; only shown.
        self.address = ""
        # The address of the page; empty: there is none.
        self.dashboard = ""
        self.began_at = time.monotonic()
        self.journal = journal
        self.servers, self.shards = Servers(connect), Shards(self)
        self.life = Life(options.consistency)
        # A random number that all coordinators of this job keep. Another job of the same name has another number.
        self.beginning = _beginning()
        # Servers that hold a shard of an earlier run are not let in.
        self.forgets = False
        self.term = journal.term
        # The highest earlier term that a server has heard of.
        self.known_term = 0
        # Set once: "done" (all workers have left, one of them at its end, and the last version is safe), "failed",
        # "stopped", "replaced" or "found".
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        # Called before each step that cannot be taken back: raises NotLeaderError if another coordinator leads by now.
        self.confirm: Callable[[], Awaitable[None]] = _nothing
        # Asks the store whether another coordinator leads, which a server has told. A store that is away is believed to
        # say so: servers refuse this coordinator's commands anyway.
        self.outranked: Callable[[], Awaitable[bool]] = _so_it_is
        self.promises = Promises()
        self.events = TimeLine()
        self.changes = Changes()
        self.tasks = Tasks()
        self.keeping = Keeping(self)
        self.records = Records(self)
        self._begin(journal.generation, self._first_ident())
        self.course = Course(self)
        self.scaling = Scaling(self)
        self.tracing = Tracing(self)
        # Members that are asked to leave; of them, those that are to be started again, and the servers whose shards
        # others have still to take over: these are not told yet.
        self.draining: set[int] = set()
        self.restarting: set[int] = set()
        self.moving: set[int] = set()

    def _begin(self, generation: int, first_ident: int, losses: int = 0) -> None:
        """Begin without members. ``generation``: the newest one so far; ``first_ident``: of the next member."""
        self.roll = JobRoll(self)
        self.members = Membership(self.options.lease_s, self.options.grace_s, generation, first_ident)
        self.seats = Seats(self.members)
        self.checkpoints = Checkpoints(self, self.options.checkpoints)
        self.records.tell(self.checkpoints.best.hear)
        self.recovery = Recovery(self)
        self.registry = ModelRegistry(self)
        self.schedule = Schedule(self)
        self.main = Main(self)
        self.leasing = Leasing(self)
        self.mode_change = ModeChange(self)
        self.replication = Replication(self)
        self.resizing = Resizing(self)
        self.snapshots = Snapshots(self)
        self.accounting = Accounting(self)
        self.watch = Watch(self)
        self.stalls = Stalls(self)
        self.reports = Reports(self, losses)
        self.blame = BlameWatch(self)
        self.idle = Idle(self)
        self.stuck = Stuck(self)
        self.poison = PoisonWatch(self)
        self.audit = AuditWatch(self)
        self.ending = Ending(self)
        self.loads = Loads(self)
        self.agreeing = Agreeing(self)
        self.evaluating = Evaluating(self)
        self.registered = Registered(self)

    def _first_ident(self) -> int:
        """The first member number of this term. The store may not know which numbers an earlier term has used.

        Member numbers have 32 bits: the term after 65,536 others begins with the numbers of the first one.
        """
        return ((max(self.term, 1) - 1) % (1 << _IDENT_BITS) << _IDENT_BITS) + 1

    # ---- facts

    @property
    def reason(self) -> str:
        """The reason for the phase, in words; empty if there is nothing to say."""
        return self.life.reason

    @property
    def timeline(self) -> int:
        """The number of the timeline. Each time that the job goes back or loads, another timeline begins."""
        return self.life.timeline

    @property
    def consistency(self) -> Consistency:
        """The setting that all shards have."""
        return self.life.consistency

    @property
    def holders(self) -> Holders:
        """The servers that hold the shards."""
        return self.replication.holders

    def worker_infos(self) -> list[types_pb2.WorkerInfo]:
        """The live workers, in the order of their places."""
        return [types_pb2.WorkerInfo(member=m.ident, rank=m.index, name=m.name) for m in self.main.places()]

    def view(self) -> types_pb2.View:
        """The view of the job that all members get."""
        return types_pb2.View(
            generation=self.members.generation,
            timeline=self.timeline,
            state=_STATES[self.life.phase],
            workers=self.worker_infos(),
            shards=self.shards.infos(),
            consistency=consistency_to_proto(self.consistency),
            sync_origin=origin_to_proto(self.schedule.origin),
            slices_per_step=self.options.step_slices,
            initialiser=self.registry.initialiser,
            grant=self.registry.grant,
            reason=self.reason,
            term=self.term,
            draining=sorted(self.draining - self.moving),
            restarting=sorted(self.restarting - self.moving),
            released=self.life.released,
            stalled=sorted(self.stalls.members),
            careful=self.poison.careful,
            poisoned=self.poison.refs(),
            checkpoints=self.checkpoints.place is not None,
            async_from=self.schedule.async_from,
            schedule_mode=mode_to_proto(self.schedule.mode),
            beginning=self.beginning,
            launched=self.options.launched,
            loading=self.loads.under_way is not None,
            placement=self.holders.number,
            shard_count=len(self.holders),
            carried_from=self.resizing.carried_from,
            main=self.main.member,
        )

    def record(self) -> coordinator_pb2.JobRecord:
        """The record with which another coordinator can take over."""
        record = coordinator_pb2.JobRecord(
            view=self.view(),
            settings=self.options.settings,
            expected_servers=self.options.servers,
            expected_workers=self.options.workers,
            members=[member_to_record(m) for m in (*self.seats.servers, *self.members.of(Role.WORKER))],
            next_member=self.members.next_ident,
            data=data_to_proto(self.schedule.data) if self.schedule.data else None,
            layout=self.registry.digest,
            ready=self.registry.ready,
            summary=self.life.summary,
            address=self.address,
            async_from=self.schedule.async_from,
            wanted=consistency_to_proto(self.mode_change.wanted) if self.mode_change.wanted is not None else None,
            checkpoint=self.checkpoints.last,
            rollbacks=self.recovery.count,
            steps_redone=self.recovery.steps_redone,
            wanted_workers=self.scaling.wanted,
            broken_promises=self.promises.broken,
            histories=self.options.checkpoints.holding.histories if self.options.checkpoints.holding else (),
            loaded=load_to_proto(self.loads.agreement.done),
            loading=load_to_proto(self.loads.under_way),
        )
        record.view.draining[:], record.view.restarting[:] = sorted(self.draining), sorted(self.restarting)
        self.reports.write(record)
        self.ending.write(record)
        self.poison.write(record)
        self.agreeing.write(record)
        self.registered.write(record)
        self.replication.write(record)
        self.resizing.write(record)
        record.events.extend(self.events.events())
        return record

    def _facts(self) -> Facts:
        """The facts from which the time line of events follows."""
        members = (*self.members.of(Role.SERVER), *self.members.of(Role.WORKER))
        return Facts(
            phase=self.life.phase.value,
            reason=self.reason,
            mode=str(self.consistency),
            checkpoint=self.checkpoints.last,
            rollbacks=self.recovery.count,
            takeovers=self.holders.takeovers,
            version=self.reports.newest_version(),
            members={member.name: member.ident for member in members},
            gone=gone_of(self.reports.departed()),
            asked=frozenset(self.draining),
            ended=self.ended,
        )

    def manifest(self, version: int, parts: Sequence[shard_pb2.CopyStatus]) -> Manifest:
        """The manifest of a version of which all shards have written their parts."""
        assert self.registry.model is not None
        return manifest_of(
            self.options, self.record(), self.registry.model, version, parts, self.registered.saved(version)
        )

    def write_down(self) -> None:
        """Write the present record to the store and to the servers, in the background."""
        self.events.look(self._facts())
        if self.journal.record(self.record(), None if self.life.released else self.registry.model):
            self.keeping.wake()

    def missing(self) -> str:
        """The members that the start of the job waits for, in words; empty if all are there."""
        return self.members.missing(self.options.servers, self.options.workers)

    @property
    def ended(self) -> bool:
        """Whether the job is done, has failed or was stopped."""
        return self.life.ended

    @property
    def given_up(self) -> bool:
        """Whether this coordinator has nothing more to do: the job has ended, or another coordinator leads it.

        False while the result of a job that is through, or was stopped, has still to be gathered.
        """
        return self.life.final or (self.over.done() and self.over.result() not in ("done", "stopped"))

    def members_present(self) -> bool:
        """Whether there is a worker or a server, or a server that may come back."""
        return bool(self.members.of(Role.WORKER) or self.seats.servers)

    # ---- changes

    async def refresh(self) -> None:
        """Work out where the job stands, write it down, and tell all members."""
        self.main.look()
        self.registry.look()
        counted = Counted(
            self.missing() or self.registry.waiting(), self.registry.model is not None, self.registry.ready
        )
        if self.life.handle(counted) and self.life.phase is Phase.RUNNING:
            self.reports.started()
            log.info("running", consistency=str(self.consistency), slices_per_step=self.options.step_slices)
            kept = self.options.checkpoints
            if self.options.residuals and kept.place and not (kept.every or kept.every_s):
                log.warning(
                    "with this training.push_compression a worker that joins, leaves or dies sends the job back to "
                    "its last checkpoint, which is the beginning: set checkpoint.every (see docs/compression.md)"
                )
        self.write_down()
        await self.changes.notify()

    def has_servers(self, servers: int) -> None:
        """So many servers hold the model from now on."""
        self.options = replace(self.options, servers=servers)

    def reopen_mode_change(self) -> None:
        """Mode and staleness can be changed again, on the present timeline; the change before was closed."""
        self.mode_change = self.mode_change.successor()

    # ---- the end

    async def fail(self, reason: str, exit_code: int = 1) -> None:
        """End the job as failed."""
        if not self.ended:
            log.error("job failed", reason=reason)
            await self.conclude(Ends(Phase.FAILED, reason, exit_code=exit_code))
            self.end("failed")

    async def conclude(self, end: Ends) -> None:
        """The job has ended: write it down, and tell all members."""
        self.life.handle(end)
        await self.refresh()

    def end(self, how: str) -> None:
        """Tell the process of this coordinator how the job ended; the first call counts."""
        if not self.over.done():
            self.over.set_result(how)

    async def replaced(self, reason: str) -> None:
        """Step down, since another coordinator leads the job."""
        if not self.over.done():
            log.warning("this coordinator steps down", reason=reason)
            self.end("replaced")

    async def close(self) -> None:
        """End all sessions and tasks, close all channels, and write the last state."""
        # Another coordinator may go on with a job that has not ended: it hears the values of open steps again.
        if self.ended or not self.members.of(Role.WORKER):
            self.records.finish()
        await self.changes.close()
        await self.tasks.close()
        await self.mode_change.close()
        await self.servers.close()
        await self.journal.close()

    def restore(self, record: coordinator_pb2.JobRecord) -> None:
        """Go on from the record of an earlier coordinator; its members and the phase follow later."""
        self.options = replace(self.options, servers=record.expected_servers, workers=record.expected_workers)
        self.beginning = record.view.beginning or self.beginning
        self.life.restore(record.view.timeline)
        self.schedule.restore(record)
        self.ending.restore(record)
        self.main.restore(record)
        self.checkpoints.restore(record.checkpoint)
        self.recovery.restore(record)
        self.scaling.restore(record)
        self.promises.restore(record)
        self.events.restore(record)
        self.reports.restore(record)
        self.poison.restore(record)
        self.agreeing.restore(record.agreed)
        self.registered.restore(record.registered)
        self.loads.restore(record.loaded)
        self.mode_change.restore(record)
        self.replication.restore(record)
        self.resizing.restore(record)
        self.draining, self.restarting = set(record.view.draining), set(record.view.restarting)
        # The record may say that others have the shards, and these may not have heard of it yet: they are told again.
        leaving = (entry for entry in record.members if entry.member in self.draining)
        self.moving = {one.member for one in leaving if one.role == types_pb2.ROLE_SERVER}

    def heard_of(self, term: int) -> None:
        """A server has heard of a coordinator of this term."""
        self.known_term = max(self.known_term, term)

    async def begin_again(self, record: coordinator_pb2.JobRecord) -> None:
        """Begin from the start, since nothing of the recorded run can be used.

        No number of that run is used again, and its servers are not let in.
        """
        self.beginning, self.forgets = _beginning(), True
        self._begin(record.view.generation + 1, max(record.next_member, self._first_ident()), self.reports.losses)
        # After the mode change was made, which goes on counting from the revision in force.
        self.life.begin_again(record.view.timeline + 1, self.options.consistency)
        await self.refresh()
