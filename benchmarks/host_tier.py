"""Steps of workers that share hosts: one pull and one push per host, beside each worker's own. Nothing to compute.

Two hosts with four workers each, and two servers on hosts of their own. Hosts are network namespaces of this machine.
All variants are the same job; the weights must be equal. Each shard has a backup, as by default, so servers send each
other the sums of gradients over the same links. One variant is without backups. The lower bounds are those of
docs/performance.md.
"""

from __future__ import annotations

import sys

from benchmarks import hosts
from benchmarks.busy import Busy
from benchmarks.launch import flags
from benchmarks.rows import Row, rows
from paramserver.simulate.formulas import dedicated

ON, ALONE, OFF = "once per host", "once per host, no backups", "each worker"
BOUND, BOUND_ALONE = "bound with backups", "bound without"
# By variant: whether hosts push once, and the backups of each shard.
VARIANTS = {ON: ("auto", 1), ALONE: ("auto", 0), OFF: ("off", 1)}
HOSTS, PER_HOST, SERVERS = 2, 4, 2
MEGABYTES, MEGABITS, STEPS = 24, 100.0, 6
# Workers of a host find each other in the first steps.
_SKIP = 3


def run(repetitions: int) -> list[Row]:
    """All variants in turn. Raises RuntimeError without root and iproute2, if a run fails, or if weights differ."""
    workers = HOSTS * PER_HOST
    words = flags({"--megabytes": MEGABYTES, "--ranks": workers, "--steps": STEPS, "--skip": _SKIP})
    text = f"{HOSTS} x {PER_HOST} + {SERVERS}, {MEGABYTES} MB, {MEGABITS:g} Mb/s"
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    with hosts.network(HOSTS, SERVERS, MEGABITS) as network:
        rate = network.megabits_per_s("w0", "w1", max(8, round(MEGABITS / 10)))
        for number in range(repetitions):
            weights = {}
            for variant, (tier, replicas) in list(VARIANTS.items())[:: 1 if number % 2 else -1]:
                busy = Busy()
                settings = {"cluster.transport": "bulk", "cluster.host_tier": tier, "cluster.replicas": str(replicas)}
                found = hosts.cluster(network, workers, SERVERS, words, settings=settings, per_host=PER_HOST)
                seconds[variant] += found["step_s"]
                weights[variant] = found["weight"]
                used, stolen = busy.shares()
                said = ", ".join(f"{step_s:.2f}" for step_s in found["step_s"])
                print(f"{text}, {variant}: {said} s; CPU {used:.0%}, stolen {stolen:.0%}", file=sys.stderr, flush=True)
            if len(set(weights.values())) > 1:
                raise RuntimeError(f"{text}: the weights differ: {weights}")
    for bound, replicas in ((BOUND, 1), (BOUND_ALONE, 0)):
        bytes_s = rate * 1e6 / 8
        seconds[bound] = [dedicated(HOSTS, SERVERS, MEGABYTES * 1e6, bytes_s, overlapped=True, replicas=replicas)]
    return rows("host_tier", text, seconds, ON)
