"""Bounded staleness as a recursion, where only computing takes time: what the simulator must agree with.

    start_i(c) = max(end_i(c - 1), max over j of end_j(c - s - 1))        end_i(c) = start_i(c) + X_i(c)

Worker i computes its slice number c for X_i(c) seconds; s is the staleness. s = 0 is a barrier after every slice.
"""

from __future__ import annotations

from collections.abc import Sequence


def ends(times: Sequence[Sequence[float]], staleness: int | None) -> list[list[float]]:
    """When each worker has done each of its slices, in seconds: by slice, then by worker, as ``times`` are.

    ``staleness`` None: nobody waits.
    """
    rows: list[list[float]] = []
    for number, row in enumerate(times):
        before = rows[-1] if rows else [0.0] * len(row)
        held_until = 0.0
        if staleness is not None and number > staleness:
            held_until = max(rows[number - staleness - 1])
        rows.append([max(end, held_until) + x for end, x in zip(before, row, strict=True)])
    return rows


def rate(times: Sequence[Sequence[float]], staleness: int | None) -> float:
    """Slices per second of all workers together, until the first of them has done its last slice."""
    rows = ends(times, staleness)
    horizon = min(rows[-1])
    return sum(end <= horizon for row in rows for end in row) / horizon
