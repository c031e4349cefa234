"""An all-reduce on the servers, beside gloo in the same two processes: `torch.distributed.all_reduce` of float32."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.launch import SCRIPTS, call
from benchmarks.rows import Row, rows

SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20, "40 MiB": 40 << 20}
RANKS = 2
_ROUNDS = 7


def run(repetitions: int) -> list[Row]:
    """Rows by size. A unit of work is one all-reduce; each repetition is a run of its own with seven rounds."""
    found: dict[str, dict[str, list[float]]] = {case: {} for case in SIZES}
    for _ in range(repetitions):
        seconds = _measure()
        for case, nbytes in SIZES.items():
            for variant, times in seconds[str(nbytes)].items():
                found[case].setdefault(variant, []).extend(times)
    return [row for case in SIZES for row in rows("collectives", f"all-reduce of {case}", found[case], "paramserver")]


def _measure() -> dict[str, dict[str, list[float]]]:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out.json"
        cluster = ["--ddp", "--servers", "1", "--workers", str(RANKS)]
        script = [str(SCRIPTS / "collectives.py"), *cluster, "--", *map(str, SIZES.values())]
        call([sys.executable, "-m", "paramserver", "run", *script, "--rounds", str(_ROUNDS), "--out", str(out)])
        found: dict[str, dict[str, list[float]]] = json.loads(out.read_text())
        return found
