"""Four workers of which one is four times slower: steps of `paramserver run` beside those of PyTorch's DDP (gloo).

Both compute the same 16 slices (micro-batches) per step with the same four processes. The weights after the run must be
those of a run in which all workers are equally fast, to the bit.
"""

from __future__ import annotations

import sys

from benchmarks.launch import SCRIPTS, flags, under_run, under_torchrun
from benchmarks.rows import Row, rows

SCRIPT = SCRIPTS / "straggle.py"
WORKERS, SLICES = 4, 16
# (seconds that a slice takes, how many times as long on the last worker, steps, steps that do not count).
CASES = ((0.04, 4.0, 30, 5), (0.1, 4.0, 20, 4), (0.04, 1.0, 30, 5))
OURS, DDP = "paramserver run", "DDP, gloo"

Case = tuple[float, float, int, int]


def run(repetitions: int) -> list[Row]:
    """All cases and variants in turn, ``repetitions`` times.

    Raises RuntimeError if a run fails, or if the weights depend on the slow worker.
    """
    seconds: dict[Case, dict[str, list[float]]] = {case: {DDP: [], OURS: []} for case in CASES}
    digests: dict[int, set[str]] = {}
    for number in range(repetitions):
        for case in CASES:
            theirs = _ddp(case)
            ours, digest = _ours(case)
            seconds[case][DDP].append(theirs)
            seconds[case][OURS].append(ours)
            digests.setdefault(case[2], set()).add(digest)
            said = f"{_text(case)}: {DDP} {theirs * 1000:.1f} ms, {OURS} {ours * 1000:.1f} ms"
            print(f"repetition {number + 1} of {repetitions}: {said}", file=sys.stderr, flush=True)
    with_even = next(steps for _, slower, steps, _ in CASES if slower == 1.0)
    if any(len(found) != 1 for found in digests.values()):
        raise RuntimeError(f"the weights depend on the slow worker: {digests}")
    print(f"weights with and without a slow worker: {min(digests[with_even])}")
    return [row for case in CASES for row in rows("straggle", _text(case), seconds[case], OURS)]


def _text(case: Case) -> str:
    slice_s, slower, _, _ = case
    return f"slices of {slice_s * 1000:.0f} ms, {f'one {slower:g}x slower' if slower > 1 else 'all equal'}"


def _ours(case: Case) -> tuple[float, str]:
    """Seconds per step, and the digest of the weights."""
    seconds, summary = under_run(SCRIPT, _script(case), WORKERS, options=["--slices-per-step", str(SLICES)])
    return float(seconds), str(summary["weights_sha256"])


def _ddp(case: Case) -> float:
    """Seconds per step."""
    return float(under_torchrun(SCRIPT, _script(case), WORKERS))


def _script(case: Case) -> list[str]:
    slice_s, slower, steps, skip = case
    return flags({"--steps": steps, "--skip": skip, "--slice-s": slice_s, "--slower": slower})
