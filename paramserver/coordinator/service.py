"""The RPCs of the coordinator: who is a member, which server holds what, which worker leases which slice.

Never on the path of a tensor. In a steady state a step needs nothing from here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import structlog
from google.protobuf.message import Message

from paramserver import errors
from paramserver.coordinator.accounts import account
from paramserver.coordinator.admission import admit_server, check_join
from paramserver.coordinator.board import Board
from paramserver.coordinator.checkpoints import CheckpointOptions, Checkpoints
from paramserver.coordinator.cluster import Connect, Servers
from paramserver.coordinator.journal import Journal
from paramserver.coordinator.leasing import Leasing
from paramserver.coordinator.model import ModelRegistry
from paramserver.coordinator.recovery import Recovery
from paramserver.coordinator.scaling import Scaling
from paramserver.coordinator.stalls import Stalls
from paramserver.coordinator.toggle import Toggle
from paramserver.coordinator.watch import Watch
from paramserver.core.consistency import Consistency
from paramserver.core.membership import (
    Admitted,
    Disconnected,
    Effect,
    Ended,
    Event,
    GenerationRose,
    Joined,
    Left,
    Member,
    Membership,
    Presence,
    Removed,
    Renewed,
    Role,
    Tick,
)
from paramserver.core.ranges import complement
from paramserver.core.slices import SyncSchedule
from paramserver.failpoints import reach
from paramserver.transport.messages import (
    PROTOCOL,
    consistency_to_proto,
    data_from_proto,
    data_to_proto,
    origin_to_proto,
)
from paramserver.transport.session import versions
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2

log = structlog.get_logger("paramserver.coordinator")

_ROLES = {
    types_pb2.ROLE_WORKER: Role.WORKER,
    types_pb2.ROLE_SERVER: Role.SERVER,
    types_pb2.ROLE_OBSERVER: Role.OBSERVER,
}
_ENDED = (types_pb2.JOB_STATE_FAILED, types_pb2.JOB_STATE_DONE, types_pb2.JOB_STATE_STOPPED)
_TICK_S = 0.2
_RETRY_S = 0.5
_IDENT_BITS = 16


async def _nothing() -> None:
    """There is nobody else."""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What the coordinator is told about the job. ``slices_per_step`` 0: the number of workers it starts with."""

    job: str
    servers: int
    workers: int
    consistency: Consistency
    slices_per_step: int = 0
    seed: int = 0
    lease_s: float = 5.0
    grace_s: float = 1.0
    # How long a worker that lives may get nowhere; 0: for ever.
    stall_s: float = 8.0
    call_timeout_s: float = 30.0
    # How long the members of the start are waited for; 0: for ever.
    join_timeout_s: float = 0.0
    # How long a job waits when a server, or every worker, is gone.
    max_idle_s: float = 600.0
    # By dotted name, as text: the settings that members take over.
    settings: Mapping[str, str] = field(default_factory=dict)
    # There is a launcher that starts and ends workers.
    launched: bool = False
    # How members talk to each other, for status pages.
    security: str = "plain"
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)


