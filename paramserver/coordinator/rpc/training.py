"""Calls of workers that are members: model, data, slices, loads, and the end of their scripts."""

from __future__ import annotations

import structlog

from paramserver import errors
from paramserver.coordinator.admission import check_member
from paramserver.coordinator.history.securing import make_safe
from paramserver.coordinator.job import Job
from paramserver.v1 import coordinator_pb2
from paramserver.wire.bounds import counting
from paramserver.wire.messages import data_from_proto

log = structlog.get_logger("paramserver.coordinator")


class Training:
    """Calls of workers. Each raises NotMemberError for a process that is no member."""

    def __init__(self, job: Job) -> None:
        self._job = job

    async def register_model(
        self, request: coordinator_pb2.RegisterModelRequest
    ) -> coordinator_pb2.RegisterModelResponse:
        """Register a model: the first one counts, and later ones must be equal to it. Waits for all servers."""
        check_member(self._job, request.member)
        if not await self._job.changes.wait_until(
            lambda: self._job.loads.may_begin(request.member), self._job.options.max_idle_s
        ):
            raise errors.DeadlineError("the other workers wait in ctx.load, and do not come to go on")
        return await self._job.registry.register(request)

    async def register_data(self, request: coordinator_pb2.RegisterDataRequest) -> coordinator_pb2.RegisterDataResponse:
        """Register a data set: the first one counts, and later ones must have its size and slices."""
        check_member(self._job, request.member)
        data = data_from_proto(request.data)
        known = self._job.schedule.data
        if known is not None and known != data:
            if not data.slice_size or not known.slice_size:
                raise errors.DataError(
                    "this job computes slices of a data set: who has no prepared loader of it can only pull"
                    if known.slice_size
                    else "this job has begun without a data set: prepare the loader before the first optimizer.step()"
                )
            raise errors.DataError(
                f"this worker's data set has {data.samples} samples in slices of {data.slice_size}, the one registered "
                f"first has {known.samples} in slices of {known.slice_size} (or another number of "
                "turns, drop_last, shuffle or accumulate): all workers must read the same data"
            )
        if known is None:
            self._job.schedule.register(data)
            await self._job.leasing.register(data)
            self._job.write_down()
        await self._job.keeping.settled()
        return coordinator_pb2.RegisterDataResponse()

    async def initialize_done(
        self, request: coordinator_pb2.InitializeDoneRequest
    ) -> coordinator_pb2.InitializeDoneResponse:
        """A worker has uploaded version 0 to all shards: publish it."""
        check_member(self._job, request.member)
        await self._job.registry.initialized(request)
        return coordinator_pb2.InitializeDoneResponse()

    async def lease(self, request: coordinator_pb2.LeaseRequest) -> coordinator_pb2.LeaseResponse:
        """Lease slices in asynchronous mode. The call may be parked until there are some."""
        check_member(self._job, request.member)
        return await self._job.leasing.lease(request)

    async def begin(self, request: coordinator_pb2.BeginRequest) -> coordinator_pb2.BeginResponse:
        """A worker is about to compute a slice, after another one has died."""
        check_member(self._job, request.member)
        return coordinator_pb2.BeginResponse(skip=not await self._job.poison.begin(request.member, request.slice))

    async def load(self, request: coordinator_pb2.LoadRequest) -> coordinator_pb2.LoadResponse:
        """A worker has come to a ctx.load; see `coordinator.history.loads`."""
        check_member(self._job, request.member)
        return await self._job.loads.call(request)

    async def agree(self, request: coordinator_pb2.AgreeRequest) -> coordinator_pb2.AgreeResponse:
        """A worker gives a number on which all workers are to agree; see `coordinator.work.agreeing`."""
        check_member(self._job, request.member)
        return await self._job.agreeing.agree(request)

    async def evaluate(self, request: coordinator_pb2.EvaluateRequest) -> coordinator_pb2.EvaluateResponse:
        """A worker takes part in ctx.evaluate; see `coordinator.work.evaluating`. The call may be parked."""
        check_member(self._job, request.member)
        return await self._job.evaluating.evaluate(request)

    async def keep(self, request: coordinator_pb2.KeepRequest) -> coordinator_pb2.KeepResponse:
        """A worker brings the state of its registered objects; see `coordinator.work.registered`."""
        check_member(self._job, request.member)
        return await self._job.registered.keep(request)

    async def kept(self, request: coordinator_pb2.KeptRequest) -> coordinator_pb2.KeptResponse:
        """A worker asks for the state of registered objects."""
        check_member(self._job, request.member)
        return await self._job.registered.kept(request)

    async def finish(self, request: coordinator_pb2.FinishRequest) -> coordinator_pb2.FinishResponse:
        """A worker is through: return when its last version is a checkpoint, or when there is more to do.

        At the end of an epoch: return when its version is copied, if that may become one of the best checkpoints.
        """
        check_member(self._job, request.member)
        if request.timeline != self._job.timeline:
            return coordinator_pb2.FinishResponse(rolled_back=True)
        await self._check_reached(request.version)
        if counting("the epoch at whose end the worker is", request.epoch):
            return await self._job.checkpoints.best.at_end_of_epoch(request)
        try:
            await make_safe(self._job, self._job.checkpoints, request.version)
        except errors.RolledBackError:
            return coordinator_pb2.FinishResponse(rolled_back=True)
        return coordinator_pb2.FinishResponse()

    async def _check_reached(self, version: int) -> None:
        """Raise ProtocolError for a version that no server has, since its checkpoint would never come."""
        if version <= self._job.reports.newest_version():
            return
        try:
            newest = max((stats.version for stats in await self._job.shards.stats()), default=0)
        except errors.RetryableError:
            return
        if version > newest:
            raise errors.ProtocolError(f"version {version} does not exist yet: the newest is {newest}")

    async def snapshot(self, request: coordinator_pb2.SnapshotRequest) -> coordinator_pb2.SnapshotResponse:
        """Asynchronous mode: versions of all servers that hold the same contributions."""
        check_member(self._job, request.member)
        if request.timeline != self._job.timeline:
            raise errors.RolledBackError("the job has gone back to a checkpoint")
        return await self._job.snapshots.take(request.timeline)
