"""How much of the model each server takes, by what the busiest link has to carry.

A host has one link, which carries as many bytes a second in either direction at the same time. A server on a host of
its own receives its share from every worker and sends it to every worker. One beside a worker does so for the other
workers, and what that worker itself pushes there and pulls from there does not travel. With few servers of their own
the workers' links are half idle, so that servers beside workers can take a part (BytePS). docs/performance.md has the
formulas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paramserver.core.plan import Kind, Layout, Plan, make_plan


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a server lives. ``beside_worker``: a worker uses the same link."""

    host: str
    beside_worker: bool = False


def choose(placement: str, layout: Callable[[], Layout], seats: Sequence[Seat], workers: int) -> tuple[int, ...]:
    """The shares for `make_plan`, by server; empty if all take as much. ``seats``: of the servers, by index.

    "balanced": all as much. "split": as is best for links that carry both directions at once; servers of their own then
    take more than those beside workers. "auto": whichever of the two has less to carry over its busiest link. Raises
    ValueError if it is to be split but no server is beside a worker.
    """
    if placement == "balanced":
        return ()
    if not any(seat.beside_worker for seat in seats):
        if placement == "split":
            raise ValueError("no server is beside a worker: start workers with --with-server")
        return ()
    split = split_shares(seats, workers)
    if placement == "split":
        return split
    laid_out = layout()
    evenly, apart = (busiest_link(make_plan(laid_out, len(seats), shares), seats, workers) for shares in ((), split))
    return split if apart < evenly else ()


def split_shares(seats: Sequence[Seat], workers: int) -> tuple[int, ...]:
    """Shares with which the links of all hosts that have servers carry as much, if that can be.

    With n workers, k hosts of servers alone and m hosts of a worker and servers, a host alone takes (n + m - 2) parts
    and one beside a worker n - k; several servers of a host share its part.
    """
    hosts = Counter((seat.host, seat.beside_worker) for seat in seats)
    alone = sum(not beside for _, beside in hosts)
    shared = len(hosts) - alone
    if workers == 1:  # all of it where the worker is
        parts = {True: 1, False: 0}
    elif alone >= workers:
        parts = {True: 0, False: 1}
    else:
        parts = {True: workers - alone, False: workers + shared - 2}
    whole = math.lcm(*hosts.values())
    return tuple(parts[seat.beside_worker] * whole // hosts[seat.host, seat.beside_worker] for seat in seats)


def busiest_link(plan: Plan, seats: Sequence[Seat], workers: int) -> int:
    """Bytes that the busiest link carries in one direction, per step of all workers. Frozen tensors do not travel."""
    moved = [chunk for chunk in plan.layout.chunks if chunk.kind is not Kind.FROZEN]
    model = sum(chunk.nbytes for chunk in moved)
    held = Counter({(seat.host, seat.beside_worker): 0 for seat in seats})
    for chunk in moved:
        seat = seats[plan.owner[chunk.index]]
        held[seat.host, seat.beside_worker] += chunk.nbytes
    alone = [workers * nbytes for (_, beside), nbytes in held.items() if not beside]
    shared = [model + (workers - 2) * nbytes for (_, beside), nbytes in held.items() if beside]
    without = [model] if len(shared) < workers else []
    return max((*alone, *shared, *without))
