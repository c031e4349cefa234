"""Whether a slow loader is hidden: the time of a step whose batch takes as long to read as the step takes to compute.

Reading and computing sleep, so that the figures do not depend on the number of cores. Plain torch in one process stands
beside one server with two workers, which read different slices.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.launch import SCRIPTS, call
from benchmarks.rows import Row, rows

SCRIPT = SCRIPTS / "load.py"
READ_S = COMPUTE_S = 0.03
WORKERS = 2


def run(repetitions: int) -> list[Row]:
    """Loaders without and with a process that reads ahead, in turns. Raises RuntimeError if a run fails."""
    found: list[Row] = []
    for processes in (0, 1):
        seconds: dict[str, list[float]] = {"paramserver run": [], "torch alone": []}
        for _ in range(repetitions):
            seconds["torch alone"].append(_step([sys.executable, str(SCRIPT), "--plain"], processes))
            sizes = ["--servers", "1", "--workers", str(WORKERS), "--", "--slices", str(WORKERS)]
            ours = [sys.executable, "-m", "paramserver", "run", str(SCRIPT), *sizes]
            seconds["paramserver run"].append(_step(ours, processes))
        found += rows("load", f"step, num_workers={processes}", seconds, "paramserver run")
    return found


def _step(command: list[str], processes: int) -> float:
    """Seconds of a step."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "seconds"
        times = ["--read-s", str(READ_S), "--compute-s", str(COMPUTE_S), "--processes", str(processes)]
        call([*command, *times, "--out", str(out)])
        return float(out.read_text())
