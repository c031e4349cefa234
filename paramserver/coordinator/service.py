"""The RPCs of the coordinator: who is a member, which server holds what, which worker leases which slice.

Never on the path of a tensor. In a steady state a step needs nothing from here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import structlog

from paramserver import errors
from paramserver.coordinator.admission import admit_server, check_join
from paramserver.coordinator.history.probing import probe_place
from paramserver.coordinator.job import Job
from paramserver.coordinator.work.accounts import account
from paramserver.core.job.membership import (
    Admitted,
    Disconnected,
    Effect,
    Ended,
    Event,
    GenerationRose,
    Joined,
    Left,
    Member,
    Presence,
    Removed,
    Renewed,
    Role,
    Tick,
)
from paramserver.core.versions.consistency import Mode
from paramserver.core.work.slices import SyncSchedule
from paramserver.failpoints import reach
from paramserver.membership.session import versions
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.wire.bounds import check_newcomer, check_report, patience, text
from paramserver.wire.messages import (
    PROTOCOL,
    consistency_to_proto,
    data_from_proto,
)

log = structlog.get_logger("paramserver.coordinator")

_ROLES = {
    types_pb2.ROLE_WORKER: Role.WORKER,
    types_pb2.ROLE_SERVER: Role.SERVER,
    types_pb2.ROLE_OBSERVER: Role.OBSERVER,
}
_TICK_S = 0.2


class CoordinatorService(Job):
    """One job behind its RPCs; :meth:`start` and :meth:`close` bracket its background work."""

    _ticker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to watch leases."""
        self._ticker = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """End all sessions, stop watching, close channels, write the last state."""
        self.closing = True
        await self.notify()
        background = [task for task in (self._ticker, *self._loose) if task is not None]
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await self.mode_change.close()
        await self.servers.close()
        await self.journal.close()

    # ---- joining and leaving

    async def join(self, request: coordinator_pb2.JoinRequest) -> coordinator_pb2.JoinResponse:
        """Admit a process. Refused: another protocol, another mode, an address that cannot be reached, one too many."""
        role = _ROLES.get(request.role)
        if role is None:
            raise errors.ProtocolError(f"unknown role number {request.role}")
        check_newcomer(request)
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
        gone: set[int] = set()
        if role is Role.SERVER:
            await self.servers.dial_back(
                request.address, shard_pb2.StatsRequest(job=self.options.job), self.options.call_timeout_s
            )
            if not request.holds:
                await probe_place(self, request.address)
            gone = set(self.watch.absent)
            index = await admit_server(self, request, index)
        event = Joined(role, index, request.address, request.pid, request.incarnation, request.beside_worker)
        effects = self.members.handle(event, time.monotonic())
        self._residuals_lost(effects)
        member = next(effect.member for effect in effects if isinstance(effect, Admitted))
        if member.role is not Role.OBSERVER:
            self.lost[:] = [name for name in self.lost if name != member.name]
            self.reports.admitted(member)
        if role is Role.SERVER:
            if not request.holds and member.index in gone and self.recovery.possible:
                self.recovery.begin(f"{member.name} has begun anew", member.ident)
            elif request.holds and request.timeline != self.timeline:
                self.recovery.begin(f"{member.name} came back from an older timeline", member.ident)
        await self._carry_out(effects)
        if role is Role.SERVER:
            self.mode_change.server_back(member)
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
                edition = await self.wait_edition(edition)
                if reader.done() or ident not in self.members:
                    return
                yield coordinator_pb2.SessionResponse(view=self.view())
        finally:
            reader.cancel()
            # First of all, since the transport may cancel this call while it waits for the reader.
            if ident in self.members:
                await self._happen(Disconnected(ident))
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[coordinator_pb2.SessionRequest], ident: int) -> None:
        try:
            async for request in requests:
                if request.member != ident:
                    raise errors.ProtocolError("a session speaks for one member only")
                await self._hear(request)
        finally:
            await self.notify()

    async def _hear(self, request: coordinator_pb2.SessionRequest) -> None:
        check_report(request.worker)
        text("the reason of a failure", request.failure)
        await self._happen(Renewed(request.member))
        self.reports.hear(request)
        member = self.members.get(request.member)
        if request.HasField("worker") and member is not None:
            self.stalls.hear(member, request.worker)
            self.poison.hear(member, request.worker)
            self.ending.hear(member, request.worker)
        if request.HasField("server") and member is not None:
            self.checkpoints.hear(member.index, request.server)
        if request.server.term > self.term:
            await self.replaced(f"a server follows a newer coordinator (term {request.server.term})")
        if request.leaving:
            await self.confirm()
            member = self.members.get(request.member)
            if member is not None and member.role is Role.WORKER:
                self.loads.ended(member, request.finished or request.ended)
                self.finished = self.finished or request.finished
                self.ending.script_ended = self.ending.script_ended or request.ended
                if request.failure:
                    log.warning("a worker's script failed", worker=member.name, reason=request.failure)
                self.reports.leaving(member, request)
            await self._happen(Left(request.member))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                await self._happen(Tick())
                await self.watch.look()
                await self.stalls.look()
                self.idle.look()
                await self.stuck.look()
                self.poison.look()
                self.checkpoints.look()
                self.ending.look()
                self.loads.look()
                if self.journal.fenced.is_set():
                    await self.replaced("the store says that another coordinator leads the job now")
            except Exception:  # the top of a task: watching goes on
                log.exception("tick failed")

    async def _happen(self, event: Event) -> None:
        effects = self.members.handle(event, time.monotonic())
        self._residuals_lost(effects)
        await self._carry_out(effects)

    def _residuals_lost(self, effects: list[Effect]) -> None:
        """Where workers keep what compression leaves out, another set of workers begins at the last checkpoint.

        Decided before anybody hears of them, so that nobody goes on without.
        """
        changed = [e.member for e in effects if isinstance(e, Admitted | Removed) and e.member.role is Role.WORKER]
        data = self.leasing.data
        if (
            changed
            and self.options.residuals
            and self.state == types_pb2.JOB_STATE_RUNNING
            and self.consistency.mode is Mode.SYNC
            and data is not None
            and data.slice_size  # without a data set nobody could do the steps again
            and self.recovery.possible
            and not (self.finished or self.given_up)
        ):
            names = ", ".join(member.name for member in changed)
            self.recovery.begin(f"with {names} the workers have changed, and what compression left out is lost")

    async def _carry_out(self, effects: list[Effect]) -> None:
        """Perform them to the end, even if the caller is cancelled: the others must hear of every change."""
        if effects:
            await asyncio.shield(self.loosely(self._perform(effects), awaited=True))

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
        if lost and member.role is not Role.OBSERVER:
            self.losses += 1
            self.lost.append(member.name)
        self.reports.removed(member, lost, reason)
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
            await self.poison.gone(member, lost or self.reports.script_failed(member))
            self.loads.worker_gone(member.ident)
            self.registry.worker_gone(member.ident)
            self.draining.discard(member.ident)
            self.ending.worker_gone(member, lost)

    async def _membership_changed(self) -> None:
        self.journal.record(self)
        await self.spread()
        await self.refresh()

    # ---- training

    async def register_model(
        self, request: coordinator_pb2.RegisterModelRequest
    ) -> coordinator_pb2.RegisterModelResponse:
        """The first model counts; later ones must be equal to it. Waits until all servers are there."""
        self._member(request.member)
        if not await self.wait_until(lambda: self.loads.may_begin(request.member), self.options.max_idle_s):
            raise errors.DeadlineError("the other workers wait in ctx.load, and do not come to go on")
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
        await self.settled()
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
        changed = await self.mode_change.change(request)
        return coordinator_pb2.ChangeConsistencyResponse(consistency=consistency_to_proto(changed))

    async def begin(self, request: coordinator_pb2.BeginRequest) -> coordinator_pb2.BeginResponse:
        """A worker is about to compute a slice, after another one has died."""
        self._member(request.member)
        return coordinator_pb2.BeginResponse(skip=not await self.poison.begin(request.member, request.slice))

    async def load(self, request: coordinator_pb2.LoadRequest) -> coordinator_pb2.LoadResponse:
        """A worker has come to a ctx.load; see `coordinator.history.loads`."""
        self._member(request.member)
        return await self.loads.call(request)

    async def finish(self, request: coordinator_pb2.FinishRequest) -> coordinator_pb2.FinishResponse:
        """A worker is through: answer when its last version is a checkpoint, or when there is more to do."""
        self._member(request.member)
        if request.timeline != self.timeline:
            return coordinator_pb2.FinishResponse(rolled_back=True)
        await self._check_reached(request.version)
        try:
            await self.checkpoints.make_safe(request.version)
        except errors.RolledBackError:
            return coordinator_pb2.FinishResponse(rolled_back=True)
        return coordinator_pb2.FinishResponse()

    async def _check_reached(self, version: int) -> None:
        """Raise ProtocolError for a version that no server has: it would be waited for, again and again."""
        if version <= self.reports.newest_version():
            return
        try:
            newest = max((stats.version for stats in await self.server_stats()), default=0)
        except errors.RetryableError:
            return
        if version > newest:
            raise errors.ProtocolError(f"version {version} does not exist yet: the newest is {newest}")

    async def snapshot(self, request: coordinator_pb2.SnapshotRequest) -> coordinator_pb2.SnapshotResponse:
        """Asynchronous mode: versions of all servers that hold the same contributions."""
        self._member(request.member)
        if request.timeline != self.timeline:
            raise errors.RolledBackError("the job has gone back to a checkpoint")
        return await self.snapshots.take(request.timeline)

    def _member(self, ident: int) -> Member:
        member = self.members.get(ident)
        if member is None:
            raise errors.NotMemberError("this process is not a member (its lease ended): join again")
        return member

    # ---- operators

    async def status(self, request: coordinator_pb2.StatusRequest) -> coordinator_pb2.StatusResponse:
        """Everything a status page shows."""
        return self.reports.status(request)

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
        wait_s = patience("wait_s", request.wait_s, 600.0)
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
        deadline = time.monotonic() + (wait_s or 60.0)
        while member.ident in self.members:
            if not await self.wait_changed(deadline):
                raise errors.DeadlineError(f"{request.name} was asked to leave, but has not done so yet")
        return coordinator_pb2.DrainResponse()

    async def ledger(self, request: coordinator_pb2.AccountsRequest) -> coordinator_pb2.AccountsResponse:
        """Per epoch, which samples have counted how often, and who computed what."""
        return await account(self, request.slices)

    async def scale(self, request: coordinator_pb2.ScaleRequest) -> coordinator_pb2.ScaleResponse:
        """Have another number of workers; answers when there are so many."""
        return await self.scaling.scale(request)

    async def stop(self, request: coordinator_pb2.StopRequest) -> coordinator_pb2.StopResponse:
        """End the job: workers leave, what there is of the result is gathered."""
        if not self.ended:
            reason = request.reason[:200] or "stopped by an operator"
            log.info("stopping", reason=reason)
            await self.conclude(types_pb2.JOB_STATE_STOPPED, reason, released=False)
            self.end("stopped")
        return coordinator_pb2.StopResponse()
