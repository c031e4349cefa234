"""Links of hosts: full duplex, so each host has one port that sends and one that receives, of the same bandwidth.

The bytes of a call are a stream of blocks. A port shares its bandwidth among its waiting streams, as TCP does: by their
weights, which are equal only if TCP is fair. A block goes through both ports at the same time, as packets do. If a
block has to wait at the second port, a switch holds it. The switch has room for all blocks and loses none.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from paramserver.simulate.machinery.blame import Chain, Part, longer
from paramserver.simulate.machinery.clock import VirtualClock


@dataclass(slots=True, eq=False)
class Stream:
    """One call's way from a sending to a receiving port. ``rate``: at most so many bytes per second at its end.

    ``sent_by``, ``taken_by``: the parts that are blamed for the two ports. ``weight``: of its share of a port.
    ``open``: whether both processes live. Otherwise blocks that have not left are dropped.
    """

    to: ReceivingPort
    rate: float
    sent_by: Part
    taken_by: Part
    weight: float = 1.0
    open: Callable[[], bool] = lambda: True
    # Bytes by weight up to which the two ports have been asked to serve the stream.
    at_sender: float = 0.0
    at_receiver: float = 0.0


@dataclass(slots=True, eq=False)
class Block:
    """Some bytes of a stream, sent since ``begun_at``. ``delivered`` hears the chain."""

    stream: Stream
    nbytes: float
    begun_at: float
    chain: Chain
    delivered: Callable[[Chain], None]
    # When the sending port began with the block, and when the block is through this port.
    left_at: float = 0.0
    sent_at: float = 0.0


class _Fair:
    """Blocks in the order in which a port serves them: the stream with the fewest served bytes by weight is first."""

    def __init__(self) -> None:
        self._blocks: list[tuple[float, int, Block]] = []
        self._numbers = itertools.count()
        self._at = 0.0

    def push(self, block: Block, before: float) -> float:
        """Add a block of a stream that was served up to ``before``. Returns the position after this block."""
        at = max(self._at, before)
        heapq.heappush(self._blocks, (at, next(self._numbers), block))
        return at + block.nbytes / block.stream.weight

    def next(self) -> Block | None:
        """The next block, or None. Blocks of closed connections are dropped."""
        while self._blocks:
            self._at, _, block = heapq.heappop(self._blocks)
            if block.stream.open():
                return block
        return None


class SendingPort:
    """The sending side of a host's link. ``rate``: bytes per second."""

    def __init__(self, clock: VirtualClock, rate: float) -> None:
        self.rate = rate
        self._clock = clock
        self._blocks = _Fair()
        self._busy = False

    def send(self, block: Block) -> None:
        """Begin with a block, beside the blocks of other streams."""
        block.stream.at_sender = self._blocks.push(block, block.stream.at_sender)
        if not self._busy:
            self._busy = True
            self._clock.at(self._clock.now, self._next)  # after all blocks that are sent at this moment

    def _next(self) -> None:
        block = self._blocks.next()
        self._busy = block is not None
        if block is None:
            return
        now = self._clock.now
        block.left_at, block.sent_at = now, now + block.nbytes / self.rate
        block.stream.to.take(block)
        self._clock.at(block.sent_at, self._next)


class ReceivingPort:
    """The receiving side of a host's link."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._blocks = _Fair()
        self._busy = False
        self._busy_since = 0.0

    def take(self, block: Block) -> None:
        """A block begins to come."""
        block.stream.at_receiver = self._blocks.push(block, block.stream.at_receiver)
        if not self._busy:
            self._busy, self._busy_since = True, self._clock.now
            self._next()

    def _next(self) -> None:
        block, now = self._blocks.next(), self._clock.now
        self._busy = block is not None
        if block is not None:
            took_s = block.nbytes / block.stream.rate
            self._clock.at(max(now + took_s, block.sent_at), lambda: self._through(block, now, took_s))

    def _through(self, block: Block, began_at: float, took_s: float) -> None:
        chain = self._blamed(block, began_at, took_s)
        self._next()
        block.delivered(chain)

    def _blamed(self, block: Block, began_at: float, took_s: float) -> Chain:
        """The chain of a block that this port began with at ``began_at``.

        If the block has waited for this port longer than it takes itself, the time since this port has been busy counts
        for this port. Otherwise all of the time counts for the sending port.
        """
        now, stream = self._clock.now, block.stream
        if began_at - block.left_at <= took_s:
            return longer(block.chain, stream.sent_by, now - block.begun_at)
        since = min(now, max(block.begun_at, self._busy_since))
        chain = longer(block.chain, stream.sent_by, since - block.begun_at)
        return longer(chain, stream.taken_by, now - since)
