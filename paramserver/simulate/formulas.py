"""Seconds of communication per step by formula, to compare simulated clusters with.

``bytes_``: of the model, gradients being as large as weights. ``bandwidth``: bytes per second of a link in one
direction. Latency and arithmetic are left out.
"""

from __future__ import annotations

import math


def all_reduce(workers: int, bytes_: float, bandwidth: float) -> float:
    """Ring all-reduce among the workers, without servers."""
    return 2 * (workers - 1) * bytes_ / (workers * bandwidth)


def dedicated(
    workers: int, servers: int, bytes_: float, bandwidth: float, *, overlapped: bool, replicas: int = 0
) -> float:
    """Servers on hosts of their own; ``overlapped``: weights return while gradients still arrive.

    With ``replicas``, servers send each other the sum of the gradients once for each backup.
    """
    one_way = max(bytes_ / bandwidth, (workers + replicas) * bytes_ / (servers * bandwidth))
    return one_way if overlapped else 2 * one_way


def enough_servers(workers: int, bytes_: float, bandwidth: float, step_s: float, *, replicas: int = 0) -> int:
    """The fewest servers on hosts of their own with which links need at most ``step_s``, if both ways overlap.

    ``step_s`` is at least the time that a link needs for the model.
    """
    return math.ceil((workers + replicas) * bytes_ / (bandwidth * step_s))


def byteps_split(workers: int, servers: int, bytes_: float, bandwidth: float) -> float:
    """``servers`` dedicated hosts, 0 to ``workers`` of them, and workers' hosts that hold shards, too."""
    n, k = workers, servers
    return 2 * n * (n - 1) * bytes_ / (_weight(n, k) * bandwidth)


def byteps_shares(workers: int, servers: int) -> tuple[float, float]:
    """The part of the model on each dedicated server, and on each worker's host."""
    n, k = workers, servers
    return 2 * (n - 1) / _weight(n, k), (n - k) / _weight(n, k)


def _weight(n: int, k: int) -> int:
    if n < 2 or not 0 <= k <= n:
        raise ValueError(f"the split is for 2 workers or more and at most as many servers, not for {n} and {k}")
    return n * n + k * n - 2 * k
