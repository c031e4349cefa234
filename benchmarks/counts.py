"""Prints the exact counts of `counting`, for several numbers of workers and servers; `make test` compares them."""

from __future__ import annotations

from benchmarks.counting import Counts, count
from benchmarks.rows import Row

SIZES = ((1, 1), (2, 1), (2, 2), (4, 2))


def run(_: int) -> list[Row]:
    """One run of each size; there are no times, hence no rows."""
    for workers, servers in SIZES:
        print("\n".join(lines(count(workers, servers))))
    return []


def lines(counts: Counts) -> list[str]:
    """The rows for people to read."""
    calls = {method: counts.per_worker_step(method) for method in sorted(counts.calls)}
    return [
        f"{counts.workers} workers, {counts.servers} servers",
        *(f"  {method}: {n:g} per worker-step and server" for method, n in calls.items()),
        f"  calls to the coordinator: {counts.of_the_coordinator()}",
        f"  operations on the store: {counts.store_operations}",
        f"  frames encoded per version and server: {counts.encoded_per_version:g}",
        f"  bytes sent per byte of gradient: {counts.pushed_per_byte:.4f}",
        f"  copies of each byte by torch, per worker-step: {counts.copied_per_byte:.4f}",
    ]
