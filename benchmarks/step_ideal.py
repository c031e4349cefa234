"""One synchronous step between hosts of limited links, with nothing to compute: ours beside gloo and the cost model.

Hosts are network namespaces of this machine; each link carries the rate in both directions. Ours and gloo are the same
update (SGD) of the same gradients; the weights must agree. gloo keeps no copies, so ours is measured without backups,
and once more with a backup of each shard, as jobs between hosts have by default. "raw TCP" moves as many bytes between
the workers' and the servers' hosts, both ways at once, and does not use them. If there are fewer servers than workers,
"split" has one more server beside each worker. The lower bounds are those of docs/performance.md.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from benchmarks import hosts
from benchmarks.busy import Busy
from benchmarks.launch import flags
from benchmarks.rows import Row, rows

OURS, BACKED, SPLIT, GLOO, TCP = "ours", "ours, a backup", "ours, split", "gloo all_reduce", "raw TCP"
MODEL, RING = "model / bandwidth", "ring bound"
_SKIP = 2


@dataclass(frozen=True, slots=True)
class Case:
    """``megabytes`` of float32 parameters; ``megabits`` per second of each link; ``steps`` of one run."""

    workers: int
    servers: int
    megabytes: int
    megabits: float
    steps: int

    @property
    def text(self) -> str:
        return f"{self.workers} + {self.servers}, {self.megabytes} MB, {self.megabits:g} Mb/s"


# The second and third are the first slowed down, for machines whose processors cannot carry eight links of a gigabit.
CASES = (Case(4, 4, 100, 1000.0, 7), Case(4, 4, 24, 100.0, 6), Case(4, 4, 24, 25.0, 4), Case(8, 2, 24, 200.0, 6))
# Above this the processors decide how long a step takes, not the links.
_BUSY = 0.6


def run(repetitions: int) -> list[Row]:
    """All cases. Raises RuntimeError without root and iproute2, if a run fails, or if weights differ."""
    return [row for case in CASES for row in measure(case, repetitions)]


def measure(case: Case, repetitions: int) -> list[Row]:
    """One case; ours and gloo in turn."""
    words = flags({"--megabytes": case.megabytes, "--ranks": case.workers, "--steps": case.steps, "--skip": _SKIP})
    variants = (OURS, SPLIT, GLOO, TCP) if case.servers < case.workers else (OURS, BACKED, GLOO, TCP)
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    with hosts.network(case.workers, case.servers, case.megabits) as network:
        rate = network.megabits_per_s("w0", "w1", max(8, round(case.megabits / 10)))
        how = hosts.congestion_control(network)
        print(f"{case.text}: TCP ({how}) reaches {rate:.0f} Mb/s", file=sys.stderr, flush=True)
        for number in range(repetitions):
            weights = {}
            for variant in variants if number % 2 else reversed(variants):
                busy = Busy()
                if variant == TCP:
                    found = hosts.sockets(network, case.workers, case.servers, case.megabytes, case.steps)
                elif variant == GLOO:
                    found = hosts.ring(network, case.workers, words)
                else:
                    settings = {"cluster.replicas": "1" if variant == BACKED else "0"}
                    split = variant == SPLIT
                    found = hosts.cluster(network, case.workers, case.servers, words, split, settings=settings)
                seconds[variant] += found["step_s"]
                if variant != TCP:
                    weights[variant] = found["weight"]
                used, stolen = busy.shares()
                said = ", ".join(f"{step_s:.2f}" for step_s in found["step_s"])
                busy_text = f"CPU {used:.0%}, stolen {stolen:.0%}{'; NOT VALID, too busy' if used > _BUSY else ''}"
                print(f"{case.text}, {variant}: {said} s; {busy_text}", file=sys.stderr, flush=True)
            if not all(math.isclose(weight, weights[GLOO], rel_tol=1e-5) for weight in weights.values()):
                raise RuntimeError(f"{case.text}: the weights differ: {weights}")
    bits = rate * 1e6
    bounds = {
        MODEL: [server_bound(case.megabytes * 1e6, case.workers, case.servers, bits / 8)],
        RING: [ring_bound(case.megabytes * 1e6, case.workers, bits / 8)],
        "split bound": [split_bound(case.megabytes * 1e6, case.workers, case.servers, bits / 8)],
    }
    return rows("step_ideal", case.text, {**seconds, **bounds}, OURS)


def server_bound(model: float, workers: int, servers: int, bandwidth: float) -> float:
    """Seconds with dedicated servers, push and pull at the same time. ``model``: bytes; ``bandwidth``: bytes/s."""
    return max(1.0, workers / servers) * model / bandwidth


def ring_bound(model: float, workers: int, bandwidth: float) -> float:
    """Seconds of an all_reduce."""
    return 2 * (workers - 1) / workers * model / bandwidth


def split_bound(model: float, workers: int, servers: int, bandwidth: float) -> float:
    """Seconds if the workers' hosts hold shards, too, each kind of host as much as is best (BytePS)."""
    n, k = workers, min(servers, workers)
    return 2 * n * (n - 1) * model / ((n * n + k * n - 2 * k) * bandwidth)
