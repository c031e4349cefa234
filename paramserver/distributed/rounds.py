"""A collective as rounds at servers: how it is cut, who gets which number, which numbers are over."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

# One request or frame carries no more.
PIECE_BYTES = 4 * 2**20
_LEAST_BYTES = 2**16
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective, or one message, of this rank.

    ``channel``: "" if it counts among the collectives of all ranks. ``ranks``: who takes part; none: all. ``nbytes``:
    of each contribution. ``give``: what this rank brings. ``into``: where the contribution of a rank belongs; for a
    reduction, the result is that of rank 0. ``takes``: this rank wants the result.
    """

    what: str
    channel: str
    number: int
    nbytes: int
    ranks: tuple[int, ...] = ()
    reduction: int = 0
    dtype: str = ""
    give: memoryview | None = None
    into: dict[int, memoryview] = field(default_factory=dict)
    takes: bool = False


def pieces(nbytes: int, servers: int) -> Iterator[tuple[int, int]]:
    """(first byte, byte after the last) of each piece, so that all servers have work; one piece if there is no byte."""
    share = -(-nbytes // servers)
    size = min(PIECE_BYTES, max(_LEAST_BYTES, -(-share // _ALIGNMENT) * _ALIGNMENT))
    for start in range(0, max(nbytes, 1), size):
        yield start, min(nbytes, start + size)


def server_of(exchange: Exchange, piece: int, servers: int) -> int:
    """The server of a piece: the same at all ranks."""
    return (zlib.crc32(exchange.channel.encode()) + exchange.number + piece) % servers


class Numbers:
    """The numbers of this rank's collectives, by channel. Not thread-safe."""

    def __init__(self) -> None:
        self._next: Counter[str] = Counter()
        self._open: dict[str, set[int]] = {}

    def take(self, channel: str) -> int:
        """The next number of a channel; it is open from now on."""
        number = self._next[channel]
        self._next[channel] += 1
        self._open.setdefault(channel, set()).add(number)
        return number

    def over(self, channel: str, number: int) -> None:
        """This rank has the result of this number."""
        self._open[channel].discard(number)

    def done(self, channel: str) -> int:
        """This rank has the results of all numbers below this one."""
        return min(self._open.get(channel) or {self._next[channel]})
