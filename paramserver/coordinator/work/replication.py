"""Replicated shards: which server holds which shard, and telling the servers.

`core/job/holders.py` decides who holds what, `core/procedures/placing.py` which server is told what and when. Here that
is done. Each server is told separately: a server that hangs delays no other one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

import structlog

from paramserver import errors
from paramserver.coordinator import ports
from paramserver.coordinator.leadership.cluster import Servers
from paramserver.coordinator.leadership.journal import Journal
from paramserver.coordinator.work.mode_change import ModeChange
from paramserver.core.job.held import Backup, Held
from paramserver.core.job.holders import Balance, CaughtUp, Holders, Promote, Retires, ServerGone, ServersThere
from paramserver.core.job.membership import Member, Role
from paramserver.core.procedures import placing
from paramserver.core.procedures.placing import (
    Changed,
    Command,
    Done,
    Failed,
    MakeReady,
    Rest,
    StepDown,
    Tell,
    WriteDown,
)
from paramserver.failpoints import reach
from paramserver.v1 import coordinator_pb2, shard_pb2
from paramserver.wire.messages import consistency_to_proto

log = structlog.get_logger("paramserver.coordinator")

_RETRY_S, _LOOK_S = 0.1, 0.02


class _Registry(Protocol):
    """See `coordinator.model`."""

    ready: bool

    def configuration(self, shard: int) -> shard_pb2.ConfigureRequest: ...


class _Job(ports.Stage, ports.Ends, Protocol):
    journal: Journal
    servers: Servers
    term: int
    over: asyncio.Future[str]

    @property
    def registry(self) -> _Registry: ...

    @property
    def recovery(self) -> ports.GoingBack: ...

    @property
    def mode_change(self) -> ModeChange: ...

    @property
    def resizing(self) -> ports.Resizing: ...

    @property
    def given_up(self) -> bool: ...

    @property
    def shards(self) -> ports.Shards: ...

    def write_down(self) -> None: ...


class Replication:
    """The placement of the job's shards, and which server has heard of which placement."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._core = placing.Placing(Holders.plan(job.options.servers, job.options.replicas))

    @property
    def holders(self) -> Holders:
        """The placement."""
        return self._core.holders

    # ---- the record

    def write(self, record: coordinator_pb2.JobRecord) -> None:
        """Write the placement into the record of the job."""
        record.promotions = self.holders.promotions
        record.takeovers, record.repairs, record.hurt = (
            self.holders.takeovers,
            self.holders.repairs,
            self.holders.hurt,
        )
        for held in self.holders.shards:
            backups = [
                coordinator_pb2.BackupRecord(server=one.server, since=one.since, whole=one.whole)
                for one in held.backups
            ]
            record.holders.add(primary=held.primary, backups=backups, lost=held.lost)

    def restore(self, record: coordinator_pb2.JobRecord) -> None:
        """Go on from the record of an earlier coordinator."""
        self._core = placing.Placing(Holders.plan(record.expected_servers, self._job.options.replicas))
        if record.holders:
            shards = [
                Held(
                    held.primary,
                    tuple(Backup(one.server, one.since, one.whole) for one in held.backups),
                    held.lost,
                )
                for held in record.holders
            ]
            self.holders.restore(
                record.view.placement, record.promotions, shards, record.takeovers, record.repairs, record.hurt
            )

    # ---- servers come and go

    def server_gone(self, member: Member) -> bool:
        """A server is a member no more. True if other servers have all of its shards, and have taken its place."""
        present = self._present()
        counts = self._core.begun and not self._job.given_up
        covered = counts and self.holders.covered(member.index, present)
        if counts:
            reach("coord.before_promotion")
            self._handle(ServerGone(member.index, present))
        return covered

    def check_retires(self, server: Member) -> list[int]:
        """The servers that can take over all shards of this one. Raises ConfigError if that cannot be."""
        if not self.holders.replicas:
            raise errors.ConfigError(
                f"{server.name} holds a part of the model of which there is no copy (cluster.replicas is 0), so it "
                "cannot leave while the job runs"
            )
        if self._job.resizing.under_way:
            raise errors.ConfigError(f"the number of servers changes just now: drain {server.name} when that is done")
        if self.holders.retiring - {server.index}:
            other = ", ".join(f"server-{index}" for index in sorted(self.holders.retiring))
            raise errors.ConfigError(f"{other} is about to leave: drain {server.name} when that is done")
        present = [index for index in self._present() if index != server.index]
        if not self._core.begun or not self.holders.covered(server.index, present):
            raise errors.ConfigError(
                f"{server.name} holds a part of the model of which no other server has a copy just now: wait until "
                "`paramserver status` shows all shards as replicated"
            )
        return present

    async def retire(self, server: Member) -> None:
        """Let other servers take over all shards of this one; return when they know.

        Raises ConfigError if that cannot be, DeadlineError.
        """
        self._handle(Retires(server.index, self.check_retires(server)))
        number = self.holders.number
        deadline = time.monotonic() + self._job.options.call_timeout_s
        while any(self._core.heard(one.ident) < number for one in self._successors(server)):
            if not await self._job.changes.wait(min(deadline, time.monotonic() + _LOOK_S)) and (
                time.monotonic() > deadline
            ):
                raise errors.DeadlineError(f"other servers have not taken over the shards of {server.name} yet")

    async def settled(self, deadline: float) -> None:
        """Wait until all servers are there, and all shards have their backups. ``deadline``: monotonic seconds."""
        while len(self._present()) < self._job.options.servers or not self.holders.settled(self._present()):
            missing = self._job.options.servers - len(self._present())
            if not await self._job.changes.wait(deadline):
                raise errors.DeadlineError(
                    f"{missing} of {self._job.options.servers} servers are missing; start them again"
                    if missing
                    else "all servers are there, but not all shards have backups again yet"
                )

    def _successors(self, server: Member) -> list[Member]:
        servers = self._job.members.of(Role.SERVER)
        return [one for one in servers if one.ident != server.ident and self.holders.places(one)]

    def server_there(self) -> None:
        """A server has come."""
        self._handle(ServersThere(self._present()))

    def hear(self, reports: Sequence[shard_pb2.StatsResponse]) -> None:
        """A server reports about its shards."""
        for report in reports:
            if report.backup or not report.backups or report.shard >= len(self.holders):
                continue
            for status in report.backups:
                server = self._server_at(report.shard, status.place.address)
                if status.whole and server is not None:
                    self._handle(CaughtUp(report.shard, server.index, status.place.since))
        # Nothing moves while the result is gathered, or while all shards move.
        job = self._job
        trains = job.registry.ready and not (job.over.done() or job.recovery.under_way or job.resizing.under_way)
        if self._core.begun and trains:
            self._handle(Balance(self._present()))

    def look(self) -> None:
        """Tell servers what they lack. If a lost server has not come back for a while, find other backups."""
        self._handle(placing.Look(self._present()))

    # ---- timelines

    def pause(self, stay: bool) -> None:
        """Another timeline begins, and no backup counts. ``stay``: primaries stay where they are."""
        self._core.pause(stay)

    def begin(self) -> None:
        """All primaries have published a version: make backups of all shards."""
        self._handle(placing.Begins(self._present()))

    def adopt(self, holders: Holders) -> None:
        """Another number of servers holds the model: all shards have their backups, and servers know."""
        self._core.adopt(holders, [server.ident for server in self._job.members.of(Role.SERVER)])

    async def take_over(self, gone: Sequence[Member]) -> None:
        """Go on from an earlier coordinator. The servers ``gone`` do not answer, and others have their shards.

        Raises what the calls to servers raise.
        """
        for server in gone:
            self._job.members.forget(server.ident)
            for effect in self.holders.handle(ServerGone(server.index, self._present())):
                self._perform(effect)
        if self.holders.replicas:
            facts = self._facts()
            await asyncio.gather(*(self._tell(self._core.tell(ident, facts)) for ident in facts.servers))

    async def all_whole(self) -> None:
        """Wait until each backup has all of its shard, or is gone."""
        while self._core.begun and not self._job.given_up and self.holders.catching_up(self._present()):
            await self._job.changes.wait(time.monotonic() + 1.0)

    # ---- telling servers

    def _facts(self) -> placing.Facts:
        job = self._job
        servers = {server.ident: server.index for server in job.members.of(Role.SERVER)}
        return placing.Facts(servers, time.monotonic(), halted=job.recovery.under_way or job.given_up)

    def _handle(self, event: placing.Event) -> None:
        for command in self._core.handle(event, self._facts()):
            self._perform(command)

    def _perform(self, command: Command) -> None:
        job = self._job
        match command:
            case WriteDown() | MakeReady() | Tell() | Rest():
                job.tasks.begin(self._ask(command))
            case Changed():
                job.write_down()
                job.tasks.begin(job.changes.notify())
            case StepDown(reason):
                job.tasks.begin(job.replaced(reason))
            case Promote(shard, server):
                log.info("another server is the primary of a shard", shard=shard, server=f"server-{server}")

    async def _ask(self, command: placing.ToServer) -> None:
        """Perform a command for one server, and report how that ended."""
        event: Done | Failed = Done(command.server)
        try:
            match command:
                case WriteDown():
                    await self._job.journal.settled()
                case MakeReady():
                    await self._make_ready(command)
                case Tell():
                    await self._tell(command)
                case Rest(_, text):
                    log.info("a server has not heard of the placement of shards", error=text)
                    await asyncio.sleep(_RETRY_S)
        except errors.ParamServerError as error:
            event = Failed(command.server, str(error), fenced=isinstance(error, errors.FencedError))
        except Exception as error:  # the top of a task: the server must not be left alone for ever
            log.exception("a server could not be told of the placement of shards")
            event = Failed(command.server, str(error))
        self._handle(event)

    async def _make_ready(self, command: MakeReady) -> None:
        job = self._job
        server = job.members.get(command.server)
        if server is not None:
            request = job.registry.configuration(command.shard)
            request.anew = request.backup = True
            await job.servers.call(server, command.shard, "Shard.Configure", request, job.options.call_timeout_s)

    async def _tell(self, command: Tell) -> None:
        job, peers = self._job, self._job.shards.infos()
        server = job.members.get(command.server)
        if server is None:
            return

        def request(shard: int) -> shard_pb2.SetHoldersRequest:
            return shard_pb2.SetHoldersRequest(
                job=job.options.job,
                timeline=job.timeline,
                term=job.term,
                placement=command.number,
                primary=True,
                backups=self._places(shard, command.shards[shard]),
                peers=peers,
                consistency=consistency_to_proto(job.mode_change.agreed),
                repair_mbps=job.options.repair_mbps if job.registry.ready else 0.0,
            )

        places = [(shard, server) for shard in command.shards]
        await job.servers.call_all(
            places, "Shard.SetHolders", request, shard_pb2.SetHoldersResponse, job.options.call_timeout_s
        )

    def _places(self, shard: int, backups: Sequence[Backup]) -> list[shard_pb2.BackupPlace]:
        members = {server.index: server for server in self._job.members.of(Role.SERVER)}
        return [
            shard_pb2.BackupPlace(address=self._job.servers.address(members[one.server], shard), since=one.since)
            for one in backups
            if one.server in members
        ]

    def _present(self) -> list[int]:
        """The servers that hold shards, or may. A server that comes for a change of their number holds none before."""
        servers = self._job.options.servers
        return [server.index for server in self._job.members.of(Role.SERVER) if server.index < servers]

    def _server_at(self, shard: int, address: str) -> Member | None:
        servers = self._job.members.of(Role.SERVER)
        return next((one for one in servers if self._job.servers.address(one, shard) == address), None)
