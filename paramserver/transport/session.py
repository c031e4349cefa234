"""A worker's tie to the coordinator: joins, reports, and keeps the view of the cluster up to date."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import cast

import structlog

from paramserver import errors
from paramserver.core.consistency import Consistency, Mode
from paramserver.transport.base import Channel
from paramserver.transport.messages import PROTOCOL, consistency_from_proto, mode_to_proto
from paramserver.v1 import coordinator_pb2, types_pb2

log = structlog.get_logger("paramserver.session")

_REPORT_S = 0.5
_RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """What a worker says of itself. ``consistency`` None: it takes whatever the job runs."""

    role: types_pb2.Role = types_pb2.ROLE_WORKER
    job: str = ""
    consistency: Consistency | None = None
    slices_per_step: int = 0
    seed: int | None = None
    index: int | None = None
    pid: int = 0
    address: str = ""
    join_timeout_s: float = 180.0
    log_interval_s: float = 5.0


class Session:
    """Membership of one process. Lives in one event loop."""

    def __init__(
        self,
        channel: Channel,
        options: JoinOptions,
        report: Callable[[], coordinator_pb2.SessionRequest],
    ) -> None:
        self.channel = channel
        self.options = options
        self.member = 0
        self.name = ""
        self.rank = 0
        self.job = options.job
        self.expected_workers = 0
        self.view = types_pb2.View()
        self._report = report
        self._changed = asyncio.Condition()
        self._editions = 0
        self._task: asyncio.Task[None] | None = None
        self._leaving = asyncio.Event()
        self.failure: errors.ParamServerError | None = None

    # ---- joining

    async def join(self) -> None:
        """Become a member; retries until ``join_timeout_s`` while nobody answers, saying so."""
        deadline = time.monotonic() + self.options.join_timeout_s
        said = time.monotonic()
        for attempt in range(1_000_000):
            try:
                reply = await self.channel.call("Coordinator.Join", self._join_request(), timeout=30.0)
                break
            except errors.RetryableError as error:
                now = time.monotonic()
                if now >= deadline:
                    raise errors.UnavailableError(
                        f"no coordinator answered at {self.channel.address} within {self.options.join_timeout_s:g} s: "
                        "start one there, or correct cluster.coordinator"
                    ) from error
                if now - said >= self.options.log_interval_s:
                    said = now
                    log.info("waiting for the coordinator", address=self.channel.address)
                await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
        joined = cast(coordinator_pb2.JoinResponse, reply)
        self.member, self.name, self.rank, self.job = joined.member, joined.name, joined.rank, joined.job
        self.expected_workers = joined.expected_workers
        await self._see(joined.view)
        if self._task is None:
            self._task = asyncio.create_task(self._keep())

    def _join_request(self) -> coordinator_pb2.JoinRequest:
        options = self.options
        request = coordinator_pb2.JoinRequest(
            job=self.job,
            role=options.role,
            protocol=PROTOCOL,
            versions=_versions(),
            pid=options.pid,
            address=options.address,
            index=options.index,
            slices_per_step=options.slices_per_step,
            seed=options.seed,
        )
        if options.consistency is not None and self.member == 0:
            request.mode = mode_to_proto(options.consistency.mode)
            if options.consistency.mode is Mode.ASYNC and options.consistency.staleness is not None:
                request.staleness = options.consistency.staleness
        return request

    # ---- the stream of reports and views

    async def _keep(self) -> None:
        failures = 0
        while True:
            try:
                async for reply in self.channel.session("Coordinator.Session", self._requests()):
                    failures = 0
                    await self._see(cast(coordinator_pb2.SessionResponse, reply).view)
                if self._leaving.is_set():
                    return
                raise errors.UnavailableError("the coordinator closed the session")
            except errors.FencedError:
                log.warning("this process was given up for lost; it joins again", name=self.name)
                try:
                    await self.join()
                except errors.ParamServerError as error:
                    await self._fail(error)
                    return
            except errors.RetryableError as error:
                if self._leaving.is_set():
                    return
                if failures == 0:
                    log.warning("lost the coordinator; training goes on", error=str(error))
                await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
                failures += 1
            except errors.ParamServerError as error:
                await self._fail(error)
                return

    async def _requests(self) -> AsyncIterator[coordinator_pb2.SessionRequest]:
        while True:
            leaving = self._leaving.is_set()
            request = self._report()
            request.member, request.leaving = self.member, leaving
            yield request
            if leaving:
                return
            try:
                async with asyncio.timeout(_REPORT_S):
                    await self._leaving.wait()
            except TimeoutError:
                pass

    async def leave(self, timeout_s: float = 2.0) -> None:
        """Say goodbye and end the stream."""
        self._leaving.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=timeout_s)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # ---- the view

    async def _see(self, view: types_pb2.View) -> None:
        if view.generation < self.view.generation:
            return
        async with self._changed:
            self.view = view
            self._editions += 1
            self._changed.notify_all()

    async def _fail(self, error: errors.ParamServerError) -> None:
        self.failure = error
        async with self._changed:
            self._editions += 1
            self._changed.notify_all()

    @property
    def editions(self) -> int:
        """Rises with every view that arrives."""
        return self._editions

    async def changed(self, seen: int) -> int:
        """Wait for a newer view than number ``seen``; returns its number."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._editions != seen)
            return self._editions

    def check(self) -> types_pb2.View:
        """The present view; raises if the job has failed or this process is out of it."""
        if self.failure is not None:
            raise self.failure
        if self.view.state == types_pb2.JOB_STATE_FAILED:
            raise errors.JobFailedError(self.view.reason or "the job has failed")
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
                    await self.changed(self._editions)
            except TimeoutError:
                log.info("waiting", for_=what(self.view))
        return view


def _versions() -> dict[str, str]:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("paramserver", "torch", "grpcio", "protobuf"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    return found
