"""The contributions that the workers of a host add up before they leave the host: who is waited for, and how long.

Workers say which slices of a step they will offer. A *piece* is a contribution that was offered, or a sum of several.
Two pieces that are siblings in the reduction tree are added. A sum whose sibling will not come is pushed. A
contribution whose sibling will not come is given back: its worker pushes it. Names only: the caller keeps the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from paramserver.core.versions.ranges import RangeSet, minus
from paramserver.core.versions.reduction import Node, sibling

# A piece waits at least so long for its sibling.
LEAST_PATIENCE_S = 0.25
# Workers may have one slice more than others, so a piece waits for longer than one slice takes.
_PATIENCE = 1.5


def patience_s(work_s: float) -> float:
    """How long others wait for the contributions of a worker that takes ``work_s`` seconds for a slice."""
    return max(LEAST_PATIENCE_S, _PATIENCE * work_s)


@dataclass(frozen=True, slots=True)
class Expects:
    """A worker is at ``step`` of ``of`` slices, and will offer the slices ``[lo, hi)``; none if the range is empty.

    ``patience_s``: others wait so long for these slices, and no longer.
    """

    worker: int
    step: int
    of: int
    lo: int
    hi: int
    patience_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Offers:
    """A worker offers its contribution for ``node`` under the number ``call``. Pieces of equal ``key`` are added."""

    worker: int
    call: int
    step: int
    of: int
    node: Node
    key: bytes = b""


@dataclass(frozen=True, slots=True)
class Withdraws:
    """The worker waits for the answer to this call no longer, and pushes by itself."""

    call: int


@dataclass(frozen=True, slots=True)
class Leaves:
    """A worker is gone."""

    worker: int


@dataclass(frozen=True, slots=True)
class Added:
    """An `Add` is done. ``well``: the sum is there."""

    step: int
    left: Node
    right: Node
    well: bool = True


@dataclass(frozen=True, slots=True)
class Pushed:
    """A `Push` is done. ``counted``: by all servers."""

    step: int
    node: Node
    counted: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Add:
    """Add two siblings. `Added` follows."""

    step: int
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Push:
    """Push a sum to the servers. `Pushed` follows."""

    step: int
    node: Node


@dataclass(frozen=True, slots=True)
class Drop:
    """The bytes of this piece are not needed here any more."""

    step: int
    node: Node


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to an offer. ``counted``: nothing is left to be done. Otherwise its worker pushes it."""

    call: int
    counted: bool


Event: TypeAlias = Expects | Offers | Withdraws | Leaves | Added | Pushed | Tick
Effect: TypeAlias = Add | Push | Drop | Answer


@dataclass(slots=True)
class _Worker:
    """The state of a worker of this host. ``late``: the sum does not wait for it."""

    step: int = -1
    range: Node = (0, 0)
    patience_s: float = 0.0
    late: bool = False


@dataclass(slots=True)
class _Piece:
    """``calls``: the offers in it that wait for an answer."""

    calls: list[int]
    key: bytes
    since: float
    is_sum: bool = False
    adding: bool = False
    pushing: bool = False

    @property
    def busy(self) -> bool:
        """Whether it is being added or pushed."""
        return self.adding or self.pushing


