"""How much of the communication hides behind the compute: three model shapes, compute replaced by sleeping.

Sizes are a quarter of the real models', and each layer takes as long as the others; two workers and a server, or two
ranks of DDP, on this machine. What a step takes beyond its compute is *exposed* communication. Compute is more than the
sleep: gradients are made, and thrown away; so it is measured, too, in as many processes at once that tell nobody.
"""

from __future__ import annotations

import math
import sys

from benchmarks.launch import SCRIPTS, flags, under_run, under_torchrun
from benchmarks.rows import Row, rows

SCRIPT = SCRIPTS / "replay.py"
WORKERS, STEPS, SKIP = 2, 12, 2
# Seconds that a step sleeps.
CASES = {"ResNet-50": 0.2, "VGG-16": 0.6, "BERT-base": 0.6}
OURS, DDP, COMPUTE = "paramserver run", "DDP, gloo", "compute alone"


def run(repetitions: int) -> list[Row]:
    """All shapes and variants in turn. Raises RuntimeError if a run fails or the weights differ."""
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
            if not math.isclose(found[DDP]["weight"], found[OURS]["weight"], rel_tol=1e-5):
                raise RuntimeError(f"{shape}: the weights differ: {found}")
    return [row for shape in CASES for row in rows("step_overlap", shape, seconds[shape], OURS)]


def exposed(step_s: float, compute_s: float) -> float:
    """The share of a step in which nothing is computed."""
    return max(0.0, step_s - compute_s) / step_s
