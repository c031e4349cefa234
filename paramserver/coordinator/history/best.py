"""The best checkpoints of a job by a value that its script logs (``checkpoint.best_metric``).

`core/records/best.py` ranks them. Workers tell when they are at the end of an epoch, before they go on: the servers
copy that version, so that the value which the script measures then belongs to a checkpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog

from paramserver import errors
from paramserver.checkpoint import best as file
from paramserver.checkpoint import catalog
from paramserver.checkpoint.manifest import checkpoint_name
from paramserver.checkpoint.place import Place
from paramserver.coordinator import ports
from paramserver.coordinator.options import CheckpointOptions
from paramserver.coordinator.work.shards import room
from paramserver.core.records.best import Best
from paramserver.core.records.steps import StepValues
from paramserver.core.versions.consistency import Mode
from paramserver.v1 import coordinator_pb2

log = structlog.get_logger("paramserver.coordinator")

_EPOCHS = 1000
# For so long workers wait at the end of an epoch for earlier checkpoints, which are still being written.
_ROOM_S, _LOOK_S = 2.0, 0.02


class _Job(ports.Stage, ports.Commands, Protocol):
    @property
    def registered(self) -> ports.KeepingRegistered: ...


class BestCheckpoints:
    """``cut`` has all shards copy the version at which they stand, and returns it."""

    def __init__(
        self, job: _Job, place: Place | None, options: CheckpointOptions, cut: Callable[[], Awaitable[int]]
    ) -> None:
        self._job, self._options, self._cut = job, options, cut
        self.place = place if options.best_metric else None
        self._core = Best(options.best_mode == "min", options.best_keep)
        # By timeline and epoch, the version that was copied at its end; 0: none could be.
        self._ends: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._cutting, self._writing = asyncio.Lock(), asyncio.Lock()
        # Whether the file of earlier coordinators was read; what is in the file.
        self._read = False
        self._written: list[file.Ranked] | None = None

    def undone(self, version: int) -> None:
        """The job goes on from ``version``, on another timeline."""
        self._core.undone(version)

    async def at_end_of_epoch(self, request: coordinator_pb2.FinishRequest) -> coordinator_pb2.FinishResponse:
        """A worker is at the end of an epoch: have its version copied, and return which one it is."""
        job, end = self._job, (request.timeline, request.epoch)
        if self.place is None:
            return coordinator_pb2.FinishResponse()
        async with self._cutting:
            if request.timeline != job.timeline:
                return coordinator_pb2.FinishResponse(rolled_back=True)
            if end not in self._ends:
                self._ends[end] = await self._copy(request.version)
                while len(self._ends) > _EPOCHS:
                    self._ends.popitem(last=False)
        return coordinator_pb2.FinishResponse(version=self._ends[end])

    async def _copy(self, version: int) -> int:
        """Have the servers copy what they have; 0 if they are past the version, or it cannot be saved."""
        job, together = self._job, self._job.consistency.mode is Mode.SYNC
        try:
            if together and (version % self._options.multiple or await self._past(version)):
                log.info("the version at the end of this epoch is not saved", version=version)
                return 0
            if not await self._room():
                log.warning("no checkpoint at the end of an epoch: earlier ones are still being written")
                return 0
            if together:
                job.registered.named(version)
            made = await self._cut()
        except errors.ParamServerError as error:
            log.warning("no checkpoint could be made at the end of an epoch; training goes on", error=str(error))
            return 0
        self._core.awaits((job.timeline, made), time.monotonic())
        return made

    async def _room(self) -> bool:
        """Whether the servers have room for another copy, or get it soon."""
        deadline = time.monotonic() + _ROOM_S
        while not (free := await room(self._job)) and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
        return free

    async def _past(self, version: int) -> bool:
        return any(one.version != version for one in await self._job.shards.stats())

    def hear(self, steps: Sequence[StepValues]) -> None:
        """These steps of the records are closed."""
        if self.place is None:
            return
        metric = self._options.best_metric
        heard = [self._core.hear(step.place, step.values[metric]) for step in steps if metric in step.values]
        if any(heard):
            self._job.tasks.begin(self.write())

    async def saved(self, timeline: int, version: int) -> None:
        """This version is a checkpoint now."""
        if self.place is not None and self._core.saved((timeline, version)):
            await self.write()

    def removed(self, names: Sequence[str]) -> None:
        """These checkpoints are gone."""
        self._core.removed(map(catalog.order, names))

    async def kept(self) -> set[str]:
        """The checkpoints that are not to be removed."""
        if self.place is None:
            return set()
        await self._restore()
        return {checkpoint_name(version, timeline) for timeline, version in self._core.kept(time.monotonic())}

    async def write(self) -> None:
        """Write down which checkpoints are the best ones, if that has changed."""
        if self.place is None:
            return
        async with self._writing:
            await self._restore()
            ranked = [self._ranked(*place, value) for place, value in self._core.ranking()]
            if ranked == self._written:
                return
            try:
                await asyncio.to_thread(file.write, self.place, ranked)
            except (errors.ParamServerError, OSError) as error:
                log.warning("it could not be written down which checkpoints are the best", error=str(error))
                return
            if ranked and (not self._written or ranked[0] != self._written[0]):
                best = ranked[0]
                log.info("the best checkpoint", saved=best.name, **{best.metric: best.value})
            self._written = ranked

    def _ranked(self, timeline: int, version: int, value: float) -> file.Ranked:
        holding = self._options.holding
        history = holding.histories[0] if holding is not None and holding.histories else ""
        name = checkpoint_name(version, timeline)
        known = next((one.history for one in self._written or () if one.name == name), history)
        return file.Ranked(name, known, self._options.best_metric, value)

    async def _restore(self) -> None:
        """Take over what earlier coordinators, or the run that this one goes on from, have written down."""
        if self._read:
            return
        self._read = True
        assert self.place is not None
        ranked = await asyncio.to_thread(self._found, self.place)
        self._written = ranked
        self._core.restore({catalog.order(one.name): one.value for one in ranked})

    def _found(self, place: Place) -> list[file.Ranked]:
        there = {one.name: one.history for one in catalog.complete(place, self._options.ours)}
        metric = self._options.best_metric
        return [r for r in file.read(place) if r.metric == metric and there.get(r.name) == r.history]
