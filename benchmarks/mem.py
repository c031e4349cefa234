"""Memory of a server and of a worker that train 100 M parameters with AdamW, over the memory that training needs.

A server needs two versions of the weights, the state of the optimizer and one inbox per worker. A worker needs its
weights and gradients. Shared memory counts once, divided among its processes (Pss). Python's own memory counts, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.launch import SCRIPTS, environment, flags
from benchmarks.rows import Row, rows

SCRIPT = SCRIPTS / "ready.py"
MEGABYTES, WORKERS, STEPS = 400, 2, 4
# Of AdamW: two numbers for each weight.
STATE = 2
# Of all roles together.
TOTAL = "all"
_RUN_S = 300.0
_PAUSE_S = 0.25
_ROLES = b"paramserver.roles.child"


def run(repetitions: int) -> list[Row]:
    """One run after the other; the rows hold seconds per step, the memory is in their case. Raises RuntimeError."""
    steps: list[float] = []
    peaks: dict[str, int] = {}
    for _ in range(repetitions):
        seconds, found = _once()
        steps += seconds
        peaks = {role: max(peaks.get(role, 0), size) for role, size in found.items()}
    needed = needs(MEGABYTES * 10**6, WORKERS)
    texts = {role: text(role, peaks[role], needed[role]) for role in needed}
    print("\n".join(texts.values()), file=sys.stderr)
    return [row for case in texts.values() for row in rows("mem", case, {"ours": steps}, "ours")]


def needs(model: int, workers: int) -> dict[str, int]:
    """Bytes by role, for a model of so many bytes."""
    return {"server": (2 + STATE + workers) * model, "worker": 2 * model}


def text(role: str, peak: int, needed: int) -> str:
    """The rows for people to read; sizes in bytes."""
    return f"{role}: {peak / 1e9:.2f} GB, {peak / needed:.2f} × {needed / 1e9:.2f} GB"


def _once() -> tuple[list[float], dict[str, int]]:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out.json"
        sizes = flags({"--servers": 1, "--workers": WORKERS})
        words = flags({"--megabytes": MEGABYTES, "--ranks": WORKERS, "--steps": STEPS, "--skip": 1, "--out": out})
        command = [sys.executable, "-m", "paramserver", "run", str(SCRIPT), *sizes, "--", *words]
        peaks = watched([*command, "--optimizer", "adamw"])
        return json.loads(out.read_text())["step_s"], peaks


def watched(command: Sequence[str]) -> dict[str, int]:
    """The largest sizes of the processes of a run, by role, and of all together. Raises RuntimeError if it fails."""
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        ended = threading.Event()
        peaks: dict[str, int] = {}
        watching = threading.Thread(target=_watch, args=(process.pid, peaks, ended))
        watching.start()
        try:
            said, _ = process.communicate(timeout=_RUN_S)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"the run took longer than {_RUN_S:g} s") from error
        finally:
            ended.set()
            watching.join()
            process.kill()
    if process.returncode:
        raise RuntimeError(f"the run ended with {process.returncode}:\n{said}")
    return peaks


def _watch(root: int, peaks: dict[str, int], ended: threading.Event) -> None:
    """Note the largest sizes of the run's processes, by role."""
    while not ended.wait(_PAUSE_S):
        total = 0
        for pid in descendants(root, _parents()):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if _ROLES not in words:
                    continue
                role = words[words.index(_ROLES) + 1].decode()
                size = resident(Path(f"/proc/{pid}/smaps_rollup").read_text())
            except OSError:  # it has ended
                continue
            peaks[role] = max(peaks.get(role, 0), size)
            total += size
        peaks[TOTAL] = max(peaks.get(TOTAL, 0), total)


def resident(rollup: str) -> int:
    """Bytes of /proc/PID/smaps_rollup: pages of several processes count in part for each."""
    return next(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))


def descendants(root: int, parents: Mapping[int, int]) -> list[int]:
    """The processes below ``root``; ``parents`` by process."""
    found, left = [], [root]
    while left:
        children = [pid for pid, parent in parents.items() if parent == left[0]]
        found += children
        left = [*left[1:], *children]
    return found


def _parents() -> dict[int, int]:
    parents = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            # pid (name) state parent …; a name may hold anything.
            parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return parents
