"""Spans of one push to a server, and of one pull, as the worker sees them."""

from __future__ import annotations

from collections.abc import AsyncIterator

from paramserver.core.versions.names import SyncName
from paramserver.frames import AnyFrame
from paramserver.tracing import Recorder
from paramserver.transport.base import Frames, each
from paramserver.worker.gradients.contribution import PushFacts


class TracedPush:
    """A push: "send" until its last frame has left, then "wait" until the server has answered."""

    def __init__(self, trace: Recorder, server: str, facts: PushFacts) -> None:
        self._trace, self._server, self._facts = trace, server, facts
        self._step = facts.name.step if isinstance(facts.name, SyncName) else None
        self._began = self._left = trace.now()

    async def frames(self, frames: Frames) -> AsyncIterator[AnyFrame]:
        """The frames of the push, on their way out."""
        nbytes = 0
        async for frame in each(frames):
            nbytes += len(frame)
            yield frame
        self.left(nbytes)

    def left(self, nbytes: int) -> None:
        """All has left."""
        self._left = self._trace.now()
        flows, name = [self._facts.nonce], self._facts.name
        self._trace.span("send", self._track, self._began, self._step, flows, self._left, slice=name, bytes=nbytes)

    def answered(self) -> None:
        """The server has answered."""
        self._trace.span("wait", self._track, self._left, self._step, whom=self._server, slice=self._facts.name)

    @property
    def _track(self) -> str:
        return f"to {self._server}"


class TracedPull:
    """A pull: "wait" until the first weights come, then "receive" until the last ones are there."""

    def __init__(self, trace: Recorder, server: str) -> None:
        self._trace, self._server = trace, server
        self._began = trace.now()
        self._first = self._bytes = 0

    def came(self, nbytes: int) -> None:
        """A frame with weights has come."""
        self._first = self._first or self._trace.now()
        self._bytes += nbytes

    def answered(self, version: int | None, waiting_for: str | None) -> None:
        """The answer is complete: ``version``, or the reason why the server has none yet."""
        trace, track = self._trace, f"from {self._server}"
        whom = f"{self._server}: {waiting_for}" if waiting_for else self._server
        end = self._first or trace.now()
        trace.span("wait", track, self._began, end_ns=end, whom=whom)
        if self._first:
            trace.span("receive", track, self._first, bytes=self._bytes, version=version)
