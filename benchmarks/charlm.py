"""`workers/charlm.py` beside PyTorch's DDP, and asynchronous beside synchronous.

`run` and `compiled` measure steps of a model of 10 M parameters on two workers, with and without accumulation of four
batches: under `paramserver run`, and under torchrun with DDP (gloo). Both have the same model, initial weights, batches
and update. DDP is set up as fast as it goes: gradients are views of its buckets, the optimizer is fused. The final
losses must agree. `stale` measures no times, but how far asynchronous losses are from synchronous losses.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from benchmarks.launch import ROOT, SCRIPTS, call, flags, under_run, under_torchrun
from benchmarks.rows import Row, rows
from benchmarks.train import DDP, OURS, agree

SCRIPT = SCRIPTS / "charlm.py"
WORKERS, SIZE, CONTEXT, BATCH = 2, "10m", 64, 8


@dataclass(frozen=True, slots=True)
class Case:
    """A training. ``accumulate``: batches of a worker in a step; ``skip``: steps that do not count."""

    accumulate: int
    compiled: bool
    steps: int
    skip: int

    @property
    def text(self) -> str:
        batches = f"{WORKERS} × {self.accumulate} × {BATCH} pieces"
        return f"{SIZE}, {batches}{', compiled' if self.compiled else ''}"

    def words(self) -> list[str]:
        """The command line of the script."""
        return flags(
            {
                "--size": SIZE,
                "--context": CONTEXT,
                "--ranks": WORKERS,
                "--batch": BATCH,
                "--accumulate": self.accumulate,
                "--compile": int(self.compiled),
                "--steps": self.steps,
                "--skip": self.skip,
            }
        )


def run(repetitions: int) -> list[Row]:
    """Without torch.compile. Raises RuntimeError if a run fails or the final losses differ."""
    return measure("charlm", [Case(1, False, 24, 6), Case(4, False, 8, 2)], repetitions)


def compiled(repetitions: int) -> list[Row]:
    """With torch.compile, which needs a C++ compiler. Raises RuntimeError as `run` does."""
    return measure("charlm_compiled", [Case(1, True, 24, 6), Case(4, True, 8, 2)], repetitions)


def measure(name: str, cases: Sequence[Case], repetitions: int) -> list[Row]:
    """All cases, both variants in turn."""
    seconds: dict[Case, dict[str, list[float]]] = {case: {DDP: [], OURS: []} for case in cases}
    for number in range(repetitions):
        for case in cases:
            measures = {
                DDP: lambda words: under_torchrun(SCRIPT, words, WORKERS),
                OURS: lambda words: under_run(SCRIPT, words, WORKERS)[0],
            }
            losses: dict[str, float] = {}
            for variant in sorted(measures, reverse=bool(number % 2)):
                found = measures[variant](case.words())
                seconds[case][variant].append(found["step_s"])
                losses[variant] = found["loss"]
                said = f"{found['step_s'] * 1000:.1f} ms per step, loss {found['loss']:.5f}"
                print(f"repetition {number + 1}: {case.text}, {variant}: {said}", file=sys.stderr, flush=True)
            if not agree(losses[DDP], losses[OURS]):
                raise RuntimeError(f"{case.text}: the final losses differ: {losses}")
    return [row for case in cases for row in rows(name, case.text, seconds[case], OURS)]


# Of `stale`: workers, pieces of text in an epoch, and seeds.
ASYNC_WORKERS, PIECES, SEEDS = 4, 1024, range(5)
# By name the settings of a training. All have one update for each slice.
MODES: dict[str, dict[str, object]] = {
    "synchronous, one slice in a step": {"training.slices_per_step": 1},
    "asynchronous, staleness 2": {"consistency.mode": "async", "consistency.staleness": 2},
    "asynchronous, staleness 4": {"consistency.mode": "async", "consistency.staleness": 4},
}
_LOSS = re.compile(r"validation loss ([\d.]+) nats")


def stale(repetitions: int) -> list[Row]:
    """Validation losses after an epoch for each mode and seed, as a table. Raises RuntimeError if a run fails."""
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for seed in SEEDS:
        for mode, settings in MODES.items():
            loss = validation_loss({**settings, "training.seed": seed})
            found[mode].append(loss)
            print(f"seed {seed}, {mode}: {loss:.3f}", file=sys.stderr, flush=True)
    print(gaps(found))
    return []


def validation_loss(settings: Mapping[str, object]) -> float:
    """In nats per byte, after the last epoch."""
    words = flags({"--workers": 1 if "training.slices_per_step" in settings else ASYNC_WORKERS, "--servers": 1})
    words += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    script = [str(ROOT / "workers/charlm.py"), *words, "--", *flags({"--pieces": PIECES, "--sample": 0})]
    return last_loss(call([sys.executable, "-m", "paramserver", "run", *script]))


def last_loss(said: str) -> float:
    """The validation loss that a run printed last. Raises RuntimeError if it printed none."""
    losses: list[str] = _LOSS.findall(said)
    if not losses:
        raise RuntimeError(f"the run printed no validation loss:\n{said}")
    return float(losses[-1])


def gaps(found: Mapping[str, Sequence[float]]) -> str:
    """A table: for each mode the mean loss, the smallest and the largest, and the gap of the mean to the first mode."""
    lines = ["| mode | mean | smallest and largest | gap |", "|---|---|---|---|"]
    reference = mean(next(iter(found.values())))
    for mode, losses in found.items():
        both = f"{min(losses):.3f} and {max(losses):.3f}"
        lines.append(f"| {mode} | {mean(losses):.3f} | {both} | {mean(losses) - reference:+.3f} |")
    return "\n".join(lines)
