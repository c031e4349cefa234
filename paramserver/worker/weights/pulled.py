"""The answers of shards to a pull."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paramserver import errors
from paramserver.compress.base import Compressor
from paramserver.core.layout.plan import Kind, Plan
from paramserver.core.versions.consistency import Consistency
from paramserver.tensors.codec import Ref
from paramserver.transport.shm.segments import Foreign
from paramserver.v1 import shard_pb2
from paramserver.wire.messages import consistency_from_proto
from paramserver.worker.weights import rest as rests
from paramserver.worker.weights.checking import checked
from paramserver.worker.weights.landing import Landing
from paramserver.worker.weights.rest import Rest


@dataclass(frozen=True, slots=True)
class Slot:
    """The slot ``number`` of a server's weights. ``memory`` stays readable after the server has gone."""

    memory: Foreign
    number: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """The answer of one shard: raw bytes by chunk index, and its header."""

    version: int
    min_clock: int
    skipped: int
    consistency: Consistency
    chunks: dict[int, memoryview]
    advances: str = ""
    # Slices of the previous step that were given to other workers than their owners; server 0 knows.
    taken: frozenset[int] = frozenset()
    # Where the weights lie in memory shared with the server, if they do.
    slot: Slot | None = None
    # The chunks still to come, if the caller accepts that; then ``chunks`` are the chunks that have come.
    rest: Rest | None = None
    # A digest of the contributions that the version holds.
    counted: bytes = b""
    # The memory for the answers to this pull, if there is some.
    landing: Landing | None = None
    # Servers copy this version for a checkpoint.
    copied: bool = False
    # As in `PullHeader`.
    ever_used: bytes = b""

    def drop(self) -> None:
        """The answer is not wanted: cancel the chunks that are still to come."""
        if self.rest is not None:
            self.rest.cancel()


def merge(results: Sequence[Pulled]) -> Mapping[int, memoryview]:
    """All chunks of all shards."""
    chunks: dict[int, memoryview] = {}
    for result in results:
        chunks.update(result.chunks)
    return chunks


def pulled_of(
    header: shard_pb2.PullHeader,
    chunks: dict[int, memoryview],
    rest: Rest | None = None,
    slot: Slot | None = None,
    landing: Landing | None = None,
) -> Pulled:
    """The answer to a pull."""
    return Pulled(
        header.version,
        header.min_clock,
        header.skipped,
        consistency_from_proto(header.consistency),
        chunks,
        header.advances,
        frozenset(header.taken),
        slot,
        rest,
        header.counted,
        landing,
        header.copied,
        header.ever_used,
    )


class Answer:
    """The answer of one server to a pull, as its frames come.

    ``begun``: gets the answer as soon as its version is known, if much is still to come then. It may hold an answer
    already, from an attempt that broke off.
    """

    def __init__(
        self,
        plan: Plan,
        shard: int,
        name: str,
        rounding: Compressor | None,
        begun: asyncio.Future[Pulled] | None,
        landing: Landing | None,
    ) -> None:
        self._plan, self._shard, self._name = plan, shard, name
        self._rounding, self._begun, self._landing = rounding, begun, landing
        self._header: shard_pb2.PullHeader | None = None
        self._draft = 0
        self._chunks: dict[int, memoryview] = {}
        self._rest: Rest | None = None

    @property
    def waiting_for(self) -> str | None:
        """If the server has no answer yet: the reason, in words."""
        return None if self._header is None or self._header.ready else self._header.waiting_for

    def add(self, frame: shard_pb2.FrameHeader, parts: Iterable[tuple[Ref, memoryview]]) -> None:
        """Take in a frame. Raises ProtocolError for what does not belong here, GoneError if it is another version."""
        if self._header is None and frame.draft:
            if frame.draft != self._draft:  # the former draft was dropped
                self._draft, self._chunks = frame.draft, {}
        elif self._header is None:
            if frame.WhichOneof("first") != "pull":
                raise errors.ProtocolError("the answer to a pull does not begin with its header")
            self._header = frame.pull
            if self._header.ready:
                self._begin(self._header)
        for ref, data in parts:
            index = checked(ref, self._plan, self._shard, self._name, self._chunks, self._rounding)
            self._chunks[index] = data
            if self._rest is not None:
                self._rest.came(index, data)

    def _begin(self, header: shard_pb2.PullHeader) -> None:
        """The header has come: the version is known."""
        if header.draft != self._draft:
            self._chunks = {}
        if self._begun is None:
            return
        if not self._begun.done():
            self._rest = self._much(header)
            if self._rest is not None:
                self._begun.set_result(pulled_of(header, dict(self._chunks), self._rest, landing=self._landing))
            return
        former = self._begun.result()
        if former.version != header.version:
            raise errors.GoneError(f"{self._name} has version {header.version}, no longer {former.version}")
        self._rest = former.rest
        for index, data in self._chunks.items():
            assert self._rest is not None
            self._rest.came(index, data)

    def _much(self, header: shard_pb2.PullHeader) -> Rest | None:
        """The chunks still to come, if the script should begin without them since they are many. None otherwise."""
        moving = (chunk for chunk in self._plan.chunks_of(self._shard) if chunk.kind is not Kind.FROZEN)
        left = [chunk for chunk in moving if chunk.index not in self._chunks]
        complete = len(left) + len(self._chunks) == header.chunks
        if not complete or sum(chunk.nbytes for chunk in left) < max(1, rests.LEAST_BYTES):
            return None
        return Rest(self._name, (chunk.index for chunk in left))

    def whole(self) -> Pulled:
        """The whole answer. Raises UnavailableError if a part is missing."""
        if self._header is None or self._header.chunks != len(self._chunks):
            raise errors.UnavailableError(f"the answer of {self._name} was cut short")
        return pulled_of(self._header, self._chunks, landing=self._landing)
