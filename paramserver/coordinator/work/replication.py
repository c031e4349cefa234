"""Replicated shards: which server holds which shard, and telling the servers.

`core/job/holders.py` decides. What it decides is written down before any server hears of it, so that another
coordinator goes on with it. Each server is told separately, until it has heard of the newest placement: a server that
hangs delays no other one.
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
from paramserver.core.job.holders import (
    PATIENCE_S,
    Backup,
    Balance,
    BegunAnew,
    CaughtUp,
    Effect,
    Event,
    Held,
    Holders,
    Promote,
    Retires,
    ServerGone,
    ServersThere,
)
from paramserver.core.job.membership import Member, Role
from paramserver.failpoints import reach
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
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

    def shard_infos(self) -> list[types_pb2.ShardInfo]: ...

    def write_down(self) -> None: ...


class Replication:
    """The placement of the job's shards, and which server has heard of which placement."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self.holders = Holders.plan(job.options.servers, job.options.replicas)
        # Whether backups are made: all shards are at their primaries, and published.
        self._begun = False
        # By member number, the placement that a server was told last.
        self._told: dict[int, int] = {}
        # Member numbers of servers with a backup of which they have not heard: it was made ready meanwhile.
        self._outdated: set[int] = set()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        # (shard, member number) to the number since when it is a backup, once it was told so.
        self._configured: dict[tuple[int, int], int] = {}
        # When a server was lost that has not been replaced.
        self._lacks_since: float | None = None

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
        self.holders = Holders.plan(record.expected_servers, self._job.options.replicas)
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
        counts = self._begun and not self._job.given_up
        covered = counts and self.holders.covered(member.index, present)
        self._told.pop(member.ident, None)
        self._outdated.discard(member.ident)
        for key in [key for key in self._configured if key[1] == member.ident]:
            del self._configured[key]
        if counts:
            reach("coord.before_promotion")
            self._handle(ServerGone(member.index, present))
            self._lacks_since = time.monotonic()
        return covered

    async def retire(self, server: Member) -> None:
        """Let other servers take over all shards of this one; return when they know.

        Raises ConfigError if that cannot be.
        """
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
        if not self._begun or not self.holders.covered(server.index, present):
            raise errors.ConfigError(
                f"{server.name} holds a part of the model of which no other server has a copy just now: wait until "
                "`paramserver status` shows all shards as replicated"
            )
        self._handle(Retires(server.index, present))
        number = self.holders.number
        deadline = time.monotonic() + self._job.options.call_timeout_s
        while any(self._told.get(one.ident, -1) < number for one in self._successors(server)):
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
        if self._begun:
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
        if self._begun and trains:
            self._handle(Balance(self._present()))

    def look(self) -> None:
        """A server that was lost has not come back for a while: find other backups."""
        if self._lacks_since is not None and time.monotonic() - self._lacks_since > PATIENCE_S:
            self._lacks_since = None
            self.server_there()

    # ---- timelines

    def pause(self, stay: bool) -> None:
        """Another timeline begins, and no backup counts. ``stay``: primaries stay where they are."""
        self._begun = False
        self._configured.clear()
        self._told.clear()
        self._outdated.clear()
        self.holders.handle(BegunAnew(stay))

    def begin(self) -> None:
        """All primaries have published a version: make backups of all shards."""
        if not self._begun:
            self._begun = True
            self.server_there()
            self.wake()

    def adopt(self, holders: Holders) -> None:
        """Another number of servers holds the model: all shards have their backups, and servers know."""
        self.holders = holders
        members = self._job.members.of(Role.SERVER)
        self._told = {server.ident: holders.number for server in members}
        self._configured.clear()
        self._outdated.clear()
        self._lacks_since = None

    async def take_over(self, gone: Sequence[Member]) -> None:
        """Go on from an earlier coordinator. The servers ``gone`` do not answer, and others have their shards.

        Raises what the calls to servers raise.
        """
        for server in gone:
            self._job.members.forget(server.ident)
            for effect in self.holders.handle(ServerGone(server.index, self._present())):
                self._say(effect)
        if self.holders.replicas:
            await asyncio.gather(*(self._tell(server) for server in self._job.members.of(Role.SERVER)))

    async def all_whole(self) -> None:
        """Wait until each backup has all of its shard, or is gone."""
        while self._begun and not self._job.given_up and self.holders.catching_up(self._present()):
            await self._job.changes.wait(time.monotonic() + 1.0)

    # ---- telling servers

    def _handle(self, event: Event) -> None:
        number = self.holders.number
        effects = self.holders.handle(event)
        for effect in effects:
            self._say(effect)
        if self.holders.number != number:
            self._job.write_down()
            self.wake()
            self._job.tasks.begin(self._job.changes.notify())

    def _say(self, effect: Effect) -> None:
        if isinstance(effect, Promote):
            log.info("another server is the primary of a shard", shard=effect.shard, server=f"server-{effect.server}")

    def wake(self) -> None:
        """Tell servers the newest placement in the background, each of them until it has heard of it."""
        for server in self._job.members.of(Role.SERVER):
            task = self._tasks.get(server.ident)
            if self._lacks(server) and (task is None or task.done()):
                self._tasks[server.ident] = self._job.tasks.begin(self._inform(server))

    def _lacks(self, server: Member) -> bool:
        """Whether this server has still to hear of the present placement."""
        job = self._job
        if not self._begun or not self.holders.replicas or job.recovery.under_way or job.given_up:
            return False
        if server.ident not in job.members:
            return False
        return server.ident in self._outdated or self._told.get(server.ident) != self.holders.number

    async def _inform(self, server: Member) -> None:
        while self._lacks(server):
            number = self.holders.number
            await self._job.journal.settled()
            try:
                await self._configure(server)
                self._outdated.discard(server.ident)
                await self._tell(server)
                self._told[server.ident] = number
            except errors.FencedError as error:
                self._outdated.add(server.ident)
                if self._job.recovery.under_way:
                    return
                await self._job.replaced(str(error))
                return
            except errors.ParamServerError as error:
                self._outdated.add(server.ident)
                log.info("a server has not heard of the placement of shards", error=str(error))
                await asyncio.sleep(_RETRY_S)

    async def _configure(self, server: Member) -> None:
        """Make the server a backup of the shards that it is to catch up with."""
        job = self._job
        for shard in range(len(self.holders)):  # whose holders may change while a server is asked
            backup = self.holders.shards[shard].backup(server.index) if self._begun else None
            if backup is None or backup.whole or self._configured.get((shard, server.ident)) == backup.since:
                continue
            request = job.registry.configuration(shard)
            request.anew = request.backup = True
            await job.servers.call(server, shard, "Shard.Configure", request, job.options.call_timeout_s)
            self._configured[shard, server.ident] = backup.since
            if (primary := self._member(self.holders.shards[shard].primary)) is not None:  # it may bring the shard now
                self._outdated.add(primary.ident)
                self.wake()

    async def _tell(self, server: Member) -> None:
        """Tell a server of which shards it is the primary, and which backups these have."""
        job, peers = self._job, self._job.shard_infos()

        def request(shard: int) -> shard_pb2.SetHoldersRequest:
            return shard_pb2.SetHoldersRequest(
                job=job.options.job,
                timeline=job.timeline,
                term=job.term,
                placement=self.holders.number,
                primary=True,
                backups=self._places(shard),
                peers=peers,
                consistency=consistency_to_proto(job.mode_change.agreed),
                repair_mbps=job.options.repair_mbps if job.registry.ready else 0.0,
            )

        places = self.holders.places(server)
        await job.servers.call_all(
            places, "Shard.SetHolders", request, shard_pb2.SetHoldersResponse, job.options.call_timeout_s
        )

    def _places(self, shard: int) -> list[shard_pb2.BackupPlace]:
        places = []
        for one in self.holders.shards[shard].backups:
            member = self._member(one.server)
            if member is None:
                continue
            if one.whole or self._configured.get((shard, member.ident)) == one.since:
                address = self._job.servers.address(member, shard)
                places.append(shard_pb2.BackupPlace(address=address, since=one.since))
        return places

    def _present(self) -> list[int]:
        """The servers that hold shards, or may. A server that comes for a change of their number holds none before."""
        servers = self._job.options.servers
        return [server.index for server in self._job.members.of(Role.SERVER) if server.index < servers]

    def _member(self, index: int) -> Member | None:
        return next((server for server in self._job.members.of(Role.SERVER) if server.index == index), None)

    def _server_at(self, shard: int, address: str) -> Member | None:
        servers = self._job.members.of(Role.SERVER)
        return next((one for one in servers if self._job.servers.address(one, shard) == address), None)
