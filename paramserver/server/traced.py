"""Spans of one shard in a trace: receive, queue, sum, update, publish, send, and who was waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from paramserver.core.versions.events import AnswerPull
from paramserver.core.versions.names import SyncName
from paramserver.server.versions.shard import Contribution
from paramserver.tracing import Recorder

_NAMES = 4
# The facts of so many versions are kept: pulls of a version may be answered when the next one is being made.
_KEPT = 8


class ShardTrace:
    """Called only while ``recorder.on`` is set. ``names`` tells the names of workers by member number."""

    def __init__(self, recorder: Recorder, shard: int, names: Callable[[], Mapping[int, str]]) -> None:
        self.recorder = recorder
        self._shard, self._names = f"shard {shard}", names
        # By buffer, when its contribution was complete.
        self._came: dict[int, int] = {}
        # By version: the contributions that it is made of, and for whom the shard had waited before it made it.
        self._made_of: dict[int, list[int]] = {}
        self._waited_for: dict[int, str] = {}
        # When the last version was published.
        self._open_ns = 0
        # The trace to which all of this belongs.
        self._number = 0

    # ---- contributions

    def received(self, contribution: Contribution, began: int, nbytes: int) -> None:
        """All bytes of a contribution have come over the network."""
        step = _step(contribution)
        flows = [contribution.nonce]
        track = self._of(contribution.worker)
        self.recorder.span("receive", track, began, step, flows, slice=contribution.name, bytes=nbytes)

    def came(self, buffer: int) -> None:
        """A contribution is complete, and waits until a version is made of it."""
        if self._number != self.recorder.number:
            self._number, self._open_ns = self.recorder.number, 0
            self._came, self._made_of, self._waited_for = {}, {}, {}
        self._came[buffer] = self.recorder.now()

    def decided(self, base: int, buffers: Sequence[int], contributions: Sequence[Contribution]) -> None:
        """The version after ``base`` is made of these contributions."""
        recorder, now = self.recorder, self.recorder.now()
        came = [(self._came.get(buffer, 0), part) for buffer, part in zip(buffers, contributions, strict=True)]
        for buffer in buffers:
            self._came.pop(buffer, None)
        for at, part in came:
            if at:
                track = self._of(part.worker)
                recorder.span("queue", track, at, base, [part.nonce], now, slice=part.name)
        at, last = max(came, key=lambda one: one[0])
        waited_for = ""
        if at and isinstance(last.name, SyncName):
            waited_for = f"{self._name(last.worker)} ({last.name})"
            if self._open_ns:
                recorder.span("wait", self._shard, self._open_ns, base, end_ns=max(at, self._open_ns), whom=waited_for)
        self._waited_for[base + 1] = waited_for
        self._made_of[base + 1] = [part.nonce for part in contributions]
        for facts in (self._waited_for, self._made_of):
            facts.pop(base + 1 - _KEPT, None)

    # ---- versions

    def made(self, name: str, base: int, began: int, draft: bool = False) -> None:
        """The arithmetic for the version after ``base``, in its thread."""
        note = "most of it was made before the last contribution was complete" if draft else ""
        self.recorder.span(name, self._shard, began, base, self._made_of.get(base + 1, ()), draft=note)

    def drafted(self, base: int, chunk: int, began: int) -> None:
        """A chunk of a draft was made ahead of time."""
        self.recorder.span("sum and update", f"{self._shard} ahead", began, base, chunk=chunk)

    def held(self, base: int, began: int) -> None:
        """All backups hold what the version is made of."""
        self.recorder.span("wait", self._shard, began, base, whom="backups")

    def published(self, base: int, began: int) -> None:
        """The version after ``base`` is the present one."""
        self._open_ns = self.recorder.now()
        flows = self._made_of.get(base + 1, ())
        self.recorder.span("publish", self._shard, began, base, flows, self._open_ns, version=base + 1)

    # ---- pulls

    def pulled(self, worker: int, began: int, answer: AnswerPull | None, held_up_by: Sequence[int]) -> None:
        """A worker's pull was answered. ``held_up_by``: asynchronous mode, the workers behind when it asked."""
        version = answer.version if answer is not None else None
        names = [self._name(other) for other in held_up_by[:_NAMES]]
        whom = ", ".join(names) + (", ..." if len(held_up_by) > _NAMES else "")
        if not whom and version is not None:
            whom = self._waited_for.get(version, "")
        self.recorder.span("wait", f"{self._of(worker)} pulls", began, version=version, whom=whom)

    def sent(self, worker: int, began: int, version: int, nbytes: int) -> None:
        """Weights have left for a worker."""
        self.recorder.span("send", f"{self._of(worker)} pulls", began, version=version, bytes=nbytes)

    def _name(self, worker: int) -> str:
        return self._names().get(worker, f"member {worker}")

    def _of(self, worker: int) -> str:
        return f"{self._shard}, {self._name(worker)}" if worker else f"{self._shard}, reader"


def _step(contribution: Contribution) -> int | None:
    return contribution.name.step if isinstance(contribution.name, SyncName) else None
