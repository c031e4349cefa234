"""How much of the communication hides behind the compute: three model shapes, compute replaced by sleeping.

Sizes are a quarter of the real models', and each layer takes as long as the others; two workers and a server, or two
ranks of DDP, on this machine. The time of a step beyond its compute is *exposed* communication. Compute is more than
the sleep, since gradients are made and freed. So compute is measured, too, in as many processes that do not
communicate.

The second part is between hosts, which are network namespaces of this machine with links of 200 Mb/s: twelve equal
layers of 24 MB in all, two workers, two servers. Weights and gradients take almost as long as a forward and a backward
pass. DDP keeps no copies, so ours runs without backups there; `replicas` measures their cost.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks import hosts
from benchmarks.launch import SCRIPTS, flags, under_run, under_torchrun
from benchmarks.rows import Row, rows

SCRIPT = SCRIPTS / "replay.py"
WORKERS, STEPS, SKIP = 2, 12, 2
# Seconds that a step sleeps.
CASES = {"ResNet-50": 0.2, "VGG-16": 0.6, "BERT-base": 0.6}
OURS, DDP, COMPUTE = "paramserver run", "DDP, gloo", "compute alone"
# Between hosts.
MEGABITS, SLEPT_S, SERVERS = 200.0, 1.5, 2
SYNC, CLIPPED, ASYNC = "ours, sync", "ours, sync and clipped", "ours, asynchronous"


def run(repetitions: int) -> list[Row]:
    """All shapes and variants in turn.

    Raises RuntimeError if a run fails, has wrong weights, or if there are no root and iproute2 for hosts.
    """
    return on_one_host(repetitions) + between_hosts(repetitions)


def on_one_host(repetitions: int) -> list[Row]:
    """Over shared memory."""
    seconds: dict[str, dict[str, list[float]]] = {shape: {OURS: [], DDP: [], COMPUTE: []} for shape in CASES}
    for _ in range(repetitions):
        for shape, slept_s in CASES.items():
            sizes = {"--ranks": WORKERS, "--steps": STEPS, "--skip": SKIP}
            words = flags({"--shape": shape, "--compute-s": slept_s, **sizes})
            compute_s = under_torchrun(SCRIPT, words, WORKERS, "--alone")["step_s"]
            seconds[shape][COMPUTE].append(compute_s)
            found = {DDP: under_torchrun(SCRIPT, words, WORKERS), OURS: under_run(SCRIPT, words, WORKERS)[0]}
            for variant, one in found.items():
                seconds[shape][variant].append(one["step_s"])
                share = exposed(one["step_s"], compute_s)
                said = f"{one['step_s'] * 1000:.0f} ms per step, {compute_s * 1000:.0f} of compute, {share:.0%} exposed"
                print(f"{shape}, {variant}: {said}", file=sys.stderr, flush=True)
    return [row for shape in CASES for row in rows("step_overlap", shape, seconds[shape], OURS)]


def between_hosts(repetitions: int) -> list[Row]:
    """Over links."""
    sizes = {"--shape": "12 layers", "--compute-s": SLEPT_S, "--ranks": WORKERS, "--steps": 7, "--skip": SKIP}
    words = flags(sizes)
    seconds: dict[str, list[float]] = {variant: [] for variant in (SYNC, CLIPPED, ASYNC, DDP, COMPUTE)}
    with hosts.network(WORKERS, SERVERS, MEGABITS) as network:

        def ours(given: list[str], mode: str = "sync") -> dict[str, Any]:
            settings = {"consistency.mode": mode, "cluster.replicas": "0"}
            return hosts.cluster(network, WORKERS, SERVERS, given, script=SCRIPT, settings=settings)

        for _ in range(repetitions):
            found = {
                SYNC: ours(words),
                CLIPPED: ours([*words, "--clip"]),
                ASYNC: ours(words, "async"),
                DDP: hosts.ring(network, WORKERS, words, SCRIPT, "--ddp"),
                COMPUTE: under_torchrun(SCRIPT, words, WORKERS, "--alone"),
            }
            for variant, one in found.items():
                seconds[variant].append(one["step_s"])
                print(f"between hosts, {variant}: {one['step_s'] * 1000:.0f} ms per step", file=sys.stderr, flush=True)
    return rows("step_overlap", f"12 layers, 24 MB, {MEGABITS:g} Mb/s", seconds, SYNC)


def exposed(step_s: float, compute_s: float) -> float:
    """The share of a step in which nothing is computed."""
    return max(0.0, step_s - compute_s) / step_s