class HostSums:
    """The state for one host and one step at a time. All changes go through :meth:`handle`."""

    def __init__(self) -> None:
        # The present step, and how many slices it has.
        self.step, self.of = -1, 0
        self._workers: dict[int, _Worker] = {}
        # Of the present step: pieces by node, slices that were offered, and when the first of them was.
        self._pieces: dict[Node, _Piece] = {}
        self._offered = RangeSet()
        self._first_at: float | None = None

    @property
    def due(self) -> float | None:
        """When `Tick` is to come; None: not before another event."""
        times = [piece.since + self._patience_s(blamed) for piece, blamed in self._waiting()]
        return min(times, default=None)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in an event at ``now`` (seconds of any clock); return the effects to perform, in order."""
        effects: list[Effect] = []
        match event:
            case Expects():
                effects += self._expects(event)
            case Offers():
                effects += self._offers(event, now)
            case Withdraws(call):
                effects += self._withdraws(call)
            case Leaves(worker):
                self._workers.pop(worker, None)
            case Added():
                effects += self._added(event, now)
            case Pushed():
                effects += self._pushed(event)
            case Tick():
                for piece, blamed in list(self._waiting()):
                    if now >= piece.since + self._patience_s(blamed):
                        for worker in blamed:
                            self._workers[worker].late = True
        return [*effects, *self._go_on()]

    # ---- events

    def _expects(self, event: Expects) -> list[Effect]:
        effects = self._begin(event.step, event.of)
        known = self._workers.setdefault(event.worker, _Worker())
        known.step, known.range, known.patience_s = event.step, (event.lo, event.hi), event.patience_s
        return effects

    def _begin(self, step: int, of: int) -> list[Effect]:
        """A worker is at this step. Then all servers have published its version, and earlier steps are over."""
        if step <= self.step:
            return []
        former, pieces, self._pieces = self.step, self._pieces, {}
        self.step, self.of = step, of
        self._offered, self._first_at = RangeSet(), None
        effects: list[Effect] = []
        for node, piece in pieces.items():
            effects += [Answer(call, True) for call in piece.calls]
            if not piece.busy:
                effects.append(Drop(former, node))
        return effects

    def _offers(self, event: Offers, now: float) -> list[Effect]:
        effects, (lo, hi) = self._begin(event.step, event.of), event.node
        known = self._workers.setdefault(event.worker, _Worker())
        over, apart = event.step < self.step, event.of != self.of
        if over or apart or any(a < hi and lo < b for a, b in self._pieces):
            return [*effects, Drop(event.step, event.node), Answer(event.call, over)]
        if self._first_at is None:
            self._first_at = now
        if now <= self._first_at + max(known.patience_s, LEAST_PATIENCE_S):
            known.late = False
        self._offered.add_range(lo, hi)
        self._pieces[event.node] = _Piece([event.call], event.key, now)
        return effects

    def _withdraws(self, call: int) -> list[Effect]:
        for node, piece in list(self._pieces.items()):
            if call in piece.calls:
                piece.calls.remove(call)
                if not piece.is_sum and not piece.busy:
                    del self._pieces[node]
                    return [Drop(self.step, node)]
        return []

    def _added(self, event: Added, now: float) -> list[Effect]:
        whole = event.left[0], event.right[1]
        if event.step != self.step:
            return [Drop(event.step, whole)] if event.well else []
        left, right = self._pieces.pop(event.left), self._pieces.pop(event.right)
        calls = left.calls + right.calls
        if not event.well:
            return [Answer(call, False) for call in calls]
        self._pieces[whole] = _Piece(calls, left.key, now, is_sum=True)
        return []

    def _pushed(self, event: Pushed) -> list[Effect]:
        if event.step != self.step:
            return []
        return [Answer(call, event.counted) for call in self._pieces.pop(event.node).calls]

    # ---- what follows

    def _go_on(self) -> list[Effect]:
        """Add what belongs together, and let go what has to wait for nothing."""
        effects: list[Effect] = []
        for node, piece in sorted(self._pieces.items()):
            if piece.busy:
                continue
            other = sibling(node, self.of)
            twin = self._pieces.get(other) if other is not None else None
            if other is not None and twin is not None and not twin.busy and twin.key == piece.key:
                piece.adding = twin.adding = True
                left, right = sorted((node, other))
                effects.append(Add(self.step, left, right))
        while alone := self._alone():
            for node in alone:
                piece = self._pieces[node]
                if piece.is_sum:
                    piece.pushing = True
                    effects.append(Push(self.step, node))
                else:
                    del self._pieces[node]
                    effects += [Drop(self.step, node), *(Answer(call, False) for call in piece.calls)]
        return effects

    def _alone(self) -> list[Node]:
        """The pieces whose sibling will not come. When they have gone, siblings of others may not come, too."""
        return [node for node, piece in sorted(self._pieces.items()) if not (piece.busy or self._comes(node))]

    def _comes(self, node: Node) -> bool:
        """Whether the sibling of a piece may still come, so that both can be added."""
        other = sibling(node, self.of)
        if other is None or other in self._pieces:  # the latter is of another key, or on its way to the servers
            return False
        coming = RangeSet.from_ranges(at for at, one in self._pieces.items() if not one.pushing)
        for worker in self._workers.values():
            if self._awaited(worker):
                if worker.step < self.step:  # it has not said yet which slices are its own
                    return True
                for lo, hi in self._owed(worker):
                    coming.add_range(lo, hi)
        return all(hi <= other[0] or other[1] <= lo for lo, hi in coming.missing(other[1]))

    def _waiting(self) -> Iterator[tuple[_Piece, list[int]]]:
        """The pieces that wait, and for whom."""
        for node, piece in self._pieces.items():
            other = sibling(node, self.of)
            if piece.busy or other is None:
                continue
            blamed = [ident for ident, worker in self._workers.items() if self._owes(worker, other)]
            if blamed:
                yield piece, blamed

    def _owes(self, worker: _Worker, node: Node) -> bool:
        """Whether a worker that is waited for has slices of ``node`` to offer."""
        if not self._awaited(worker):
            return False
        return worker.step < self.step or any(lo < node[1] and node[0] < hi for lo, hi in self._owed(worker))

    def _awaited(self, worker: _Worker) -> bool:
        return not worker.late and worker.range[0] < worker.range[1]

    def _owed(self, worker: _Worker) -> tuple[Node, ...]:
        """The slices of its range that a worker has not offered, as ranges."""
        return minus(RangeSet.from_ranges([worker.range]), self._offered).ranges()

    def _patience_s(self, blamed: list[int]) -> float:
        return max(LEAST_PATIENCE_S, *(self._workers[worker].patience_s for worker in blamed))
