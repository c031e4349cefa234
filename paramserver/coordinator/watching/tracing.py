"""Traces: who records, what has come, and when nothing more will come. A command begins a trace and fetches it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import structlog

from paramserver import errors
from paramserver.coordinator import ports
from paramserver.coordinator.history.timeline import TimeLine
from paramserver.coordinator.watching.idle import Idle
from paramserver.coordinator.watching.stalls import Stalls
from paramserver.core.job.membership import Role
from paramserver.core.trace.roll import Roll
from paramserver.membership.tracing import part_of
from paramserver.tracing import MOST_SPANS, Recorder
from paramserver.v1 import coordinator_pb2
from paramserver.wire.bounds import patience

log = structlog.get_logger("paramserver.coordinator")

MOST_STEPS = 1000
COORDINATOR = "coordinator"
# Bytes of parts that wait to be fetched; and of one answer, far below the most bytes of a message.
_MOST_BYTES = 128 << 20
_ANSWER_BYTES = 4 << 20
# A trace that no command fetches for so long is over.
_ABANDONED_S = 15.0
_LONGEST_WAIT_S = 5.0
Request = TypeVar("Request")
Response = TypeVar("Response")
Call = Callable[[Request], Coroutine[Any, Any, Response]]


class _Job(ports.Stage, Protocol):
    stalls: Stalls
    idle: Idle
    events: TimeLine

    @property
    def ended(self) -> bool: ...


class Tracing:
    """The present trace of a job, or the last one."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        # What this coordinator does.
        self.recorder = Recorder()
        # What members are told; None before the first trace.
        self.order: coordinator_pb2.TraceOrder | None = None
        self._roll = Roll({}, {}, 0)
        # Parts that the command may still have to fetch, and their bytes.
        self._parts: deque[coordinator_pb2.TracePart] = deque()
        self._bytes = self._next = self._dropped = 0
        self._began_at = 0.0
        self._asked_at = 0.0
        self._closed = True
        # Set when something has come, or when nothing more will come.
        self._news = asyncio.Event()

    # ---- the command

    async def trace(self, request: coordinator_pb2.TraceRequest) -> coordinator_pb2.TraceResponse:
        """Begin a trace, or fetch parts of the one under way. Raises ConfigError for what cannot be traced."""
        if not request.number:
            await self._begin(request)
        elif self.order is None or request.number != self.order.number:
            raise errors.NotLeaderError(
                "this coordinator knows nothing of that trace: another coordinator has begun it"
            )
        self._asked_at = time.monotonic()
        if request.stop:
            await self._close("the command waits no longer")
        wait_s = patience("wait_s", request.wait_s, _LONGEST_WAIT_S)
        self._news.clear()
        if self._next <= request.received and not self._closed_by_all:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
        self._asked_at = time.monotonic()
        return self._answer(request.received)

    async def _begin(self, request: coordinator_pb2.TraceRequest) -> None:
        job, steps = self._job, request.steps
        if not 1 <= steps <= MOST_STEPS:
            raise errors.ConfigError(f"a trace has 1 to {MOST_STEPS} steps, not {steps}")
        if job.ended:
            raise errors.ConfigError("the job has ended: there is nothing to trace")
        if self.order is not None and not self._closed_by_all and self._waited_for:
            raise errors.ConfigError("another trace is under way: try again when it is written")
        # Workers without slices take no steps: they record until the others are through.
        rest = {one.ident for one in job.idle.members()} | set(job.stalls.members)
        workers = {one.ident: one.name for one in job.members.of(Role.WORKER) if one.ident not in rest}
        others = {one.ident: one.name for one in job.members.of(Role.WORKER) if one.ident in rest}
        others |= {one.ident: one.name for one in job.members.of(Role.SERVER)}
        if not workers:
            raise errors.ConfigError("no worker takes steps now: there is nothing to trace")
        self._roll = Roll(workers, others, steps)
        self._next = self._bytes = self._dropped = 0
        self._parts.clear()
        self._began_at, self._asked_at, self._closed = time.time(), time.monotonic(), False
        self.order = coordinator_pb2.TraceOrder(number=secrets.randbits(62) | 1, steps=steps, profiler=request.profiler)
        self.recorder.begin(steps)
        log.info("a trace begins", steps=steps, processes=len(self._roll.names) + 1)
        await job.changes.notify()

    @property
    def _waited_for(self) -> bool:
        return time.monotonic() - self._asked_at < _ABANDONED_S

    @property
    def _closed_by_all(self) -> bool:
        """Whether nothing more will come."""
        return self._closed and self._roll.over

    def _answer(self, received: int) -> coordinator_pb2.TraceResponse:
        """The parts after the first ``received`` ones, as far as they go into one message."""
        assert self.order is not None
        while self._parts and self._parts[0].index < received:
            self._bytes -= self._parts.popleft().ByteSize()
        response = coordinator_pb2.TraceResponse(
            number=self.order.number,
            missing=self._roll.missing(),
            processes=[COORDINATOR, *self._roll.names],
            dropped=self._dropped,
        )
        size = 0
        for part in self._parts:
            size += part.ByteSize()
            if response.parts and size > _ANSWER_BYTES:
                break
            response.parts.append(part)
        fetched = response.parts[-1].index + 1 if response.parts else received
        response.over = self._closed_by_all and fetched >= self._next
        return response

    # ---- members

    async def hand_in(self, part: coordinator_pb2.TracePart) -> coordinator_pb2.HandInResponse:
        """A member has recorded something, or asks for the clock."""
        clock_ns = self.recorder.now()
        member = self._job.members.get(part.member)
        if member is None:
            raise errors.NotMemberError("this process is not a member (its lease ended): join again")
        if self.order is not None and part.number == self.order.number and part.pid and not self._closed_by_all:
            part.name = member.name
            self._keep(part)
            self._roll.heard(part.member, part.steps, part.last)
            await self._look()
        return coordinator_pb2.HandInResponse(clock_ns=clock_ns)

    def _keep(self, part: coordinator_pb2.TracePart) -> None:
        self._news.set()
        part.index = self._next
        self._next += 1
        self._parts.append(part)
        self._bytes += part.ByteSize()
        while self._bytes > _MOST_BYTES:
            oldest = self._parts.popleft()
            self._bytes -= oldest.ByteSize()
            self._dropped += len(oldest.spans)

    # ---- the end

    async def look(self) -> None:
        """Called every now and then: members may have gone, or the command may have."""
        if not self._closed_by_all:
            await self._look()

    async def _look(self) -> None:
        job = self._job
        roles = (Role.WORKER, Role.SERVER)
        self._roll.present(member.ident for role in roles for member in job.members.of(role))
        if self._closed_by_all:
            self._news.set()
        if self._closed:
            return
        if self._roll.through:
            await self._close("all workers are through")
        elif not self._waited_for:
            await self._close("the command that has begun it is gone")

    async def _close(self, reason: str) -> None:
        """All processes are to record no more, and to hand in the rest."""
        if self._closed or self.order is None:
            return
        log.info("the trace ends", reason=reason)
        self._closed, self.order = True, coordinator_pb2.TraceOrder(number=self.order.number, over=True)
        self.recorder.end()
        for event in self._job.events.events():
            if event.at_s >= self._began_at:
                at_ns = self.recorder.now() - round((time.time() - event.at_s) * 1e9)
                self.recorder.span(event.kind, "events", at_ns, event.version, end_ns=at_ns, text=event.text)
        part = part_of(self.recorder, MOST_SPANS)
        part.number, part.name = self.order.number, COORDINATOR
        self._keep(part)
        await self._job.changes.notify()

    # ---- what this coordinator does

    def shown(self, call: Call[Request, Response]) -> Call[Request, Response]:
        """The same call, which a trace shows as a span."""

        async def answer(request: Request) -> Response:
            recorder = self.recorder
            if not recorder.on:
                return await call(request)
            began = recorder.now()
            try:
                return await call(request)
            finally:
                caller = self._job.members.get(getattr(request, "member", 0))
                recorder.span(call.__name__, "calls", began, caller=caller.name if caller else "")

        return answer
