"""Real models on two workers: steps of `paramserver run` beside those of PyTorch's DDP (gloo) under torchrun.

The same model, initial weights, batches and update. DDP is set up as fast as it goes: gradients are views of its
buckets, buffers are not sent (ours averages them), the optimizer is fused. The final losses must agree.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch

from benchmarks.launch import SCRIPTS, flags, under_run, under_torchrun
from benchmarks.rows import Row, rows

SCRIPT = SCRIPTS / "train.py"
WORKERS = 2
OURS, DDP = "paramserver run", "DDP, gloo"
# Sums in another order, after so many steps.
_AGREE = 1e-3


@dataclass(frozen=True, slots=True)
class Case:
    """A training. ``batch``: samples of one worker in a step; ``skip``: steps that do not count."""

    name: str
    batch: int
    steps: int
    skip: int

    @property
    def text(self) -> str:
        return f"{self.name}, {WORKERS} × {self.batch} samples"


def cases(gpu: bool) -> tuple[Case, ...]:
    """Steps of the transformer take seconds on one core, and milliseconds on a GPU."""
    return Case("digits", 32, 400, 50), Case("transformer", 8, *((300, 20) if gpu else (24, 4)))


def run(repetitions: int) -> list[Row]:
    """All cases and variants in turn. Raises RuntimeError if a run fails or the final losses differ."""
    measured = cases(torch.cuda.is_available())
    seconds: dict[Case, dict[str, list[float]]] = {case: {DDP: [], OURS: []} for case in measured}
    for number in range(repetitions):
        for case in measured:
            measure = {
                DDP: lambda words: under_torchrun(SCRIPT, words, WORKERS),
                OURS: lambda words: under_run(SCRIPT, words, WORKERS)[0],
            }
            losses: dict[str, float] = {}
            for variant in sorted(measure, reverse=bool(number % 2)):
                found = measure[variant](words(case))
                seconds[case][variant].append(found["step_s"])
                losses[variant] = found["loss"]
                rate = WORKERS * case.batch / found["step_s"]
                said = f"{found['step_s'] * 1000:.1f} ms per step, {rate:.0f} samples/s, loss {found['loss']:.5f}"
                print(f"repetition {number + 1}: {case.text}, {variant}: {said}", file=sys.stderr, flush=True)
            if not agree(losses[DDP], losses[OURS]):
                raise RuntimeError(f"{case.text}: the final losses differ: {losses}")
    return [row for case in measured for row in rows("train", case.text, seconds[case], OURS)]


def words(case: Case) -> list[str]:
    """The arguments of the script."""
    sizes = {"--batch": case.batch, "--steps": case.steps, "--skip": case.skip, "--ranks": WORKERS}
    return flags({"--case": case.name, **sizes})


def agree(one: float, other: float) -> bool:
    """Whether two losses are the same but for the order of sums; a NaN agrees with nothing."""
    return math.isclose(one, other, rel_tol=_AGREE, abs_tol=_AGREE / 10)
