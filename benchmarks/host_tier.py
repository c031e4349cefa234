"""Steps of workers that share hosts: one pull and one push per host, beside each worker's own. Nothing to compute.

Two hosts with four workers each, and two servers on hosts of their own. Hosts are network namespaces of this machine.
Both variants are the same job; the weights must be equal.
"""

from __future__ import annotations

import sys

from benchmarks import hosts
from benchmarks.busy import Busy
from benchmarks.launch import flags
from benchmarks.rows import Row, rows
from benchmarks.step_ideal import server_bound

ON, OFF, BOUND = "once per host", "each worker", "model / bandwidth"
HOSTS, PER_HOST, SERVERS = 2, 4, 2
MEGABYTES, MEGABITS, STEPS = 24, 100.0, 6
# Workers of a host find each other in the first steps.
_SKIP = 3


def run(repetitions: int) -> list[Row]:
    """Both variants in turn. Raises RuntimeError without root and iproute2, if a run fails, or if weights differ."""
    workers = HOSTS * PER_HOST
    words = flags({"--megabytes": MEGABYTES, "--ranks": workers, "--steps": STEPS, "--skip": _SKIP})
    text = f"{HOSTS} x {PER_HOST} + {SERVERS}, {MEGABYTES} MB, {MEGABITS:g} Mb/s"
    seconds: dict[str, list[float]] = {ON: [], OFF: []}
    with hosts.network(HOSTS, SERVERS, MEGABITS) as network:
        rate = network.megabits_per_s("w0", "w1", max(8, round(MEGABITS / 10)))
        for number in range(repetitions):
            weights = {}
            for variant in (ON, OFF) if number % 2 else (OFF, ON):
                busy = Busy()
                settings = {"cluster.transport": "bulk", "cluster.host_tier": "auto" if variant == ON else "off"}
                found = hosts.cluster(network, workers, SERVERS, words, settings=settings, per_host=PER_HOST)
                seconds[variant] += found["step_s"]
                weights[variant] = found["weight"]
                used, stolen = busy.shares()
                said = ", ".join(f"{step_s:.2f}" for step_s in found["step_s"])
                print(f"{text}, {variant}: {said} s; CPU {used:.0%}, stolen {stolen:.0%}", file=sys.stderr, flush=True)
            if weights[ON] != weights[OFF]:
                raise RuntimeError(f"{text}: the weights differ: {weights}")
    bound = server_bound(MEGABYTES * 1e6, HOSTS, SERVERS, rate * 1e6 / 8)
    return rows("host_tier", text, {**seconds, BOUND: [bound]}, ON)
