"""How much of the model each server takes, by the bytes that the busiest link has to carry.

A host has one link, which carries as many bytes a second in either direction at the same time. A server on a host of
its own receives its share from every worker and sends it to every worker. One beside a worker does so for the other
workers, and the bytes between that worker and its own server do not travel. With few servers of their own
the workers' links are half idle, so that servers beside workers can take a part (BytePS). docs/performance.md has the
formulas.

Weights begin to return while gradients still arrive, but not from the first byte on. So there are two bounds: for
pushes and pulls at once, for which these shares are best; and for one after the other, for which it is best that all
servers take about as much. What counts is their mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paramserver.core.layout.plan import Kind, Layout, Plan, make_plan


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a server lives. ``beside_worker``: a worker uses the same link."""

    host: str
    beside_worker: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes of a step that the busiest link carries, until pushes and pulls are through.

    ``at_once``: both at the same time, each its direction; ``in_turn``: first all pushes, then all pulls.
    """

    at_once: int
    in_turn: int

    @property
    def both(self) -> int:
        """The two added up, by which placements are compared."""
        return self.at_once + self.in_turn


def choose(placement: str, layout: Callable[[], Layout], seats: Sequence[Seat], workers: int) -> tuple[int, ...]:
    """The shares for `make_plan`, by server; empty if all take as much. ``seats``: of the servers, by index.

    "balanced": all as much. "split": servers beside workers less than the others, as is best for links that carry both
    ways at once. "auto": the one of the two that has less to carry. Raises ValueError if it is to be split but no
    server is beside a worker.
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
    plans = (make_plan(laid_out, len(seats), shares) for shares in ((), split))
    evenly, apart = (load_of(plan, seats, workers).both for plan in plans)
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


def load_of(plan: Plan, seats: Sequence[Seat], workers: int) -> Load:
    """Bytes that the busiest link carries in a step of all workers. Frozen tensors are not sent."""
    moved = [chunk for chunk in plan.layout.chunks if chunk.kind is not Kind.FROZEN]
    model = sum(chunk.nbytes for chunk in moved)
    held = Counter({(seat.host, seat.beside_worker): 0 for seat in seats})
    for chunk in moved:
        seat = seats[plan.owner[chunk.index]]
        held[seat.host, seat.beside_worker] += chunk.nbytes
    at_once, in_turn = [0], [0]
    if sum(beside for _, beside in held) < workers:  # a worker without a server
        at_once.append(model)
        in_turn.append(model)
    for (_, beside), nbytes in held.items():
        others = workers - 1 if beside else workers
        own = model - nbytes if beside else 0
        # The host pushes its own and answers pulls; it receives pushes and its own weights.
        at_once.append(own + others * nbytes)
        in_turn.append(max(own, others * nbytes))
    return Load(max(at_once), 2 * max(in_turn))
