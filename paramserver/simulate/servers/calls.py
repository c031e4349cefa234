"""Calls of simulated workers to a shard, and the answers: plain values, and contributions on their way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paramserver.core.work.stealing import Assignment
from paramserver.simulate.machinery.blame import Chain
from paramserver.simulate.machinery.clock import Signal
from paramserver.simulate.parts.hosts import Program, Transfer
from paramserver.simulate.parts.pieces import Piece
from paramserver.simulate.parts.rest import Rest


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a worker. ``shard``: its index; ``chain``: up to the moment when the worker has the answer."""

    shard: int
    chain: Chain
    version: int = 0
    min_clock: int = 0
    taken: tuple[int, ...] = ()
    gone: bool = False
    rest: Rest | None = None


class Upload:
    """A contribution on its way to one shard. ``answer`` comes when the state machine gives it."""

    def __init__(self, pieces: Sequence[Piece], send: Callable[[int, Chain], None], all_at_once: bool) -> None:
        self.answer: Signal[Answer] = Signal()
        # Pieces whose gradients the backward pass makes last come last.
        self._left = sorted(range(len(pieces)), key=lambda piece: -pieces[piece].ready)
        self._pieces, self._send, self._all_at_once = pieces, send, all_at_once

    def ready(self, part: float, chain: Chain) -> None:
        """A part of the backward pass is over, from 0 to 1: the pieces that are ready leave."""
        if self._all_at_once:
            if part >= 1.0:
                self._send(0, chain)
            return
        while self._left and self._pieces[self._left[-1]].ready <= part:
            self._send(self._left.pop(), chain)


@dataclass(slots=True, eq=False)
class Delivery:
    """Weights on their way to a worker that asked: pieces of a draft (its number), or of a version without a draft (0).

    ``answer`` is set when all are known.
    """

    draft: int
    sent: set[int] = field(default_factory=set)
    coming: set[int] = field(default_factory=set)
    answer: Callable[[Chain], None] | None = None
    # If the answer is sent before all pieces: it hears of the pieces that come later.
    rest: Rest | None = None


@dataclass(slots=True, eq=False)
class Call:
    """A call that waits for its answer."""

    answer: Signal[Answer]
    caller: Program
    assignment: Assignment | None = None
    ahead: bool = False
    begins: bool = False
    asked: bool = False
    # Of a pull over the network.
    transfer: Transfer | None = None
    delivery: Delivery | None = None


@dataclass(slots=True, eq=False)
class Brought:
    """A contribution: its number while it arrives, its worker, and on which version it was computed."""

    part: int
    worker: int
    base: int