class CoordinatorService:
    """One job. Lives in one event loop; :meth:`start` and :meth:`close` bracket its background work."""

    def __init__(self, options: JobOptions, connect: Connect, journal: Journal) -> None:
        self.options = options
        # Where others reach it; only shown.
        self.address = ""
        self.journal = journal
        self.servers = Servers(connect)
        self.state: types_pb2.JobState = types_pb2.JOB_STATE_WAITING
        self.reason = ""
        self.timeline = 0
        self.term = journal.term
        # The highest term that servers have heard of before this one.
        self.known_term = 0
        self.summary = ""
        # The job has ended, and nobody needs the servers any more.
        self.released = False
        # With which a coordinator of this job ends.
        self.exit_code = 0
        # Some worker has been through all epochs.
        self.finished = False
        # Set once: "done" (all workers have left, one of them after its last epoch), "failed", "stopped", "replaced".
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        # Raises NotLeaderError if another coordinator leads by now; asked before what cannot be taken back.
        self.confirm: Callable[[], Awaitable[None]] = _nothing
        self.consistency = options.consistency
        self.origin = SyncSchedule(0, self.slices_per_step)
        # The version with which asynchronous mode began, if the job is asynchronous.
        self.async_from = 0
        self.lost: list[str] = []
        self.members = Membership(options.lease_s, options.grace_s, journal.generation, self._first_ident())
        self.checkpoints = Checkpoints(self, options.checkpoints)
        self.recovery = Recovery(self)
        self.registry = ModelRegistry(self)
        self.leasing = Leasing(self)
        self.toggle = Toggle(self)
        self.board = Board(self)
        self.watch = Watch(self)
        self.stalls = Stalls(self)
        self.scaling = Scaling(self)
        self.draining: set[int] = set()
        self._changed = asyncio.Condition()
        self._edition = 0
        self._closed = False
        self._ticker: asyncio.Task[None] | None = None
        self._spreading = asyncio.Lock()
        # What goes on although the call that began it has ended.
        self._loose: set[asyncio.Task[None]] = set()

    def _first_ident(self) -> int:
        """Member numbers of one term are none of another's: the store may not have heard of the last ones."""
        return (max(self.term, 1) - 1 << _IDENT_BITS) + 1

    @property
    def slices_per_step(self) -> int:
        """How many slices a synchronous step has; it does not change while the job runs."""
        return self.options.slices_per_step or self.options.workers

    def done_synchronously(self) -> tuple[int, list[tuple[int, int]]]:
        """Where asynchronous mode began: (epoch, its ranges of slices that were done by then)."""
        data = self.leasing.data
        if data is not None and data.slice_size:
            epoch, remaining = self.origin.position(self.async_from)
            return epoch, complement(remaining, data.slices_per_epoch)
        used = self.async_from * self.slices_per_step
        return 0, [(0, used)] if used else []

    async def start(self) -> None:
        """Begin to watch leases."""
        self._ticker = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """End all sessions, stop watching, close channels, write the last state."""
        self._closed = True
        await self._notify()
        background = [task for task in (self._ticker, *self._loose) if task is not None]
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await self.toggle.close()
        await self.servers.close()
        await self.journal.close()

    # ---- joining and leaving

    async def join(self, request: coordinator_pb2.JoinRequest) -> coordinator_pb2.JoinResponse:
        """Admit a process. Refused: another protocol, another mode, an address that cannot be reached, one too many."""
        role = _ROLES.get(request.role)
        if role is None:
            raise errors.ProtocolError(f"unknown role number {request.role}")
        check_join(self, request, role)
        await self._ended(role, request.replaces)
        member = self._known(role, request.incarnation) or await self._admit(request, role)
        return coordinator_pb2.JoinResponse(
            member=member.ident,
            name=member.name,
            rank=member.index,
            job=self.options.job,
            lease_s=self.options.lease_s,
            view=self.view(),
            expected_workers=self.options.workers,
        )

    def _known(self, role: Role, incarnation: int) -> Member | None:
        """The member that this process is already: it asks again, since the answer got lost."""
        return next((m for m in self.members.of(role) if m.incarnation == incarnation != 0), None)

    async def _ended(self, role: Role, pid: int) -> None:
        """A newcomer comes in place of a process that has ended: nobody need wait until that is given up for lost."""
        for member in self.members.of(role):
            if member.pid == pid != 0 and member.presence is Presence.SILENT:
                await self._happen(Ended(member.ident))

    async def _admit(self, request: coordinator_pb2.JoinRequest, role: Role) -> Member:
        index = request.index if request.HasField("index") else None
        if role is Role.SERVER:
            await self.servers.dial_back(
                request.address, shard_pb2.StatsRequest(job=self.options.job), self.options.call_timeout_s
            )
            index = await admit_server(self, request, index)
        event = Joined(role, index, request.address, request.pid, request.incarnation)
        effects = self.members.handle(event, time.monotonic())
        member = next(effect.member for effect in effects if isinstance(effect, Admitted))
        if role is Role.SERVER:
            if not request.holds and self.registry.model is not None and self.recovery.possible:
                self.recovery.begin(f"{member.name} has begun anew", member.ident)
            elif request.holds and request.timeline != self.timeline:
                self.recovery.begin(f"{member.name} came back from an older timeline", member.ident)
        await self._carry_out(effects)
        if role is Role.SERVER:
            self.toggle.server_back(member)
        log.debug("joined", name=member.name, pid=request.pid, address=request.address)
        return member

    async def session(
        self, requests: AsyncIterator[coordinator_pb2.SessionRequest]
    ) -> AsyncIterator[coordinator_pb2.SessionResponse]:
        """Reports up, the view down whenever it changes. The end of the stream is the end of the lease's grace."""
        first = await anext(aiter(requests), None)
        if first is None:
            return
        ident = first.member
        if ident not in self.members:
            raise errors.NotMemberError("this process is not a member (its lease ended): join again")
        await self._hear(first)
        reader = asyncio.create_task(self._read(requests, ident))
        try:
            edition = -1
            while True:
                edition = await self._wait_edition(edition)
                if reader.done() or ident not in self.members:
                    return
                yield coordinator_pb2.SessionResponse(view=self.view())
        finally:
            reader.cancel()
            # First of all, since the transport may cancel this call while it waits for the reader.
            if ident in self.members:
                await self._happen(Disconnected(ident))
            await asyncio.gather(reader, return_exceptions=True)

    async def _wait_edition(self, seen: int) -> int:
        """Wait until the view is another than the one of edition ``seen``; the end of a session counts, too."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._edition != seen or self._closed)
            if self._edition == seen:  # who stays tied to this one would never hear of another
                raise errors.NotLeaderError("this coordinator leads the job no more")
            return self._edition

    async def _read(self, requests: AsyncIterator[coordinator_pb2.SessionRequest], ident: int) -> None:
        try:
            async for request in requests:
                if request.member != ident:
                    raise errors.ProtocolError("a session speaks for one member only")
                await self._hear(request)
        finally:
            await self._notify()

    async def _hear(self, request: coordinator_pb2.SessionRequest) -> None:
        await self._happen(Renewed(request.member))
        self.board.hear(request)
        member = self.members.get(request.member)
        if request.HasField("worker") and member is not None:
            self.stalls.hear(member, request.worker)
        if request.HasField("server") and member is not None:
            self.checkpoints.hear(member.index, request.server)
        if request.server.term > self.term:
            await self.replaced(f"a server follows a newer coordinator (term {request.server.term})")
        if request.leaving:
            await self.confirm()
            member = self.members.get(request.member)
            if member is not None and member.role is Role.WORKER:
                self.finished = self.finished or request.finished
                if request.failure:
                    log.warning("a worker's script failed", worker=member.name, reason=request.failure)
            await self._happen(Left(request.member))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                await self._happen(Tick())
                await self.watch.look()
                await self.stalls.look()
                self.checkpoints.look()
                if self.journal.fenced.is_set():
                    await self.replaced("the store says that another coordinator leads the job now")
            except Exception:  # the top of a task: watching goes on
                log.exception("tick failed")

    async def _happen(self, event: Event) -> None:
        await self._carry_out(self.members.handle(event, time.monotonic()))

    async def _carry_out(self, effects: list[Effect]) -> None:
        """Perform them to the end, even if the caller is cancelled: the others must hear of every change."""
        if effects:
            await asyncio.shield(self.loosely(self._perform(effects)))

    def loosely(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Work that goes on although the call that began it may end; stopped when the service closes."""
        task = asyncio.create_task(work)
        self._loose.add(task)
        task.add_done_callback(self._loose.discard)
        return task

    async def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Removed(member, lost, reason):
                    await self._removed(member, lost, reason)
                case GenerationRose(generation, reason):
                    log.debug("generation", number=generation, reason=reason)
                    reach("coord.before_generation")
                    await self._membership_changed()
                    reach("coord.after_generation")

    async def _removed(self, member: Member, lost: bool, reason: str) -> None:
        self.board.removed(member, lost)
        if lost and member.role is not Role.OBSERVER:
            self.lost.append(member.name)
        if member.role is Role.SERVER:
            await self.servers.forget(member.ident)
            if self.registry.model is not None and (
                lost or (self.recovery.possible and not (self.ended or self.over.done()))
            ):
                self.watch.server_lost(member, reason)
            elif self.registry.model is not None and self.members.of(Role.WORKER):
                await self.fail(f"{reason}; its shard of the model is gone")
        if member.role is Role.WORKER:
            self.leasing.give_back(member.ident)
            self.stalls.gone(member.ident)
            self.registry.worker_gone(member.ident)
            self.draining.discard(member.ident)
            if self.finished and not self.members.of(Role.WORKER):
                self.end("done")

    async def _membership_changed(self) -> None:
        self.journal.record(self)
        await self.spread()
        await self.refresh()

    async def spread(self) -> None:
        """Tell all servers who the workers are, those that do not hear of it later."""
        if self.recovery.under_way:  # they hear of it when they are set up again
            return
        if self.registry.model is not None and not await self.tell_members():
            self.tell_members_later()

    async def tell_members(self) -> bool:
        """Tell all servers who the workers are; False if some server did not hear of it."""
        async with self._spreading:
            request = shard_pb2.SetMembersRequest(
                job=self.options.job,
                generation=self.members.generation,
                timeline=self.timeline,
                workers=self.worker_infos(),
                term=self.term,
            )
            try:
                await self.servers.call_all(
                    self.members.of(Role.SERVER), "Shard.SetMembers", lambda _: request, self.options.call_timeout_s
                )
            except errors.FencedError as error:
                await self.replaced(str(error))
                return True
            except errors.ParamServerError as error:
                if self.members.of(Role.WORKER):  # else the job is over, and servers leave in any order
                    log.warning("a server did not hear of the new membership", error=str(error))
                return False
        return True

    def tell_members_later(self) -> None:
        """Try again until all servers have heard who the workers are."""
        self.loosely(self._tell_members_again())

    async def _tell_members_again(self) -> None:
        """A shard that still counts a dead worker would hold the others back."""
        while self.members.of(Role.WORKER) and self.state != types_pb2.JOB_STATE_FAILED:
            await asyncio.sleep(_RETRY_S)
            if await self.tell_members():
                return

    # ---- model, data, slices

    async def register_model(
        self, request: coordinator_pb2.RegisterModelRequest
    ) -> coordinator_pb2.RegisterModelResponse:
        """The first model counts; later ones must be equal to it. Waits until all servers are there."""
        self._member(request.member)
        return await self.registry.register(request)

    async def register_data(self, request: coordinator_pb2.RegisterDataRequest) -> coordinator_pb2.RegisterDataResponse:
        """The first data set counts; later ones must be of the same size and cut."""
        self._member(request.member)
        data = data_from_proto(request.data)
        if self.leasing.data is not None and self.leasing.data != data:
            known = self.leasing.data
            if not data.slice_size or not known.slice_size:
                raise errors.DataError(
                    "this job computes slices of a data set: who has no prepared loader of it can only pull"
                    if known.slice_size
                    else "this job has begun without a data set: prepare the loader before the first optimizer.step()"
                )
            raise errors.DataError(
                f"this worker's data set has {data.samples} samples in slices of {data.slice_size}, the one registered "
                f"first has {known.samples} in slices of {known.slice_size} (or another drop_last or shuffle): "
                "all workers must read the same data"
            )
        if self.leasing.data is None:
            await self.leasing.register(data)
            self.origin = SyncSchedule(data.slices_per_epoch, self.slices_per_step)
            self.journal.record(self)
        await self.journal.settled()
        return coordinator_pb2.RegisterDataResponse()

    async def initialize_done(
        self, request: coordinator_pb2.InitializeDoneRequest
    ) -> coordinator_pb2.InitializeDoneResponse:
        """Version 0 is on all shards: publish it everywhere."""
        self._member(request.member)
        await self.registry.initialized(request)
        await self.refresh()
        return coordinator_pb2.InitializeDoneResponse()

    async def lease(self, request: coordinator_pb2.LeaseRequest) -> coordinator_pb2.LeaseResponse:
        """Slices to compute, asynchronous mode. May be parked until some are there."""
        self._member(request.member)
        return await self.leasing.lease(request)

    async def set_consistency(
        self, request: coordinator_pb2.ChangeConsistencyRequest
    ) -> coordinator_pb2.ChangeConsistencyResponse:
        """Change mode or staleness at a version boundary; answers when it is in force on all shards."""
        changed = await self.toggle.change(request)
        return coordinator_pb2.ChangeConsistencyResponse(consistency=consistency_to_proto(changed))

    # ---- the view

    def worker_infos(self) -> list[types_pb2.WorkerInfo]:
        """The live workers, by rank."""
        return [types_pb2.WorkerInfo(member=m.ident, rank=m.index, name=m.name) for m in self.members.of(Role.WORKER)]

    def server_infos(self) -> list[types_pb2.ServerInfo]:
        """The servers, by index."""
        return [
            types_pb2.ServerInfo(index=m.index, address=m.address, name=m.name) for m in self.members.of(Role.SERVER)
        ]

    def view(self) -> types_pb2.View:
        """What every member needs to know."""
        return types_pb2.View(
            generation=self.members.generation,
            timeline=self.timeline,
            state=self.state,
            workers=self.worker_infos(),
            servers=self.server_infos(),
            consistency=consistency_to_proto(self.consistency),
            sync_origin=origin_to_proto(self.origin),
            slices_per_step=self.slices_per_step,
            initialiser=self.registry.initialiser,
            grant=self.registry.grant,
            reason=self.reason,
            term=self.term,
            draining=sorted(self.draining),
            released=self.released,
            stalled=sorted(self.stalls.members),
            checkpoints=self.checkpoints.place is not None,
        )

    async def refresh(self) -> None:
        """Work out where the job stands and tell everybody."""
        if self.state not in (*_ENDED, types_pb2.JOB_STATE_RUNNING, types_pb2.JOB_STATE_RECOVERING):
            self.reason = self._missing()
            if self.registry.ready and not self.reason:
                self.state = types_pb2.JOB_STATE_RUNNING
                self.board.started()
                log.info("running", consistency=str(self.consistency), slices_per_step=self.slices_per_step)
            elif self.registry.model is not None:
                self.state = types_pb2.JOB_STATE_INITIALISING
        self.journal.record(self)
        await self._notify()

    def _missing(self) -> str:
        parts = []
        for role, wanted in ((Role.SERVER, self.options.servers), (Role.WORKER, self.options.workers)):
            present = self.members.of(role)
            if len(present) < wanted:
                have = {m.index for m in present}
                names = [f"{role.value}-{i}" for i in range(wanted) if i not in have]
                parts.append(f"{len(present)}/{wanted} {role.value}s; missing: {', '.join(names[:8])}")
        return "; ".join(parts)

    def missing(self) -> str:
        """Whom the start of the job waits for, in words; empty once everybody is there."""
        return self._missing()

    async def _notify(self) -> None:
        async with self._changed:
            self._edition += 1
            self._changed.notify_all()

    async def wait_changed(self, deadline: float) -> bool:
        """Wait for any change of the view until ``deadline`` (monotonic seconds); False when it has passed."""
        seen = self._edition
        try:
            async with asyncio.timeout_at(deadline - time.monotonic() + asyncio.get_running_loop().time()):
                await self._wait_edition(seen)
        except TimeoutError:
            return False
        return True

    async def fail(self, reason: str, exit_code: int = 1) -> None:
        """End the job for everybody."""
        if self.state not in _ENDED:
            self.exit_code = exit_code
            log.error("job failed", reason=reason)
            await self.conclude(types_pb2.JOB_STATE_FAILED, reason)
            self.end("failed")

    async def conclude(self, state: types_pb2.JobState, reason: str, summary: str = "", released: bool = True) -> None:
        """The job has ended in this ``state``: tell everybody, and write it down."""
        self.state, self.reason, self.summary, self.released = state, reason, summary, released
        await self.refresh()

    def end(self, how: str) -> None:
        """Let whoever runs this coordinator know; the first word counts."""
        if not self.over.done():
            self.over.set_result(how)

    async def replaced(self, reason: str) -> None:
        """Another coordinator leads the job: say nothing more."""
        if not self.over.done():
            log.warning("this coordinator steps down", reason=reason)
            self.end("replaced")

    async def begin_again(self, record: coordinator_pb2.JobRecord) -> None:
        """Nothing of an earlier run can be used: none of its numbers is, either, and its servers are not let in."""
        self.timeline = record.view.timeline + 1
        self.state, self.reason, self.finished = types_pb2.JOB_STATE_WAITING, "", False
        self.lost.clear()
        self.members = Membership(
            self.options.lease_s,
            self.options.grace_s,
            record.view.generation + 1,
            max(record.next_member, self._first_ident()),
        )
        self.checkpoints = Checkpoints(self, self.options.checkpoints)
        self.recovery = Recovery(self)
        self.registry = ModelRegistry(self)
        self.leasing = Leasing(self)
        self.toggle = Toggle(self)
        self.board = Board(self)
        self.watch = Watch(self)
        self.stalls = Stalls(self)
        self.consistency = self.options.consistency
        self.origin = SyncSchedule(0, self.slices_per_step)
        self.async_from = 0
        await self.refresh()

    @property
    def given_up(self) -> bool:
        """Whether nothing more is to be done here: the job has ended, or another coordinator leads it.

        Not while the result of a job whose workers are through has still to be gathered.
        """
        return self.ended or (self.over.done() and self.over.result() != "done")

    @property
    def ended(self) -> bool:
        """Whether the job has ended, one way or another."""
        return self.state in _ENDED

    def workers_present(self) -> bool:
        """Whether there is a worker."""
        return bool(self.members.of(Role.WORKER))

    def members_present(self) -> bool:
        """Whether there is a worker or a server, or a server that may come back."""
        return bool(self.members.of(Role.WORKER) or self.members.of(Role.SERVER) or self.watch.absent)

    async def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a change of the membership that makes it so; False after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if not await self.wait_changed(deadline):
                return ready()
        return True

    def _member(self, ident: int) -> Member:
        member = self.members.get(ident)
        if member is None:
            raise errors.NotMemberError("this process is not a member (its lease ended): join again")
        return member

    async def status(self, request: coordinator_pb2.StatusRequest) -> coordinator_pb2.StatusResponse:
        """Everything a status page shows."""
        return self.board.status(request)

    async def settings(self, request: coordinator_pb2.SettingsRequest) -> coordinator_pb2.SettingsResponse:
        """What a newcomer has to know before it starts."""
        return coordinator_pb2.SettingsResponse(
            job=self.options.job, protocol=PROTOCOL, versions=versions(), settings=self.options.settings
        )

    async def probe(self, request: coordinator_pb2.ProbeRequest) -> coordinator_pb2.ProbeResponse:
        """Clock and versions of this machine, and whether an address of the caller's can be reached from here."""
        response = coordinator_pb2.ProbeResponse(wall_time_s=time.time(), protocol=PROTOCOL, versions=versions())
        if request.address:
            try:
                await self.servers.dial_back(
                    request.address, shard_pb2.StatsRequest(job=self.options.job), min(5.0, self.options.call_timeout_s)
                )
                response.reached = True
            except errors.ParamServerError as error:
                response.reason = str(error)
        return response

    async def drain(self, request: coordinator_pb2.DrainRequest) -> coordinator_pb2.DrainResponse:
        """Ask a worker to leave; answers when it has. Raises ConfigError for anybody but a worker that is there."""
        workers = {m.name: m for m in self.members.of(Role.WORKER)}
        member = workers.get(request.name)
        if member is None:
            if any(m.name == request.name for m in self.members.of(Role.SERVER)):
                raise errors.ConfigError(
                    f"{request.name} holds a part of the model and cannot leave while the job runs; drain a worker"
                )
            there = ", ".join(workers) or "none"
            raise errors.ConfigError(f"there is no worker {request.name[:100]!r}; there are: {there}")
        self.draining.add(member.ident)
        await self.refresh()
        deadline = time.monotonic() + min(request.wait_s or 60.0, 600.0)
        while member.ident in self.members:
            if not await self.wait_changed(deadline):
                raise errors.DeadlineError(f"{request.name} was asked to leave, but has not done so yet")
        return coordinator_pb2.DrainResponse()

    async def ledger(self, request: coordinator_pb2.AccountsRequest) -> coordinator_pb2.AccountsResponse:
        """Per epoch, which samples have counted how often, and who computed what."""
        return await account(self, request.slices)

    async def finish(self, request: coordinator_pb2.FinishRequest) -> coordinator_pb2.FinishResponse:
        """A worker is through: answer when its last version is a checkpoint, or when there is more to do."""
        self._member(request.member)
        if request.timeline != self.timeline:
            return coordinator_pb2.FinishResponse(rolled_back=True)
        try:
            await self.checkpoints.make_safe(request.version)
        except errors.RolledBackError:
            return coordinator_pb2.FinishResponse(rolled_back=True)
        return coordinator_pb2.FinishResponse()

    async def scale(self, request: coordinator_pb2.ScaleRequest) -> coordinator_pb2.ScaleResponse:
        """Have another number of workers; answers when there are so many."""
        return await self.scaling.scale(request)

    async def stop(self, request: coordinator_pb2.StopRequest) -> coordinator_pb2.StopResponse:
        """End the job: workers leave, what there is of the result is gathered."""
        if self.state not in _ENDED:
            reason = request.reason[:200] or "stopped by an operator"
            log.info("stopping", reason=reason)
            await self.conclude(types_pb2.JOB_STATE_STOPPED, reason, released=False)
            self.end("stopped")
        return coordinator_pb2.StopResponse()

    def record(self) -> coordinator_pb2.JobRecord:
        """What another coordinator has to know to take over."""
        return coordinator_pb2.JobRecord(
            view=self.view(),
            settings=self.options.settings,
            expected_servers=self.options.servers,
            expected_workers=self.options.workers,
            members=[
                coordinator_pb2.MemberRecord(
                    member=m.ident,
                    role=types_pb2.ROLE_SERVER if m.role is Role.SERVER else types_pb2.ROLE_WORKER,
                    index=m.index,
                    address=m.address,
                    pid=m.pid,
                    incarnation=m.incarnation,
                )
                for m in (*self.members.of(Role.SERVER), *self.watch.absent.values(), *self.members.of(Role.WORKER))
            ],
            next_member=self.members.next_ident,
            data=data_to_proto(self.leasing.data) if self.leasing.data else None,
            layout=self.registry.digest,
            ready=self.registry.ready,
            departed=self.board.departed(),
            training_s=self.board.training_s(),
            lost=self.lost,
            finished=self.finished,
            summary=self.summary,
            address=self.address,
            async_from=self.async_from,
            checkpoint=self.checkpoints.last,
            rollbacks=self.recovery.count,
            steps_redone=self.recovery.steps_redone,
            wanted_workers=self.scaling.wanted,
        )

    async def server_stats(self) -> list[shard_pb2.StatsResponse]:
        """Ask all servers now."""
        replies = await self.ask_servers("Shard.Stats", shard_pb2.StatsRequest(job=self.options.job))
        return [cast(shard_pb2.StatsResponse, reply) for reply in replies]

    async def ask_servers(self, method: str, request: Message) -> list[Message]:
        """Call all servers with the same message; the first error is raised after all have ended."""
        return await self.servers.call_all(
            self.members.of(Role.SERVER), method, lambda _: request, self.options.call_timeout_s
        )
