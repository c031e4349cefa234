"""Links of hosts: full duplex, so each host has one port that sends and one that receives, of the same bandwidth.

A message is cut into blocks. A sending port serves its messages in turn, a block each, as TCP shares a link; a
receiving port takes blocks in the order in which they come. A block goes through both ports at the same time, as
packets do, and where it has to wait at the second one, a switch holds it: there is room for all, and nothing is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from paramserver.simulate.blame import Chain, Part, longer
from paramserver.simulate.clock import VirtualClock


class Queue:
    """Something that does one piece of work at a time, first come first served: a thread, or a receiving port."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self.busy_since = 0.0

    def take(self, now: float, seconds: float) -> float:
        """A piece of work that comes ``now``; when it is done."""
        if now >= self.free_at:
            self.free_at = self.busy_since = now
        self.free_at += seconds
        return self.free_at


@dataclass(slots=True)
class Message:
    """Bytes on their way. ``sent_by``, ``taken_by``: whose link the two ports are. ``arrived`` hears the chain."""

    blocks: int
    block_bytes: float
    to: Queue
    rate: float
    sent_by: Part
    taken_by: Part
    begun_at: float
    chain: Chain
    arrived: Callable[[Chain], None]


class SendingPort:
    """The sending side of a host's link. ``rate``: bytes per second."""

    def __init__(self, clock: VirtualClock, rate: float) -> None:
        self.rate = rate
        self._clock = clock
        self._messages: deque[Message] = deque()
        self._busy = False

    def send(self, message: Message) -> None:
        """Begin with a message, beside those that are under way."""
        self._messages.append(message)
        if not self._busy:
            self._busy = True
            self._clock.at(self._clock.now, self._next)  # after whatever else is sent at this moment

    def _next(self) -> None:
        self._busy = bool(self._messages)
        if not self._busy:
            return
        message, now = self._messages.popleft(), self._clock.now
        message.blocks -= 1
        sent_at = now + message.block_bytes / self.rate
        took_s = message.block_bytes / message.rate
        at = max(sent_at, message.to.take(now, took_s))
        if message.blocks:
            self._messages.append(message)
        else:
            chain = _blamed(message, now, at, took_s)
            self._clock.at(at, lambda: message.arrived(chain))
        self._clock.at(sent_at, self._next)


def _blamed(message: Message, now: float, at: float, took_s: float) -> Chain:
    """The chain of a message whose last block is sent ``now`` and there ``at``.

    If that block waits at the receiving port for longer than it takes itself, all since that port has been busy is put
    down to it, and else everything to the sending port.
    """
    if message.to.free_at - took_s - now <= took_s:
        return longer(message.chain, message.sent_by, at - message.begun_at)
    since = min(at, max(message.begun_at, message.to.busy_since))
    chain = longer(message.chain, message.sent_by, since - message.begun_at)
    return longer(chain, message.taken_by, at - since)
