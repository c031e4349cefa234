"""This worker's session with the coordinator, and how the script's thread waits for work in the background."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from paramserver import errors
from paramserver.membership.joining import JoinOptions
from paramserver.membership.pulse import Pulse
from paramserver.membership.session import Session
from paramserver.tracing import Recorder
from paramserver.transport.base import Channel
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.worker.background import Background
from paramserver.worker.job.phases import RECEIVE, Phases

T = TypeVar("T")

# How long a pull that servers have answered elsewhere may still take here before a new membership interrupts it.
_NEARLY_S = 0.1


class Member:
    """A member of a job. ``report`` makes this worker's next report to the coordinator."""

    def __init__(
        self,
        background: Background,
        coordinator: Channel,
        options: JoinOptions,
        report: Callable[[], coordinator_pb2.SessionRequest],
        wait_timeout_s: float,
    ) -> None:
        self.background = background
        self.wait_timeout_s = wait_timeout_s
        self._report = report
        # What this worker does, while a trace is wanted.
        self.trace = Recorder()
        # The session with the coordinator; a member after :meth:`join`.
        self.session = Session(coordinator, options, report, self.trace)
        # The history of the job that this worker has followed; None before it has met the servers.
        self._timeline: int | None = None
        # Slices cannot be moved from one worker to another.
        self._fixed_places = False
        # The member for which the script waits, as `status` shows it; empty if the script does not wait.
        self.waiting_for = ""
        # Calls of the script that wait just now.
        self._waiting = 0
        # Where the time of the script goes.
        self._pulse = Pulse()
        self.phases = Phases(self._pulse, self.trace)
        # The script waits in the middle of its own work: the phase it was in.
        self._stalled_in = RECEIVE

    # ---- membership

    def join(self) -> None:
        """Become a member of the job; raises the coordinator's refusal."""
        self.run(self.session.join())
        self.submit(self._pulse.run())

    def promote(self) -> None:
        """An observer becomes a worker: from now on it is given slices, and others wait for it."""
        former = self.session
        if former.options.role != types_pb2.ROLE_OBSERVER:
            return

        async def go() -> None:
            options = replace(former.options, role=types_pb2.ROLE_WORKER)
            self.session = Session(former.channel, options, self._report, self.trace)
            await self.session.join()
            await former.leave()

        self.run(go())

    def keep_place(self, fixed: bool) -> None:
        """``fixed``: slices cannot be moved from one worker to another."""
        self._fixed_places = fixed

    @property
    def generation(self) -> tuple[int, ...]:
        """The membership of the view at hand: the term of its coordinator, the generation, the stalled workers."""
        view = self.session.view
        return view.term, view.generation, *(() if self._fixed_places else view.stalled)

    def place(self) -> tuple[int, int]:
        """(position among the workers that are not stalled, how many there are); position -1: this worker is stalled.

        Where slices cannot be moved, stalled workers have their share, too.
        """
        members, mine = [worker.member for worker in self._placed()], self.session.member
        return (members.index(mine) if mine in members else -1), len(members)

    def placed(self) -> list[str]:
        """The names of the workers that have a share, by place."""
        return [worker.name for worker in self._placed()]

    def _placed(self) -> list[types_pb2.WorkerInfo]:
        view = self.session.view
        stalled = () if self._fixed_places else view.stalled
        return [worker for worker in view.workers if worker.member not in stalled]

    # ---- the job's history

    def follows(self, timeline: int) -> None:
        """This worker has met the servers of this timeline."""
        self._timeline = timeline

    def rolled_back(self) -> bool:
        """Whether the job has gone back to a checkpoint, and this worker has not followed yet."""
        if self._timeline is None:
            return False
        view = self.session.view
        return view.timeline > self._timeline or view.state == types_pb2.JOB_STATE_RECOVERING

    def check_timeline(self) -> None:
        """Raises RolledBackError if the job has gone back, and this worker has not followed yet."""
        if self.rolled_back():
            raise errors.RolledBackError("the job goes back to a checkpoint")

    def check(self) -> None:
        """Raises the error that keeps this worker from going on where it is."""
        self.session.check()
        self.check_timeline()

    # ---- waiting

    def waits_for(self, whom: str) -> None:
        """The script waits for ``whom``; empty: it waits no longer."""
        self.waiting_for = whom

    @property
    def waits(self) -> bool:
        """Whether a call of the script waits just now."""
        return self._waiting > 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of a call in which the script waits: meanwhile the script is not at work."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def stalls(self, whom: str) -> None:
        """The script, in the middle of its own work, waits for ``whom``; empty: it goes on."""
        self.waiting_for = whom
        self._waiting += 1 if whom else -1
        if whom:
            self._stalled_in = self.phases.enter(RECEIVE)
            self.phases.waited(0, whom)
        else:
            self.phases.enter(self._stalled_in)

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin work in the background."""
        return self.background.submit(work)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run in the background and wait, even if the job fails or goes back meanwhile."""
        began = self.trace.now() if self.trace.script else 0
        with self.waiting():
            try:
                return self.background.run(work, timeout_s)
            finally:
                if began:
                    self.phases.waited(began, self.waiting_for)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run in the background and wait as :meth:`wait` does."""
        return self.wait(self.submit(work))

    def wait(self, future: concurrent.futures.Future[T], last_s: float = 0.0) -> T:
        """The result of background work.

        Raises the error of the work, the error that has ended the job, RolledBackError if the job goes back. A worker
        that is asked to leave still waits ``last_s`` seconds for the result.
        """
        self._wait(future, None, last_s)
        return future.result()

    def wait_unless(self, future: concurrent.futures.Future[T], until: Callable[[], bool]) -> T | None:
        """As :meth:`wait`, but cancels the work and returns None as soon as ``until`` holds."""
        if self._wait(future, until, 0.0):
            return future.result()
        future.cancel()
        return None

    def _wait(self, future: concurrent.futures.Future[T], until: Callable[[], bool] | None, last_s: float) -> bool:
        if future.cancelled():
            self.check()  # says why
        return future.done() or self.run(self._watch(future, until, last_s))

    async def _watch(
        self, future: concurrent.futures.Future[Any], until: Callable[[], bool] | None, last_s: float
    ) -> bool:
        """True when the work is done, False when ``until`` holds; raises if the job does not go on here."""
        inner: asyncio.Future[Any] = asyncio.wrap_future(future)
        changed: asyncio.Task[int] | None = None
        try:
            while True:
                seen = self.session.editions
                try:
                    self.session.check()
                except errors.EndedError:
                    await asyncio.wait([inner], timeout=last_s)
                    raise
                self.check_timeline()
                if until is not None and until():
                    # Often a worker left since the version is published: then its slices need not be taken over.
                    await asyncio.wait([inner], timeout=_NEARLY_S)
                    return inner.done()
                changed = asyncio.ensure_future(self.session.changed(seen))
                await asyncio.wait([inner, changed], return_when=asyncio.FIRST_COMPLETED)
                if inner.done():
                    return True
        finally:
            if changed is not None:
                changed.cancel()
            if not inner.done():
                inner.cancel()
            elif not inner.cancelled():
                inner.exception()  # the caller raises it; without this line asyncio would warn
