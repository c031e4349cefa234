"""Asynchronous mode: cuts for readers. A cut is one state of all shards; it is made when a reader asks.

Readers that ask at about the same time get the same cut. Between two cuts servers work for ten times as long as a cut
takes, so that workers lose at most a tenth of their speed, with any number of readers.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Protocol

from paramserver import errors
from paramserver.coordinator import ports
from paramserver.core.versions.consistency import Mode
from paramserver.core.versions.counted import united
from paramserver.v1 import coordinator_pb2, shard_pb2
from paramserver.wire.messages import slices_from_proto, slices_to_proto

_REST = 10
# How long a cut waits for a contribution that only some servers have: from the first to the last attempt.
_PATIENCE_S = (0.25, 4.0)


class _Job(ports.Stage, ports.Commands, Protocol):
    pass


class Snapshots:
    """The cuts of one job."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._coming: asyncio.Task[coordinator_pb2.SnapshotResponse] | None = None
        self._turn = asyncio.Lock()
        self._not_before = 0.0
        self._patience_s = _PATIENCE_S[0]

    async def take(self, timeline: int) -> coordinator_pb2.SnapshotResponse:
        """The versions of a cut that begins after this call, by server; or none, and which contributions are missing.

        Raises StaleViewError if the job is synchronous, where every version is a cut, RolledBackError if it goes back.
        """
        if self._coming is None or self._coming.done():
            self._coming = self._job.tasks.begin(self._next(timeline), awaited=True)
        return await asyncio.shield(self._coming)

    async def _next(self, timeline: int) -> coordinator_pb2.SnapshotResponse:
        async with self._turn:
            await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
            self._coming = None  # a reader that asks from now on gets a later cut
            begun = time.monotonic()
            try:
                return await self._cut(timeline)
            finally:
                self._not_before = time.monotonic() + _REST * (time.monotonic() - begun)

    async def _cut(self, timeline: int) -> coordinator_pb2.SnapshotResponse:
        job = self._job
        if job.consistency.mode is not Mode.ASYNC:
            raise errors.StaleViewError("the job is synchronous now: ask for a version")
        command = shard_pb2.CutRequest(
            job=job.options.job, timeline=timeline, term=job.term, number=secrets.randbits(63) | 1
        )
        try:
            paused = await self._tell(command, shard_pb2.CutRequest.STEP_PAUSE)
            target = united([slices_from_proto(reply.counted) for reply in paused])
            command.slices.extend(slices_to_proto(target))
            command.wait_s = self._patience_s
            reached = await self._tell(command, shard_pb2.CutRequest.STEP_REACH)
        except BaseException:
            del command.slices[:]
            await asyncio.gather(self._tell(command, shard_pb2.CutRequest.STEP_GO_ON), return_exceptions=True)
            raise
        lacking = [f"server-{index}: {reply.waiting_for}" for index, reply in enumerate(reached) if not reply.taken]
        least_s, most_s = _PATIENCE_S
        self._patience_s = min(most_s, 2 * self._patience_s) if lacking else least_s
        if lacking:
            return coordinator_pb2.SnapshotResponse(waiting_for="; ".join(lacking)[:500])
        return coordinator_pb2.SnapshotResponse(versions=[reply.version for reply in reached])

    async def _tell(
        self, command: shard_pb2.CutRequest, step: shard_pb2.CutRequest.Step
    ) -> Sequence[shard_pb2.CutResponse]:
        request = shard_pb2.CutRequest()
        request.CopyFrom(command)
        request.step = step
        # A server that is missing must not keep the others from going on.
        present = step == shard_pb2.CutRequest.STEP_GO_ON
        return await self._job.shards.ask("Shard.Cut", request, shard_pb2.CutResponse, present=present)
