"""This worker's tie to the coordinator, and how its script's thread waits for work in the background."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

from paramserver import errors
from paramserver.membership.session import JoinOptions, Session
from paramserver.transport.base import Channel
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.worker.background import Background

T = TypeVar("T")

# How long a pull that others have seen answered may take here before a new membership interrupts it.
_NEARLY_S = 0.1


class Member:
    """A member of a job. ``report`` tells what the coordinator is to hear of this worker, again and again."""

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
        self._coordinator = coordinator
        self._options = options
        self._report = report
        self._session: Session | None = None
        # The history of the job that this worker has followed; None before it has met the servers.
        self._timeline: int | None = None
        # Slices cannot be moved from one worker to another.
        self._fixed_places = False
        self._waiting_for = ""
        # Calls of the script that wait just now.
        self._waiting = 0

    # ---- membership

    def join(self) -> None:
        """Become a member of the job; raises what the coordinator refuses with."""

        async def go() -> None:
            self._session = Session(self._coordinator, self._options, self._report)
            await self._session.join()

        self.run(go())

    def promote(self) -> None:
        """An observer becomes a worker: from now on it is given slices, and others wait for it."""
        if self._options.role != types_pb2.ROLE_OBSERVER:
            return

        async def go() -> None:
            former = self.session
            self._options = replace(self._options, role=types_pb2.ROLE_WORKER)
            self._session = Session(former.channel, self._options, self._report)
            await self._session.join()
            await former.leave()

        self.run(go())

    @property
    def joined(self) -> bool:
        """Whether :meth:`join` has been called."""
        return self._session is not None

    @property
    def session(self) -> Session:
        """The tie to the coordinator; exists after :meth:`join`."""
        assert self._session is not None, "join first"
        return self._session

    @property
    def options(self) -> JoinOptions:
        """As what this process has joined."""
        return self._options

    def keep_place(self, fixed: bool) -> None:
        """``fixed``: slices cannot be moved from one worker to another."""
        self._fixed_places = fixed

    @property
    def generation(self) -> tuple[int, ...]:
        """Which membership the view at hand has: the term of its coordinator, the generation, who is stalled."""
        view = self.session.view
        return view.term, view.generation, *(() if self._fixed_places else view.stalled)

    def place(self) -> tuple[int, int]:
        """(position among the workers that get on, how many there are); position -1: this worker is none of them.

        Where slices cannot be moved, those that get nowhere have their share, too.
        """
        view = self.session.view
        stalled = () if self._fixed_places else view.stalled
        members = [worker.member for worker in view.workers if worker.member not in stalled]
        mine = self.session.member
        return (members.index(mine) if mine in members else -1), len(members)

    # ---- the job's history

    def follows(self, timeline: int) -> None:
        """This worker has met the servers of this timeline."""
        self._timeline = timeline

    def rolled_back(self) -> bool:
        """Whether the job has gone back to a checkpoint, and this worker has not followed yet."""
        if self._timeline is None or self._session is None:
            return False
        view = self._session.view
        return view.timeline > self._timeline or view.state == types_pb2.JOB_STATE_RECOVERING

    def check_timeline(self) -> None:
        """Raises RolledBackError if the job has gone back, and this worker has not followed yet."""
        if self.rolled_back():
            raise errors.RolledBackError("the job goes back to a checkpoint")

    def check(self) -> None:
        """Raises what keeps this worker from going on where it is."""
        self.session.check()
        self.check_timeline()

    # ---- waiting

    @property
    def waiting_for(self) -> str:
        """For whom the script waits, as `status` shows it; empty if for nobody."""
        return self._waiting_for

    def waits_for(self, whom: str) -> None:
        """The script waits for somebody, or (if that is empty) for nobody any more."""
        self._waiting_for = whom

    @property
    def waits(self) -> bool:
        """Whether a call of the script waits just now."""
        return self._waiting > 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Meanwhile it is not the script that takes the time."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def stalls(self, whom: str) -> None:
        """The script, in the middle of its own work, waits for somebody, or (if that is empty) goes on."""
        self._waiting_for = whom
        self._waiting += 1 if whom else -1

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin work in the background."""
        return self.background.submit(work)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run in the background and wait, whatever becomes of the job meanwhile."""
        with self.waiting():
            return self.background.run(work, timeout_s)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run in the background and wait as :meth:`wait` does."""
        return self.wait(self.submit(work))

    def wait(
        self,
        future: concurrent.futures.Future[T],
        until: Callable[[], bool] | None = None,
        last_s: float = 0.0,
    ) -> T:
        """The result of background work. Gives it up (returning None) when ``until`` holds.

        Raises what the work has failed with, what has ended the job, RolledBackError if the job goes back. A worker
        that is asked to leave still waits ``last_s`` for it.
        """
        if future.cancelled():
            self.check()  # says why
        if future.done():
            return future.result()
        if self.run(self._watch(future, until, last_s)):
            return future.result()
        future.cancel()
        return cast(T, None)

    async def _watch(
        self, future: concurrent.futures.Future[Any], until: Callable[[], bool] | None, last_s: float
    ) -> bool:
        """True when it is done, False when ``until`` holds; raises if the job does not go on here."""
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
                    # Often somebody left because the version is out already: then there is nothing to take over.
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
                inner.exception()  # it is raised from the future; asyncio would say that nobody has looked
