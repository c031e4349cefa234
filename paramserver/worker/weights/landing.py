"""Memory of the worker into which the next version is received, so that its weights need not be copied there.

The script computes on one space while the next version is received into the other one; then they change places.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import TYPE_CHECKING

from paramserver import errors
from paramserver.core.layout.plan import Kind, Plan
from paramserver.tensors.codec import header_from
from paramserver.tensors.dtypes import buffer_of
from paramserver.worker.weights.checking import checked

if TYPE_CHECKING:
    from paramserver.worker.flat import FlatSpace

# Smaller pieces are copied: to look where they belong would take as long.
LEAST_BYTES = 64 << 10


class Landing:
    """The space for the answers to one pull. Streams of all shards write to it, each to the chunks of its shard.

    A stream that was given up may write for some milliseconds more. So a landing is closed when its pull is given up,
    and its memory is not used again if anything has come.
    """

    def __init__(self, space: FlatSpace, plan: Plan) -> None:
        self.space = space
        self._plan = plan
        self._lock = threading.Lock()
        self._used = self._closed = False

    @property
    def used(self) -> bool:
        """Whether something was received here, or is being received."""
        return self._used

    @property
    def closed(self) -> bool:
        """Whether nothing more comes here."""
        return self._closed

    def close(self) -> bool:
        """Nothing more may come here. Returns whether the memory is untouched, so that it can be used again."""
        with self._lock:
            self._closed = True
            return not self._used

    def place(self, shard: int, header: bytes, nbytes: int) -> memoryview | None:
        """The place of the chunk that this frame of a shard brings; None: it is received elsewhere. In any thread.

        What does not belong here is received elsewhere, too, and refused there.
        """
        if nbytes < LEAST_BYTES:
            return None
        try:
            frame = header_from(header)
            if len(frame.chunks) != 1 or frame.states:
                return None
            (ref,) = frame.chunks
            chunk = self._plan.layout.chunks[checked(ref, self._plan, shard, "the server", ())]
        except errors.ProtocolError:
            return None
        if chunk.kind is Kind.FROZEN or ref.bytes != nbytes:
            return None
        with self._lock:
            if self._closed:
                return None
            self._used = True
        return buffer_of(self.space.chunk(chunk.index))


class Landings:
    """Gives each pull a landing, and keeps the memory of the former version for the next one."""

    def __init__(self) -> None:
        # The landing of the present pull; the memory of the next one.
        self._last: Landing | None = None
        self._spare: FlatSpace | None = None

    def begin(self, space: FlatSpace, plan: Plan) -> Landing:
        """A landing beside ``space``, which holds the version at hand. The former landing is closed."""
        last, spare = self._last, self._spare
        if last is not None and last.close():
            spare = last.space
        self._spare = None
        self._last = Landing(spare or space.twin(), plan)
        return self._last

    def take(self, landings: Collection[Landing | None], whole: bool, former: FlatSpace | None) -> FlatSpace | None:
        """The space in which answers to a pull lie; None if they lie elsewhere.

        ``landings``: of the pulls of these answers. ``whole``: nothing is still to come. ``former``: the space of the
        version before, if nothing writes there any more.
        """
        last = self._last
        if last is None or last.closed or last not in landings or (whole and not last.used):
            return None
        self._last, self._spare = None, former
        return last.space
