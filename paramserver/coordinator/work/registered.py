"""The state of objects that scripts have registered: workers bring it, checkpoints have it in a file of their own.

In synchronous mode a worker brings it at each version that servers copy, when the script asks for the next slice.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from paramserver import errors
from paramserver.checkpoint.manifest import REGISTERED, checkpoint_name
from paramserver.checkpoint.place import Place
from paramserver.coordinator import ports
from paramserver.coordinator.options import CheckpointOptions
from paramserver.core.job.membership import Role
from paramserver.core.versions.consistency import Mode
from paramserver.v1 import coordinator_pb2

log = structlog.get_logger("paramserver.coordinator")

MAX_BYTES = 512 << 20
PIECE_BYTES = 2 << 20
# How long the manifest of a version waits for a worker that brings the state at that version.
_WAIT_S = 300.0


class _Checkpoints(Protocol):
    options: CheckpointOptions
    place: Place | None


class _Job(ports.Stage, Protocol):
    @property
    def checkpoints(self) -> _Checkpoints: ...

    def write_down(self) -> None:
        """Write the record down, if it has changed."""


@dataclass(slots=True)
class _State:
    """The state of one registered object, as one worker brings or has brought it at one version."""

    number: int
    member: int
    version: int
    total: int
    data: bytearray = field(default_factory=bytearray)

    @property
    def whole(self) -> bool:
        return len(self.data) == self.total


class Registered:
    """The newest state, and that with which the present timeline began."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._count = 0
        self._newest: _State | None = None
        self._coming: _State | None = None
        # The file with which the timeline began, and its content, once somebody has asked for it.
        self._file = coordinator_pb2.RegisteredFile()
        self._base: _State | None = None
        # The files of the checkpoints that are being completed, by version.
        self._saved: dict[int, coordinator_pb2.RegisteredFile] = {}
        # Versions of which workers hear that servers copy them, beside those that are due.
        self._named: set[int] = set()

    # ---- workers

    async def keep(self, request: coordinator_pb2.KeepRequest) -> coordinator_pb2.KeepResponse:
        """A worker brings a piece. The first worker that begins with a version brings all of it."""
        refused = coordinator_pb2.KeepResponse(wanted=False)
        if request.timeline != self._job.timeline:
            return refused
        if not 0 < request.total <= MAX_BYTES or not 0 < len(request.data) <= 2 * PIECE_BYTES:
            raise errors.ProtocolError(f"a state of registered objects has 1 to {MAX_BYTES} bytes, in small pieces")
        known = max((one.version for one in (self._newest, self._live_coming()) if one is not None), default=-1)
        if request.offset == 0:
            if request.version <= known:
                return refused
            self._coming = _State(self._next(), request.member, request.version, request.total)
        coming = self._coming
        if coming is None or (coming.member, coming.version) != (request.member, request.version):
            return refused
        if request.offset == len(coming.data) and request.offset + len(request.data) <= coming.total:
            coming.data += request.data
        if coming.whole:
            self._newest, self._coming = coming, None
            await self._job.changes.notify()
        return coordinator_pb2.KeepResponse(wanted=True)

    def _live_coming(self) -> _State | None:
        coming = self._coming
        return coming if coming is not None and coming.member in self._job.members else None

    async def kept(self, request: coordinator_pb2.KeptRequest) -> coordinator_pb2.KeptResponse:
        """A worker asks for a piece. If the state has changed since then, it gets the first piece of the new one."""
        base = await self._load_base()
        found = base if request.base or self._newest is None else self._newest
        if found is None:
            return coordinator_pb2.KeptResponse()
        offset = request.offset if request.number == found.number else 0
        data = bytes(found.data[offset : offset + PIECE_BYTES])
        return coordinator_pb2.KeptResponse(number=found.number, version=found.version, total=found.total, data=data)

    def worker_gone(self, ident: int) -> None:
        """A worker is no longer a member: what it has begun to bring goes."""
        if self._coming is not None and self._coming.member == ident:
            self._coming = None

    def _next(self) -> int:
        self._count += 1
        return self._count

    async def _load_base(self) -> _State | None:
        """The state with which the timeline began, from its file. Raises CheckpointError."""
        file = self._file
        if self._base is None and file.name:
            place = Place(file.place) if file.place else self._job.checkpoints.place
            if place is None:
                raise errors.CheckpointError("the place of the registered state is not known")
            inside = place.inside(file.checkpoint)
            data = await asyncio.to_thread(inside.read, file.name, MAX_BYTES)
            if hashlib.sha256(data).hexdigest() != file.sha256:
                raise errors.CheckpointError(
                    f"{inside.where(file.name)} is damaged: its content is not what was written (SHA-256)"
                )
            if file is self._file:
                self._base = _State(self._next(), 0, file.version, len(data), bytearray(data))
        return self._base

    # ---- checkpoints

    async def save(self, place: Place, timeline: int, version: int) -> None:
        """Write the state that belongs to the checkpoint of this version, if there is one. Raises CheckpointError."""
        job, base = self._job, await self._load_base()
        self._saved = {other: file for other, file in self._saved.items() if other > version - 8}
        if self._newest is None and self._coming is None and base is None:
            return
        if job.consistency.mode is Mode.SYNC and self._expected(version):
            await job.changes.wait_until(
                lambda: self._version >= version or timeline != job.timeline or not self._brings(), _WAIT_S
            )
        found = self._newest or self._base
        if found is None or timeline != job.timeline:
            return
        if job.consistency.mode is Mode.SYNC and found.version != version:
            log.warning(
                f"the checkpoint of version {version} has the registered objects of version {found.version}: no worker "
                "brought them in time"
            )
        data, name = bytes(found.data), checkpoint_name(version, timeline)
        await asyncio.to_thread(place.inside(name).write_atomically, REGISTERED, data)
        self._saved[version] = coordinator_pb2.RegisteredFile(
            checkpoint=name,
            name=REGISTERED,
            bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            version=found.version,
        )

    def _expected(self, version: int) -> bool:
        """Whether workers hear, with the version, that servers copy it."""
        every = self._job.checkpoints.options.every
        return version in self._named or (every > 0 and version % every == 0)

    def named(self, version: int) -> None:
        """Servers were told that they will copy this version, which does not exist yet."""
        self._named = {*(other for other in self._named if other > version - 8), version}

    def _brings(self) -> bool:
        """Whether there is a worker that may still bring a state."""
        return bool(self._job.members.of(Role.WORKER))

    @property
    def _version(self) -> int:
        return max((one.version for one in (self._newest, self._base) if one is not None), default=-1)

    def saved(self, version: int) -> coordinator_pb2.RegisteredFile | None:
        """The file that :meth:`save` has written for the checkpoint of this version."""
        return self._saved.get(version)

    def went_back(self, file: coordinator_pb2.RegisteredFile | None, checkpoint: str = "", place: str = "") -> None:
        """The job goes on from a checkpoint that has this file; None: it begins with version 0."""
        self._newest = self._coming = self._base = None
        self._file = coordinator_pb2.RegisteredFile()
        if file is not None and file.name:
            self._file.CopyFrom(file)
            self._file.checkpoint, self._file.place = checkpoint, place

    # ---- the record

    def write(self, record: coordinator_pb2.JobRecord) -> None:
        """Write down with which file the timeline began."""
        if self._file.name:
            record.registered.CopyFrom(self._file)

    def restore(self, file: coordinator_pb2.RegisteredFile) -> None:
        """Go on from the record of an earlier coordinator."""
        self._file.CopyFrom(file)
