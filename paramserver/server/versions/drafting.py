"""Drafts of the next version with their tensors: made chunk by chunk while contributions still arrive, and sent ahead.

`core/versions/drafts.py` decides when a draft begins and what becomes of it. A draft that is forgotten takes the copies
of the optimizer state with it that it was made with. Lives in the event loop; the arithmetic runs in its thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import TYPE_CHECKING

import structlog

from paramserver.core.layout.plan import Kind, moving_bytes
from paramserver.core.versions.drafts import (
    Adopt,
    Begin,
    Begun,
    Came,
    Decided,
    DraftState,
    Event,
    Failed,
    Forget,
    Make,
    NotMade,
    Opened,
)
from paramserver.frames import Frame
from paramserver.server.versions.version import part
from paramserver.tensors.codec import frame_of
from paramserver.v1 import shard_pb2

if TYPE_CHECKING:
    from torch import Tensor

    from paramserver.compress.base import Compressor
    from paramserver.core.layout.plan import Chunk
    from paramserver.server.arithmetic.state import State
    from paramserver.server.replicas.outbox import Content
    from paramserver.server.traced import ShardTrace
    from paramserver.server.versions.shard import Contribution, Making, ShardTensors
    from paramserver.server.versions.version import Version

log = structlog.get_logger("paramserver.server")

Do = Callable[[Callable[[], None]], Awaitable[None]]


class Draft:
    """The next version if it is made of the contributions of ``making`` and of no others.

    ``rounding``: in which form its weights are sent. ``content``: what the optimizer applies, if backups need that.
    """

    def __init__(
        self, number: int, making: Making, rounding: Compressor | None = None, content: Content | None = None
    ) -> None:
        self.number, self.making, self.rounding, self.content = number, making, rounding, content
        # By chunk: the weights, and the optimizer state that goes with them. Filled in the arithmetic thread.
        self.made: dict[int, tuple[Tensor, State | None]] = {}
        # By chunk, the frame that is sent, encoded once for all pulls; the chunks in the order they were made in.
        self.frames: dict[int, Frame] = {}
        self.order: list[int] = []
        # The chunks in which all numbers of the contributions are finite. Belongs to the arithmetic thread.
        self.finite: set[int] = set()

    def encode(self, chunk: Chunk, weights: Tensor) -> Frame:
        """A frame with one chunk."""
        ref, data = part(chunk, weights, self.rounding)
        return frame_of(shard_pb2.FrameHeader(chunks=[ref], draft=self.number), [data])

    def becomes(self, version: Version) -> None:
        """The draft is this version: workers that pull ahead have some of its frames already. Not thread-safe."""
        moving = version.moving(False)
        for chunk in moving:
            if chunk.index not in self.frames:
                self.frames[chunk.index] = self.encode(chunk, version.tensors[chunk.index])
        version.was(self.number, self.rounding, [self.frames[chunk.index] for chunk in moving])


class Drafting:
    """The draft of one shard's next version, if there is one. ``do`` runs a function in the arithmetic thread.

    ``content`` gives memory for what the optimizer applies to make the version after this one; None: nobody needs it.
    ``began`` is called with each draft.
    """

    def __init__(
        self,
        tensors: ShardTensors,
        do: Do,
        content: Callable[[int], Content | None] = lambda version: None,
        began: Callable[[Draft], None] = lambda draft: None,
        trace: ShardTrace | None = None,
    ) -> None:
        self._trace = trace
        self.draft: Draft | None = None
        # The form in which workers that pull ahead want weights; the same for all of a job.
        self.rounding: Compressor | None = None
        # How many drafts became versions, and how many were forgotten.
        self.adopted = self.forgotten = 0
        # All are set when a chunk of the draft is made, and when there is another draft or none.
        self.listeners: set[asyncio.Event] = set()
        self._tensors, self._do, self._content = tensors, do, content
        self._began = began
        self._chunks = {c.index: c for c in tensors.chunks if c.kind is not Kind.FROZEN and c.first is None}
        self._state = DraftState([*self._chunks], moving_bytes(tensors.chunks))
        self._base: Version | None = None
        # The contributions that are arriving, by id.
        self._parts: dict[int, Contribution] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def opened(self, base: Version) -> None:
        """``base`` is published, and the contributions to the version after it come next."""
        self._base = base
        self._happen(Opened(base.number))

    def begins(self, part: Contribution, lacks: Iterable[int] = ()) -> None:
        """A contribution begins to arrive. The chunks that it ``lacks`` are filled in as they come."""
        number = id(part)
        self._parts[number] = part
        plain = part.samples > 0 and not (part.overflow or part.clip_norm)
        self._happen(Begun(number, part.name, part.worker, frozenset(lacks), plain))
        if not self._state.has(number):
            del self._parts[number]

    def came(self, part: Contribution, chunk: int) -> None:
        """A chunk of a contribution is there."""
        self._happen(Came(id(part), chunk))

    def fails(self, part: Contribution) -> None:
        """The push of a contribution failed before all chunks were received."""
        self._happen(Failed(id(part)))
        self._parts.pop(id(part), None)

    def finite(self, part: Contribution) -> Collection[int]:
        """The chunks of a contribution whose numbers have turned out to be finite. In the arithmetic thread."""
        draft = self.draft
        known = draft is not None and any(one is part for one in draft.making.parts)
        return draft.finite if draft is not None and known else ()

    def take(self, parts: Iterable[Contribution]) -> Draft | None:
        """The draft, if it was made of just the contributions of which the next version is made."""
        draft, before = self.draft, self.adopted
        self._happen(Decided([id(part) for part in parts]))
        self._parts.clear()
        return draft if self.adopted > before else None

    async def close(self) -> None:
        """Nothing is drafted any more."""
        if self.draft is not None:
            self._happen(NotMade(self.draft.number))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _happen(self, event: Event) -> None:
        for effect in self._state.handle(event):
            match effect:
                case Begin(number, parts):
                    assert self._base is not None, "a step is open"
                    making = self._tensors.making(self._base, [self._parts[part] for part in parts])
                    self.draft = Draft(number, making, self.rounding, self._content(self._base.number))
                    self._began(self.draft)
                case Make(_, chunk):
                    assert self.draft is not None
                    task = asyncio.get_running_loop().create_task(self._make(self.draft, self._chunks[chunk]))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case Adopt() | Forget():
                    self.draft = None
                    self.adopted += isinstance(effect, Adopt)
                    self.forgotten += isinstance(effect, Forget)
                    self._tell()

    async def _make(self, draft: Draft, chunk: Chunk) -> None:
        def work() -> None:
            if self.draft is not draft:
                return
            trace = self._trace
            began = trace.recorder.now() if trace is not None and trace.recorder.on else 0
            weights, state, finite = self._tensors.drafted(chunk, draft.making, draft.content)
            draft.made[chunk.index] = weights, state
            if finite:
                draft.finite.add(chunk.index)
            draft.frames[chunk.index] = draft.encode(chunk, weights)
            draft.order.append(chunk.index)
            if trace is not None and began:
                trace.drafted(draft.making.base.number, chunk.index, began)

        try:
            if draft.content is not None:
                await draft.content.free()
            await self._do(work)
        except Exception as error:  # the version itself will meet with it, and say so
            log.debug("could not make a draft", error=str(error))
            self._happen(NotMade(draft.number))
        if self.draft is draft:
            self._tell()

    def _tell(self) -> None:
        for listener in self.listeners:
            listener.set()
