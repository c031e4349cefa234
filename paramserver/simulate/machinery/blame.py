"""Where time goes: each event carries the chain of its waits, from the beginning up to itself.

A chain has the seconds by part, which add up to the present time. A process that waits for several events takes over
the chain of the last event. The difference between the chains of two versions is the time between them, by part.
"""

from __future__ import annotations

import enum

Chain = tuple[float, ...]


class Part(enum.IntEnum):
    """The parts of a step's time."""

    COMPUTE = 0
    WORKER_LINK = 1
    SERVER_LINK = 2
    ARITHMETIC = 3
    CALLS = 4
    COPIES = 5

    def __str__(self) -> str:
        return _NAMES[self]


_NAMES = ("compute", "a worker's link", "a server's link", "a server's arithmetic", "calls", "copies")

NOTHING: Chain = (0.0,) * len(Part)


def longer(chain: Chain, part: Part, seconds: float) -> Chain:
    """The chain with so many more seconds of one part at its end."""
    return (*chain[:part], chain[part] + seconds, *chain[part + 1 :])


def between(before: Chain, after: Chain) -> Chain:
    """The difference of two chains. A part may be below 0 if the later chain does not go through the earlier event."""
    return tuple(b - a for a, b in zip(before, after, strict=True))


def largest(chain: Chain) -> Part:
    """The part that took longest."""
    return max(Part, key=lambda part: chain[part])
