"""The memory that a shard shares with workers on its host: versions of the weights in slots, and the workers' inboxes.

Lives in the event loop, except methods whose docstring says "In a thread". A worker *attaches* once per timeline. Then
contributions are views of its inbox. A version lies in a slot from the beginning if one is free. Otherwise it moves
into one when a worker first asks for it. A slot is used again when no version lies there and no worker reads from it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import structlog

from paramserver import errors
from paramserver.core.layout.arena import make_arena, pages
from paramserver.core.layout.plan import Chunk, Kind, Plan
from paramserver.core.layout.slots import Slots
from paramserver.server.versions.version import Version
from paramserver.tensors.dtypes import tensor_from
from paramserver.transport.shm.meeting import Visit, refused, unseen
from paramserver.transport.shm.segments import PAGE, Foreign, Segment, available
from paramserver.v1 import shard_pb2

if TYPE_CHECKING:
    from torch import Tensor

log = structlog.get_logger("paramserver.server")

# Only used slots take memory: three while all workers keep step, at most two more than there are workers.
SLOTS = 32
# The most attachments of workers that this server has not heard of; each costs some descriptors.
STRANGERS = 64
Space = Callable[[Chunk], "Tensor"]


class Line(Protocol):
    """Answers the calls that a worker makes over its socket."""

    def close(self) -> None:
        """Hang up."""


@dataclass(slots=True)
class _Attachment:
    """A worker whose inbox this server can read. ``known``: it has been a member."""

    worker: int
    inbox_bytes: int
    visit: Visit
    inbox: memoryview | None = None
    known: bool = False
    lines: list[Line] = field(default_factory=list)
    # By place in the inbox, and by chunk.
    views: dict[int, dict[int, Tensor]] = field(default_factory=dict)


class Sharing:
    """One shard on one timeline."""

    def __init__(self, plan: Plan, shard: int) -> None:
        self._plan = plan
        self._chunks = plan.chunks_of(shard)
        self._arena = make_arena(plan.layout, PAGE)
        runs = [[r for r in self._arena.runs(plan, frozen) if r.shard == shard] for frozen in (True, False)]
        self._frozen_pages, self._slot_pages = ([*pages(part, PAGE)] for part in runs)
        self._slots = Slots(SLOTS)
        self._reserved: set[int] = set()
        self._frozen = False
        # By slot and chunk, where it lies there.
        self._places: dict[tuple[int, int], Tensor] = {}
        self._weights: Segment | None = None
        self._attachments: dict[int, _Attachment] = {}
        # The workers, as far as this server has heard of them.
        self._workers: frozenset[int] = frozenset()
        self._numbers = itertools.count(1)
        self._complained = False

    # ---- workers come and go

    def attach(self, request: shard_pb2.AttachRequest, *sockets: int) -> shard_pb2.AttachResponse:
        """Meet a worker and exchange memory with it; refused, with the reason, where that is not possible.

        A worker has one attachment: a former one ends, since the worker uses it no more. It is also given
        ``sockets``, descriptors, for its calls; `answer` tells who answers them.
        """
        if not available():
            return shard_pb2.AttachResponse(refusal="the server's system has no memory that can be shared")
        known = request.worker in self._workers
        if not known and sum(not one.known for one in self._attachments.values()) >= STRANGERS:
            return shard_pb2.AttachResponse(refusal=f"{STRANGERS} processes that are no workers have attached already")
        nbytes = self._arena.weights_bytes(SLOTS)
        try:
            if self._weights is None:
                self._weights = Segment(nbytes)
            visit = Visit(request.meeting, self._weights.reading_fd, *sockets)
        except FileNotFoundError:
            return shard_pb2.AttachResponse(refusal=unseen(request.host))
        except (OSError, ValueError) as error:
            return shard_pb2.AttachResponse(refusal=refused(error))
        number = next(self._numbers)
        former = [other for other, one in self._attachments.items() if one.worker == request.worker]
        self._slots.join(number, former)  # its weights may still lie there
        for other in former:
            self._end(other)
        self._attachments[number] = _Attachment(request.worker, request.inbox_bytes, visit, known=known)
        return shard_pb2.AttachResponse(attachment=number, weights_bytes=nbytes)

    def answer(self, number: int, line: Line) -> None:
        """``line`` answers an attached worker's calls; it ends with the attachment."""
        if (attachment := self._attachments.get(number)) is None:
            line.close()
        else:
            attachment.lines.append(line)

    def keep(self, workers: frozenset[int]) -> None:
        """These are the workers. Attachments of other processes end, except of workers that are newer than these."""
        self._workers = workers
        newest = max(workers, default=0)
        for number, attachment in list(self._attachments.items()):
            if attachment.worker in workers:
                attachment.known = True
            elif attachment.known or attachment.worker < newest:
                self._end(number)

    def close(self) -> None:
        """End all attachments."""
        for number in list(self._attachments):
            self._end(number)
        self._complained = True
        self._places.clear()
        if self._weights is not None:
            self._weights.close()

    def _end(self, number: int) -> None:
        attachment = self._attachments.pop(number)
        attachment.visit.close()
        for line in attachment.lines:
            line.close()
        self._slots.leave(number)

    # ---- contributions

    def contribution(self, shared: shard_pb2.SharedPush, worker: int, chunks: Mapping[int, Chunk]) -> dict[int, Tensor]:
        """Views of these chunks in a worker's inbox.

        Raises GoneError if the worker is not attached (any more), ProtocolError for a place that does not exist.
        """
        attachment = self._attached(shared.attachment, worker)
        if attachment is None:
            raise errors.GoneError("this worker is not attached: attach again, or send the chunks")
        if attachment.inbox is None:
            try:
                attachment.inbox = Foreign(attachment.visit.take(), attachment.inbox_bytes).view
            except (OSError, ValueError) as error:
                self._end(shared.attachment)
                raise errors.GoneError(f"the worker's memory cannot be read: {error}") from error
        base = shared.slot * self._arena.slot_bytes
        if base + self._arena.slot_bytes > attachment.inbox_bytes:
            raise errors.ProtocolError(f"slot {shared.slot} does not exist in the inbox of worker {worker}")
        views = attachment.views.setdefault(shared.slot, {})
        for index, chunk in chunks.items():
            if index not in views:
                start = base + self._arena.start(chunk)
                views[index] = tensor_from(attachment.inbox[start : start + chunk.nbytes], chunk.dtype)
        return {index: views[index] for index in chunks}

    def _attached(self, number: int, worker: int) -> _Attachment | None:
        attachment = self._attachments.get(number)
        return attachment if attachment is not None and attachment.worker == worker else None

    # ---- workers that read

    def asks(self, shared: shard_pb2.SharedPull, worker: int) -> bool:
        """A worker asks for weights and names the slots that it still reads. False: it is not attached."""
        if self._attached(shared.attachment, worker) is None:
            return False
        self._slots.reads(shared.attachment, shared.reading)
        return True

    def lend(self, attachment: int, slot: int) -> bool:
        """A worker is about to be told that it may read a slot. False: its attachment has ended meanwhile."""
        if attachment not in self._attachments:
            return False
        self._slots.lend(attachment, slot)
        return True

    @property
    def used(self) -> frozenset[int]:
        """The slots that are in use."""
        return self._slots.used

    # ---- versions

    def take(self) -> int | None:
        """A slot for the next version; None if nobody is attached or no slot is free."""
        return self._slots.take() if self._attachments else None

    def space(self, slot: int) -> Space | None:
        """Where chunks lie in a slot that was taken; None if there is no memory for it. In a thread."""
        try:
            if slot not in self._reserved:
                for start, length in self._slot_pages:
                    self._segment.reserve(self._arena.slot_start(slot) + start, length)
                self._reserved.add(slot)
        except OSError as error:
            self._complain(error)
            return None
        return lambda chunk: self._place(chunk, slot)

    def _place(self, chunk: Chunk, slot: int) -> Tensor:
        if (slot, chunk.index) not in self._places:
            start = self._arena.in_weights(chunk, slot)
            view = self._segment.view[start : start + chunk.nbytes]
            self._places[slot, chunk.index] = tensor_from(view, chunk.dtype)
        return self._places[slot, chunk.index]

    @property
    def _segment(self) -> Segment:
        assert self._weights is not None, "a slot is taken when somebody is attached"
        return self._weights

    def settle(self, version: Version, slot: int | None, base: Version, placed: bool) -> None:
        """A version was built on ``base``; ``placed``: into ``slot``, else beside it."""
        if version.same_as(base):
            if slot is not None:
                self._slots.drop(slot)
            if base.slot is not None:
                self._slots.use(base.slot)
                self._lies(version, base.slot)
        else:
            self.shared(version, slot, placed)

    def lies(self, version: Version) -> bool:
        """Whether all of a version is in shared memory."""
        return version.slot is not None and self._frozen

    def share(self, version: Version, slot: int | None) -> bool:
        """Move a version into a slot that was taken (None: it lies in one), and the frozen chunks once.

        False if there is no memory. In a thread.
        """
        space = self.space(slot) if slot is not None else lambda chunk: self._place(chunk, 0)
        if space is None:
            return False
        try:
            if not self._frozen:
                for start, length in self._frozen_pages:
                    self._segment.reserve(start, length)
        except OSError as error:
            self._complain(error)
            return False
        shared = dict(version.tensors)
        for chunk in self._chunks:
            if (slot is not None) if chunk.kind is not Kind.FROZEN else not self._frozen:
                shared[chunk.index] = space(chunk).copy_(version.tensors[chunk.index])
        version.tensors = shared
        self._frozen = True
        return True

    def shared(self, version: Version, slot: int | None, done: bool) -> None:
        """After :meth:`share`, in the loop."""
        if slot is not None and done:
            self._lies(version, slot)
        elif slot is not None:  # there is no memory for it, so there would be none for other new slots either
            self._slots.drop(slot)
            self._slots.limit(self._reserved)

    def _lies(self, version: Version, slot: int) -> None:
        version.slot = slot
        weakref.finalize(version, self._slots.drop, slot).atexit = False

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            log.warning(
                "there is no memory for weights that workers on this host can read in place; they get copies over the "
                "network instead, which is slower: give this host or container more memory",
                error=str(error),
            )


def own(tensors: Mapping[int, Tensor], others: Mapping[int, Tensor], which: Iterable[int]) -> dict[int, Tensor]:
    """The tensors, with copies in place of those of ``which`` that are also among ``others``."""
    copies = {index: tensors[index].clone() for index in which if tensors[index] is others[index]}
    return {**tensors, **copies}
