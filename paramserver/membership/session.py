"""A member's session with the coordinator: joins, reports, and keeps the view of the cluster up to date.

The coordinator may go away and another one take its place: the session is opened again, with the same member number,
to whichever of the addresses answers. A coordinator of a lower term than one that was heard of is left.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import cast

import structlog
from google.protobuf.message import Message

from paramserver import errors
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.membership.joining import RETRY_S, JoinOptions, persist, restart_command, versions
from paramserver.membership.tracing import Tracer
from paramserver.tracing import Recorder
from paramserver.transport.base import Channel
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.wire.messages import PROTOCOL, consistency_from_proto, mode_to_proto

log = structlog.get_logger("paramserver.session")

_REPORT_S = 0.5
_CALL_S = 30.0
# A coordinator that takes a session sends the view at once.
_FIRST_S = 15.0
_NOT_BEGUN = (types_pb2.JOB_STATE_UNSPECIFIED, types_pb2.JOB_STATE_WAITING)
_OVER = (types_pb2.JOB_STATE_FAILED, types_pb2.JOB_STATE_DONE, types_pb2.JOB_STATE_STOPPED)


class Session:
    """Membership of one process. Lives in one event loop."""

    def __init__(
        self,
        channel: Channel,
        options: JoinOptions,
        report: Callable[[], coordinator_pb2.SessionRequest],
        trace: Recorder | None = None,
    ) -> None:
        """``report`` makes this process's next report; ``trace`` records what the process does, when that is wanted."""
        self.channel = channel
        self.options = options
        self.member = 0
        self.name = ""
        self.rank = 0
        self.job = options.job
        self.expected_workers = 0
        self.view = types_pb2.View()
        self._report = report
        script = options.role == types_pb2.ROLE_WORKER
        self._tracer = Tracer(trace, channel, lambda: self.member, script) if trace is not None else None
        self._changed = asyncio.Condition()
        self.editions = 0
        self._task: asyncio.Task[None] | None = None
        # How often the stream of reports was opened.
        self.sessions = 0
        self._leaving = asyncio.Event()
        # Set when the next report should not wait.
        self._hurry = asyncio.Event()
        # Set when a call was answered that this process is no member.
        self._expelled = asyncio.Event()
        self._farewell = coordinator_pb2.SessionRequest()
        self.incarnation = secrets.randbits(63) | 1
        # Since when there is no coordinator to talk to (monotonic seconds), None while there is one.
        self.lost_at: float | None = None
        self.failure: errors.ParamServerError | None = None

    # ---- joining

    async def join(self) -> None:
        """Become a member; retries for ``join_timeout_s`` while no coordinator answers, and logs that."""
        options = self.options

        async def attempt() -> Message:
            reply = await self.channel.call("Coordinator.Join", self._join_request(), timeout=_CALL_S)
            self._check_term(cast(coordinator_pb2.JoinResponse, reply).view.term)
            return reply

        try:
            reply = await persist(attempt, self.channel, options.join_timeout_s, options.log_interval_s)
        except errors.RelievedError as error:
            if options.drop is None:
                raise
            log.warning(str(error))
            await options.drop()
            reply = await persist(attempt, self.channel, options.join_timeout_s, options.log_interval_s)
        joined = cast(coordinator_pb2.JoinResponse, reply)
        self.member, self.name, self.rank, self.job = joined.member, joined.name, joined.rank, joined.job
        self.expected_workers = joined.expected_workers
        await self._see(joined.view)
        if self._task is None:
            self._task = asyncio.create_task(self._keep())

    async def ask(self, method: str, request: Callable[[], Message], timeout_s: float) -> Message:
        """Call the coordinator, over again while none answers. ``request`` is made anew each time.

        Raises UnavailableError after ``join_timeout_s`` without one, DeadlineError if one is there but too slow, what
        it refuses with, and whatever has ended this session meanwhile.
        """

        async def attempt() -> Message:
            self.check()
            try:
                return await self.channel.call(method, request(), timeout=timeout_s)
            except errors.NotMemberError as error:  # the session joins again meanwhile, under another number
                self._expelled.set()
                raise errors.UnavailableError(str(error)) from error

        return await persist(attempt, self.channel, self.options.join_timeout_s, self.options.log_interval_s)

    def _join_request(self) -> coordinator_pb2.JoinRequest:
        options = self.options
        request = coordinator_pb2.JoinRequest(
            job=self.job,
            role=options.role,
            protocol=PROTOCOL,
            versions=versions(),
            pid=options.pid,
            address=options.address,
            index=options.index,
            slices_per_step=options.slices_per_step,
            seed=options.seed,
            incarnation=self.incarnation,
            beside_worker=options.beside_worker,
            restart_command=restart_command(),
            metrics_url=options.metrics_url(),
            host=options.host,
            key=options.key,
        )
        if self.member:
            request.index = self.rank
        else:
            request.replaces.extend(options.replaces)
        request.holds, request.timeline = options.shard()
        request.term = self._newest_term()
        if self.view.state not in _NOT_BEGUN:
            request.beginning = self.view.beginning
        if options.consistency is not None and self.member == 0:
            request.mode = mode_to_proto(options.consistency.mode)
            if options.consistency.mode is Mode.ASYNC and options.consistency.staleness is not None:
                request.staleness = options.consistency.staleness
        return request

    # ---- the stream of reports and views

    async def _keep(self) -> None:
        options, failures = self.options, 0
        while True:
            self._stream_term = None
            self.sessions += 1
            try:
                async with aclosing(self.channel.session("Coordinator.Session", self._requests())) as replies:
                    limit_s: float | None = _FIRST_S
                    while (reply := await self._next(replies, limit_s)) is not None:
                        if failures:
                            log.info("the coordinator is back", address=self.channel.address)
                        failures, self.lost_at, limit_s = 0, None, None
                        response = cast(coordinator_pb2.SessionResponse, reply)
                        await self._see(response.view)
                        if self._tracer is not None and options.role != types_pb2.ROLE_OBSERVER:
                            self._tracer.hear(response.trace)
                if self._leaving.is_set() and self._said_goodbye:
                    return
                raise errors.UnavailableError("the coordinator closed the session")
            except errors.FencedError:
                if self._leaving.is_set() and not (self._farewell.finished or self._farewell.ended):
                    return
                log.warning(f"{self.name} was given up for lost; it joins again")
                try:
                    await self.join()
                    self._expelled.clear()
                except errors.ParamServerError as error:
                    await self._fail(error)
                    return
            except errors.RetryableError as error:
                if failures == 0 and not self._leaving.is_set():
                    log.warning("lost the coordinator; training goes on", error=str(error))
                self.lost_at = self.lost_at or time.monotonic()
                await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
                failures += 1
            except errors.ParamServerError as error:
                await self._fail(error)
                return
            except Exception:  # the top of a task: without a session this process is no member
                log.exception("the session broke; it is opened again")
                self.lost_at = self.lost_at or time.monotonic()
                await asyncio.sleep(RETRY_S[-1])
                failures += 1

    async def _next(self, replies: AsyncGenerator[Message, None], limit_s: float | None) -> Message | None:
        """The next reply, None at the end of the stream.

        Raises UnavailableError if none comes within ``limit_s``, FencedError once a call was answered that this process
        is no member: the coordinator may have forgotten it without the stream telling.
        """
        reading = asyncio.ensure_future(anext(replies, None))
        expelled = asyncio.ensure_future(self._expelled.wait())
        try:
            await asyncio.wait({reading, expelled}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
            if self._expelled.is_set():
                raise errors.FencedError("this process is not a member")
            raise errors.UnavailableError(f"the coordinator took the session, but said nothing for {limit_s} s")
        finally:
            for task in (reading, expelled):
                task.cancel()
            await asyncio.wait({reading, expelled})

    async def _requests(self) -> AsyncIterator[coordinator_pb2.SessionRequest]:
        told = False
        server = self.options.role == types_pb2.ROLE_SERVER
        address, key = (self.options.address, self.options.key) if server else ("", b"")
        while True:
            if told and self._stream_term is not None:
                self._check_term(self._stream_term)
            # A coordinator that was replaced hears of the new term from a server's report, and is left with the next.
            told = self._stream_term is not None and self._stream_term < self._newest_term()
            leaving = self._leaving.is_set()
            request = self._report()
            if leaving:
                request.MergeFrom(self._farewell)
            request.member, request.leaving, request.address, request.key = self.member, leaving, address, key
            address, key = "", b""
            yield request
            if leaving:
                self._said_goodbye = True
                return
            try:
                async with asyncio.timeout(_REPORT_S):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            self._hurry.clear()

    def report_now(self) -> None:
        """Send the next report at once."""
        self._hurry.set()

    async def leave(
        self,
        timeout_s: float = 2.0,
        *,
        finished: bool = False,
        ended: bool = False,
        not_main: bool = False,
        failure: str = "",
    ) -> bool:
        """Say goodbye, and why, and end the stream. Tries for ``timeout_s`` to find a coordinator that hears it.

        Returns whether one has heard it.
        """
        if self._tracer is not None:
            await self._tracer.close()
        self._farewell = coordinator_pb2.SessionRequest(
            finished=finished, ended=ended, not_main=not_main, failure=failure[:1000]
        )
        self._leaving.set()
        self._hurry.set()
        heard = True
        if self._task is not None:
            done, _ = await asyncio.wait([self._task], timeout=min(timeout_s, self.options.log_interval_s))
            if not done and timeout_s > self.options.log_interval_s:
                log.info("waiting for the coordinator, to tell it that this process is done")
                done, _ = await asyncio.wait([self._task], timeout=timeout_s - self.options.log_interval_s)
            heard = bool(done)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        async with self._changed:  # no view comes any more
            self.editions += 1
            self._changed.notify_all()
        return heard

    # ---- the view

    def _newest_term(self) -> int:
        return max(self.view.term, self.options.term())

    def _check_term(self, term: int) -> None:
        newest = self._newest_term()
        if term < newest:
            rotate = getattr(self.channel, "rotate", None)
            if rotate is not None:
                rotate()
            raise errors.UnavailableError(f"that coordinator (term {term}) was replaced (term {newest})")

    async def _see(self, view: types_pb2.View) -> None:
        self._stream_term = view.term
        self._check_term(view.term)
        if view.term == self.view.term and view.generation < self.view.generation:
            return
        if self.member in view.restarting:
            await self._fail(
                errors.RestartError(f"{self.name} was asked to restart: it ends, and is to be started again")
            )
        elif self.member in view.draining:
            await self._fail(errors.EndedError(f"{self.name} was asked to leave, and leaves"))
        async with self._changed:
            self.view = view
            self.editions += 1
            self._changed.notify_all()

    _said_goodbye = False
    # The term of the coordinator at the other end of the stream, once it has said so.
    _stream_term: int | None = None

    async def _fail(self, error: errors.ParamServerError) -> None:
        self.failure = error
        async with self._changed:
            self.editions += 1
            self._changed.notify_all()

    async def changed(self, seen: int) -> int:
        """Wait for a newer view than number ``seen``; returns its number."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.editions != seen)
            return self.editions

    @property
    def goes_on(self) -> bool:
        """True if :meth:`check` would not raise."""
        return self.failure is None and self.view.state not in _OVER

    def check(self) -> types_pb2.View:
        """The present view; raises if the job has failed or this process is out of it."""
        if self.failure is not None:
            raise self.failure
        if self.view.state == types_pb2.JOB_STATE_FAILED:
            raise errors.JobFailedError(self.view.reason or "the job has failed")
        if self.view.state in (types_pb2.JOB_STATE_DONE, types_pb2.JOB_STATE_STOPPED):
            raise errors.EndedError(self.view.reason or "the job has ended")
        return self.view

    def consistency(self) -> Consistency:
        """The mode that the coordinator has announced."""
        return consistency_from_proto(self.view.consistency)

    async def wait_until(
        self, ready: Callable[[types_pb2.View], bool], what: Callable[[types_pb2.View], str], timeout_s: float
    ) -> types_pb2.View:
        """Wait for a view that is ``ready``, saying now and then ``what`` is waited for; DeadlineError names it."""
        deadline = time.monotonic() + timeout_s
        while not ready(view := self.check()):
            left = deadline - time.monotonic()
            if left <= 0:
                raise errors.DeadlineError(f"waited {timeout_s:g} s for {what(view)}")
            try:
                async with asyncio.timeout(min(left, self.options.log_interval_s)):
                    await self.changed(self.editions)
            except TimeoutError:
                log.info(f"waiting for {what(self.view)}")
        return view
