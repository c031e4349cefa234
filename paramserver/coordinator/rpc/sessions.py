"""Membership: joining, the sessions of members, their leases, and the consequences when a member comes or goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import structlog

from paramserver import errors
from paramserver.coordinator.admission import admit_server, check_join, check_member, look_at_place, server_gone
from paramserver.coordinator.job import Job
from paramserver.core.job.life import Phase
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
from paramserver.core.job.seats import JobFails
from paramserver.core.versions.consistency import Mode
from paramserver.failpoints import reach
from paramserver.membership.joining import shown_command
from paramserver.transport.addresses import host_of
from paramserver.transport.base import METHODS, caller
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.wire.bounds import MAX_MEMBERS, check_newcomer, check_report, kept, text

log = structlog.get_logger("paramserver.coordinator")

_ROLES = {
    types_pb2.ROLE_WORKER: Role.WORKER,
    types_pb2.ROLE_SERVER: Role.SERVER,
    types_pb2.ROLE_OBSERVER: Role.OBSERVER,
}
_TICK_S = 0.2
_LOOK_S = 1.0


def _replaced(member: Member, request: coordinator_pb2.JoinRequest) -> bool:
    """Whether the newcomer says that it comes in place of this member. Pids of other machines mean nothing."""
    if member.pid not in request.replaces:
        return False
    if member.role is Role.SERVER:
        return host_of(member.address) == host_of(request.address)
    return member.address == request.address


def _proof() -> bytes:
    """What tells the maker of the present call from others; empty within one process."""
    who = caller()
    return (who.proof if who is not None else None) or b""


class Sessions:
    """The members of a job and their sessions. Leases are watched from :meth:`start` to :meth:`close`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._ticker: asyncio.Task[None] | None = None
        # The newest view that members were told, encoded, and its edition.
        self._edition, self._view = -1, b""
        # The member numbers of servers without a session that this coordinator tries to reach just now.
        self._looking: set[int] = set()

    async def start(self) -> None:
        """Begin to watch leases."""
        self._ticker = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """End the watching of leases."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)

    async def join(self, request: coordinator_pb2.JoinRequest) -> coordinator_pb2.JoinResponse:
        """Admit a process.

        Refused: another protocol or mode, an address that cannot be reached, a member too many.
        """
        role = _ROLES.get(request.role)
        if role is None:
            raise errors.ProtocolError(f"unknown role number {request.role}")
        check_newcomer(request)
        check_join(self._job, request, role)
        await self._ended(role, request)
        member = self._known(role, request.incarnation) or await self._admit(request, role)
        # Before a worker is given work, so that no server takes it for a stranger.
        await self._job.keeping.servers_settled()
        return coordinator_pb2.JoinResponse(
            member=member.ident,
            name=member.name,
            rank=member.index,
            job=self._job.options.job,
            lease_s=self._job.options.lease_s,
            view=self._job.view(),
            expected_workers=self._job.options.workers,
        )

    def _known(self, role: Role, incarnation: int) -> Member | None:
        """The member that this process is already, if the answer to its first request got lost."""
        mine = (m for m in self._job.members.of(role) if m.incarnation == incarnation != 0)
        return next((m for m in mine if m.proof == _proof()), None)

    async def _ended(self, role: Role, request: coordinator_pb2.JoinRequest) -> None:
        """A newcomer replaces processes that have ended: remove these members now, before their leases end.

        If the newcomer has no wish for an index, it gets theirs.
        """
        silent = [member for member in self._job.members.of(role) if member.presence is Presence.SILENT]
        away = [away.member for away in self._job.seats.away] if role is Role.SERVER else []
        for member in silent + away:
            if _replaced(member, request):
                if not request.HasField("index"):
                    request.index = member.index
                await self._happen(Ended(member.ident))

    async def _admit(self, request: coordinator_pb2.JoinRequest, role: Role) -> Member:
        if len(self._job.members.of(role)) >= MAX_MEMBERS:
            raise errors.ConfigError(f"this job has {MAX_MEMBERS} {role.value}s, and more cannot join")
        index = request.index if request.HasField("index") else None
        goes_back = ""
        if role is Role.SERVER:
            await self._job.servers.dial_back(request.address, self._job.options.job, self._job.options.call_timeout_s)
            if not request.holds:
                await look_at_place(self._job, request.address, request.key)
            seat = await admit_server(self._job, request, index)
            index, goes_back = seat.index, seat.goes_back
        event = Joined(
            role,
            index,
            request.address,
            request.pid,
            request.incarnation,
            request.beside_worker,
            shown_command(request.restart_command),
            request.metrics_url,
            request.host,
            _proof(),
            request.key,
        )
        effects = self._job.members.handle(event, time.monotonic())
        self._decide_at_once(effects)
        member = next(effect.member for effect in effects if isinstance(effect, Admitted))
        if member.role is not Role.OBSERVER:
            self._job.reports.admitted(member)
        if goes_back:
            self._job.recovery.begin(f"{member.name} {goes_back}")
        await self._carry_out(effects)
        if role is Role.SERVER:
            self._job.mode_change.server_back(member)
            self._job.replication.server_there()
        log.debug("joined", member=member.name, pid=request.pid, address=request.address)
        return member

    async def session(self, requests: AsyncIterator[coordinator_pb2.SessionRequest]) -> AsyncIterator[bytes]:
        """Reports up, the view down whenever it changes. The end of the stream is the end of the lease's grace."""
        first = await anext(aiter(requests), None)
        if first is None:
            return
        ident = first.member
        check_member(self._job, ident)
        await self._hear(first)
        reader = asyncio.create_task(self._read(requests, ident))
        try:
            edition = -1
            while True:
                edition = await self._job.changes.wait_edition(edition)
                if reader.done() or ident not in self._job.members:
                    return
                yield self._news(edition)
        finally:
            reader.cancel()
            # Before waiting for the reader, since the transport may cancel this call meanwhile.
            member = self._job.members.get(ident)
            if member is not None:
                await self._happen(Disconnected(ident))
                if member.role is Role.SERVER:
                    self._look_for(member)
            await asyncio.gather(reader, return_exceptions=True)

    def _look_for(self, server: Member) -> None:
        """A server has no session. If others have its shards, look whether it is there at all."""
        if self._job.options.replicas and server.ident not in self._looking:
            self._looking.add(server.ident)
            self._job.tasks.begin(self._knock(server))

    async def _knock(self, server: Member) -> None:
        """If nothing answers at the address of a server, do not wait for the end of its lease."""
        request = shard_pb2.StatsRequest(job=self._job.options.job)
        try:
            await self._job.servers.ask(server.address, "Shard.Stats", request, _LOOK_S)
        except errors.UnavailableError:
            now = self._job.members.get(server.ident)
            if now is not None and now.presence is Presence.SILENT:
                await self._happen(Ended(server.ident))
        except errors.ParamServerError as error:
            log.debug("a server without a session", server=server.name, reason=str(error))
        finally:
            self._looking.discard(server.ident)

    def _news(self, edition: int) -> bytes:
        """The view for all members, made and encoded once for each edition."""
        if edition != self._edition:
            news = coordinator_pb2.SessionResponse(view=self._job.view(), trace=self._job.tracing.order)
            self._edition, self._view = edition, METHODS["Coordinator.Session"].encode_response(news)
        return self._view

    async def _read(self, requests: AsyncIterator[coordinator_pb2.SessionRequest], ident: int) -> None:
        try:
            async for request in requests:
                if request.member != ident:
                    raise errors.ProtocolError("a session speaks for one member only")
                await self._hear(request)
        except errors.ParamServerError as error:
            log.warning("a report cannot be read, and ends the session", member=self._named(ident), reason=str(error))
        except Exception:  # the top of a task: the member opens another session
            log.exception("a report cannot be read, and ends the session", member=self._named(ident))
        finally:
            await self._job.changes.notify()

    def _named(self, ident: int) -> str:
        member = self._job.members.get(ident)
        return member.name if member is not None else f"member {ident}"

    async def _hear(self, request: coordinator_pb2.SessionRequest) -> None:
        if request.HasField("worker"):  # a check that shortens a list makes a report of none
            check_report(request.worker)
        text("the reason of a failure", request.failure)
        await self._look_for_another(max((stats.term for stats in request.shards), default=0))
        await self._happen(Renewed(request.member, request.key))
        member = self._job.members.get(request.member)
        if request.HasField("worker") and member is not None:
            self._job.records.hear(member, request.worker)
            self._job.audit.hear(member, request.worker)
        request = kept(request)
        self._job.reports.hear(request)
        if member is not None:
            self._job.blame.hear(member, request)
        if request.HasField("worker") and member is not None:
            self._job.stalls.hear(member, request.worker)
            self._job.poison.hear(member, request.worker)
            self._job.ending.hear(member, request.worker)
        for stats in request.shards:
            if member is not None and stats.holds and not stats.backup:
                self._job.checkpoints.hear(stats.shard, stats)
        self._job.replication.hear(request.shards)
        if request.leaving:
            await self._job.confirm()
            member = self._job.members.get(request.member)
            if member is not None and member.role is Role.WORKER:
                self._job.loads.ended(member, request.finished or request.ended)
                self._job.ending.leaving(request)
                self._job.main.leaving(request)
                if request.failure:
                    log.warning("a worker's script failed", worker=member.name, reason=request.failure)
                self._job.reports.leaving(member, request)
            await self._happen(Left(request.member))

    async def _look_for_another(self, term: int) -> None:
        """A server says that it follows a coordinator of this term: step down if the store says so, too.

        Raises ProtocolError if the store knows of none after this one.
        """
        if term <= self._job.term:
            return
        if not await self._job.outranked():
            raise errors.ProtocolError(
                f"a server says that it follows a coordinator of term {term}, and the store knows of none after this "
                f"one (term {self._job.term})"
            )
        await self._job.replaced(f"a server follows a newer coordinator (term {term})")

    async def _tick(self) -> None:
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(_TICK_S)
            # Nothing runs in this process while it is stopped or gets no processor.
            late_s = time.monotonic() - slept_at - _TICK_S
            await self._look(late_s if late_s > _TICK_S else 0.0)

    async def _look(self, late_s: float) -> None:
        """Let each part of the job look at it. A part that fails keeps no other one from that."""
        job = self._job

        def silent() -> None:
            for server in job.members.of(Role.SERVER):
                if server.presence is Presence.SILENT:
                    self._look_for(server)

        async def fenced() -> None:
            if job.journal.fenced.is_set():
                await job.replaced("the store says that another coordinator leads the job now")

        looks: tuple[Callable[[], Awaitable[None] | None], ...] = (
            silent,
            lambda: self._happen(Tick(late_s)),
            job.watch.look,
            job.stalls.look,
            job.blame.look,
            job.idle.look,
            job.stuck.look,
            job.poison.look,
            job.checkpoints.look,
            job.replication.look,
            job.resizing.look,
            job.ending.look,
            job.loads.look,
            job.records.look,
            job.course.look,
            job.tracing.look,
            fenced,
        )
        for look in looks:
            try:
                if (looking := look()) is not None:
                    await looking
            except Exception:  # the top of a task: watching goes on
                log.exception("a part of the coordinator failed; the others go on", part=look.__qualname__)

    async def _happen(self, event: Event) -> None:
        effects = self._job.members.handle(event, time.monotonic())
        self._decide_at_once(effects)
        await self._carry_out(self._with_seats(effects))

    def _with_seats(self, effects: list[Effect]) -> list[Effect | JobFails]:
        """Tell the seats at once of servers that are gone, before anybody can ask for these seats.

        Returns the effects; the loss of a server is followed by its consequence for the job.
        """
        all_effects: list[Effect | JobFails] = []
        for effect in effects:
            all_effects.append(effect)
            if isinstance(effect, Removed) and effect.member.role is Role.SERVER:
                all_effects += server_gone(self._job, effect.member, effect.lost, effect.reason)
        return all_effects

    def _decide_at_once(self, effects: list[Effect]) -> None:
        """Decide what follows, before any member hears of the change."""
        if effects:
            self._job.main.look()
        self._residuals_lost(effects)

    def _residuals_lost(self, effects: list[Effect]) -> None:
        """Let the job go back when workers have changed, if workers keep residuals of compression.

        Before any member hears of the change, so that no worker goes on without the residuals.
        """
        changed = [e.member for e in effects if isinstance(e, Admitted | Removed) and e.member.role is Role.WORKER]
        if (
            changed
            and self._job.options.residuals
            and self._job.life.phase is Phase.RUNNING
            and self._job.consistency.mode is Mode.SYNC
            and self._job.schedule.slices_per_epoch  # without a data set no worker could do the steps again
            and self._job.recovery.possible
            and not (self._job.ending.finished or self._job.given_up)
        ):
            names = ", ".join(member.name for member in changed)
            self._job.recovery.begin(f"with {names} the workers have changed, and what compression left out is lost")

    async def _carry_out(self, effects: Sequence[Effect | JobFails]) -> None:
        """Perform the effects to the end, even if the caller is cancelled: members must hear of every change.

        The reasons of removals are noted at once, before the time line of events can miss a member without a reason.
        """
        for effect in effects:
            if isinstance(effect, Removed):
                self._job.reports.removed(effect.member, effect.lost, effect.reason)
        if effects:
            await asyncio.shield(self._job.tasks.begin(self._perform(effects), awaited=True))

    async def _perform(self, effects: Sequence[Effect | JobFails]) -> None:
        for effect in effects:
            match effect:
                case Removed(member, lost, reason):
                    await self._removed(member, lost, reason)
                case JobFails(text):
                    await self._job.fail(text)
                case GenerationRose(generation, reason):
                    log.debug("generation", number=generation, reason=reason)
                    reach("coord.before_generation")
                    await self._job.refresh()
                    reach("coord.after_generation")

    async def _removed(self, member: Member, lost: bool, reason: str) -> None:
        if member.role is Role.SERVER:
            await self._job.servers.forget(member.ident)
            self._job.keeping.forget(member.ident)
            self._job.draining.discard(member.ident)
            self._job.restarting.discard(member.ident)
            self._job.moving.discard(member.ident)
        self._job.leasing.give_back(member.ident)
        self._job.registered.worker_gone(member.ident)
        if member.role is Role.WORKER:
            self._job.evaluating.give_back(member.ident)
            self._job.stalls.gone(member.ident)
            self._job.blame.gone(member)
            await self._job.poison.gone(member, lost or self._job.reports.script_failed(member))
            self._job.loads.worker_gone(member.ident)
            self._job.registry.worker_gone(member.ident)
            self._job.draining.discard(member.ident)
            self._job.ending.worker_gone(member, lost)
