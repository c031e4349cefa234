"""Starts both sides of a comparison: a script under `paramserver run`, and the same script under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
# A run that takes longer hangs.
RUN_S = 240.0


def under_run(
    script: Path, words: Sequence[str], workers: int, servers: int = 1, options: Sequence[str] = ()
) -> tuple[Any, dict[str, Any]]:
    """The facts that the script writes to ``--out``, and the summary of the run. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as directory:
        out, summary = Path(directory) / "out.json", Path(directory) / "summary.json"
        sizes = ["--servers", str(servers), "--workers", str(workers), "--summary", str(summary)]
        command = [sys.executable, "-m", "paramserver", "run", str(script), *sizes, *options]
        call([*command, "--", *words, "--out", str(out)])
        return json.loads(out.read_text()), json.loads(summary.read_text())


def under_torchrun(script: Path, words: Sequence[str], ranks: int, how: str = "--ddp") -> Any:
    """The facts that the script, called with ``how``, writes to ``--out``. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        call([*torchrun, str(script), how, *words, "--out", str(out)])
        return json.loads(out.read_text())


def flags(values: Mapping[str, object]) -> list[str]:
    """The options as words of a command line."""
    return [str(word) for pair in values.items() for word in pair]


def environment() -> dict[str, str]:
    """The environment of children: one thread each, and the modules that this process finds."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def call(command: Sequence[str], timeout_s: float = RUN_S) -> str:
    """Standard output of a command. Raises RuntimeError, with its output, if the command fails or takes longer."""
    try:
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{' '.join(command[:4])} took longer than {timeout_s:g} s") from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout
