"""How a new backup is sent its shard: in groups of chunks, at a bounded rate, while training goes on.

The simulation uses the same rules as the servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

# Weights that are sent to a new backup at a time. Their optimizer state comes with them.
GROUP_BYTES = 2 << 20


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=_Sized)


def groups(
    chunks: Iterable[T], nbytes: int | None = None, begins: Callable[[T], bool] = lambda chunk: True
) -> list[list[T]]:
    """The chunks in groups of at most ``nbytes`` (None: as a new backup gets them), or of one chunk that is larger.

    ``begins``: whether a group may begin with this chunk. One empty group if there are no chunks.
    """
    limit = GROUP_BYTES if nbytes is None else nbytes
    found: list[list[T]] = [[]]
    size = 0
    for chunk in chunks:
        if found[-1] and size + chunk.nbytes > limit and begins(chunk):
            found.append([])
            size = 0
        found[-1].append(chunk)
        size += chunk.nbytes
    return found


def pause_s(sent: int, spent_s: float, mbps: float) -> float:
    """Seconds to wait before the next group. ``sent``: bytes so far; ``mbps``: megabits a second, 0: no limit."""
    return max(0.0, sent * 8 / (mbps * 1e6) - spent_s) if mbps else 0.0
