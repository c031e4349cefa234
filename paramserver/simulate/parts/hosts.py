"""Machines and the processes on them, and how bytes get from one process to another."""

from __future__ import annotations

import random
from collections.abc import Callable

from paramserver.simulate.costs import Costs
from paramserver.simulate.machinery.blame import Chain, Part, longer
from paramserver.simulate.machinery.clock import VirtualClock
from paramserver.simulate.machinery.cores import Cores, Thread
from paramserver.simulate.machinery.links import Block, ReceivingPort, SendingPort, Stream
from paramserver.simulate.parts.pieces import Piece

# The smallest share of a link, as a part of an even share.
_LEAST_SHARE = 0.25


class Host:
    """A machine with its processors. Its link carries ``rate`` bytes per second in each direction."""

    def __init__(self, clock: VirtualClock, rate: float, cores: Cores) -> None:
        self.up, self.down = SendingPort(clock, rate), ReceivingPort(clock)
        self.rate, self.cores = rate, cores


class Program:
    """A process: its host, the threads that send bytes and take them in, and the thread of its event loop.

    ``part``: the part that is blamed if others wait for its link. ``shares``: it shares memory with others on its host.
    ``faster``: how many times as fast as one thread its arithmetic is.
    """

    def __init__(self, host: Host, part: Part, shares: bool = False, faster: float = 1.0) -> None:
        self.host, self.part, self._shares, self._faster = host, part, shares, faster
        self.sends, self.takes, self.loop = (Thread(host.cores) for _ in range(3))
        self._arithmetic = Thread(host.cores, faster)
        # False when the process is dead: none of its messages arrive any more.
        self.alive = True

    def compute(self, seconds: float, then: Callable[[], None]) -> None:
        """Let the threads for arithmetic do work that takes one thread so long."""
        self._arithmetic.run(seconds / self._faster, then)

    def near(self, other: Program) -> bool:
        """Whether no bytes travel between the two processes."""
        return self._shares and self.host is other.host


class Network:
    """Opens streams between processes; how evenly these share a link is drawn from ``seed``."""

    def __init__(self, clock: VirtualClock, costs: Costs, seed: int = 0) -> None:
        self._clock, self._costs = clock, costs
        self._random = random.Random(f"shares/{seed}")

    def open(self, source: Program, to: Program, bytes_s: float) -> Transfer:
        """A stream of one call, at most so fast."""
        weight = 1.0
        if self._costs.uneven:
            weight = max(_LEAST_SHARE, self._random.gauss(1.0, self._costs.uneven))
        rate = min(to.host.rate, bytes_s)
        stream = Stream(to.host.down, rate, source.part, to.part, weight, lambda: source.alive and to.alive)
        return Transfer(self._clock, self._costs, source, to, stream)


class Transfer:
    """One call's bytes: the sender makes and copies frames, they go over both links, the receiver takes them in."""

    def __init__(self, clock: VirtualClock, costs: Costs, source: Program, to: Program, stream: Stream) -> None:
        self._clock, self._costs = clock, costs
        self._source, self._to, self._stream = source, to, stream

    def send(self, piece: Piece, chain: Chain, delivered: Callable[[Chain], None]) -> None:
        """Send a piece after the earlier pieces. ``delivered`` is called with the chain."""
        costs, began_at = self._costs, self._clock.now
        frames_s = costs.frame_s / 2 * piece.frames

        def encoded() -> None:
            self._source.sends.run(costs.send_ns * 1e-9 * piece.nbytes, copied)

        def copied() -> None:
            now = self._clock.now
            onward = longer(chain, Part.COPIES, now - began_at)
            if self._source.host is self._to.host:  # over loopback
                came(onward)
            else:
                self._source.host.up.send(Block(self._stream, piece.nbytes, now, onward, came))

        def came(chain: Chain) -> None:
            came_at = self._clock.now

            def done() -> None:
                delivered(longer(chain, Part.COPIES, self._clock.now - came_at))

            self._to.takes.run(costs.take_ns * 1e-9 * piece.nbytes, lambda: self._to.loop.run(frames_s, done))

        self._source.loop.run(frames_s, encoded)
