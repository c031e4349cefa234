"""The memory of a primary, as a backup on its host reads it; see `outbox`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from paramserver.core.layout.plan import Chunk, Plan
from paramserver.server.replicas.outbox import outbox_arena
from paramserver.tensors.dtypes import tensor_from
from paramserver.transport.shm.meeting import Visit
from paramserver.transport.shm.segments import Foreign
from paramserver.v1 import shard_pb2

if TYPE_CHECKING:
    from torch import Tensor


class Line(Protocol):
    """Answers the calls that the primary makes over its socket."""

    def close(self) -> None:
        """Hang up."""


class Lent:
    """Raises OSError if the primary cannot be met on this host, ValueError for a wrong name or size."""

    def __init__(self, plan: Plan, request: shard_pb2.LendRequest, socket_fd: int) -> None:
        """``socket_fd``: the primary's end of a socket for its calls."""
        self.meeting = request.meeting
        self.line: Line | None = None
        self._arena = outbox_arena(plan)
        self._nbytes = request.bytes
        if self._nbytes != self._arena.slot_bytes:
            raise ValueError("the primary lays its memory out differently")
        self._visit = Visit(request.meeting, socket_fd)
        self._view: memoryview | None = None
        # By chunk.
        self._views: dict[int, Tensor] = {}

    def chunks(self, chunks: Mapping[int, Chunk]) -> dict[int, Tensor]:
        """Views of these chunks. Raises OSError or ValueError if the memory cannot be read."""
        if self._view is None:
            self._view = Foreign(self._visit.take(), self._nbytes).view
        for index, chunk in chunks.items():
            if index not in self._views:
                start = self._arena.start(chunk)
                self._views[index] = tensor_from(self._view[start : start + chunk.nbytes], chunk.dtype)
        return {index: self._views[index] for index in chunks}

    def close(self) -> None:
        """Read nothing new; what is in use stays readable."""
        self._visit.close()
        if self.line is not None:
            self.line.close()
        self._view = None
        self._views.clear()
