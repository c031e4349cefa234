"""How long a start takes: from the command to the end of the first step of a trivial script; and a restart.

`paramserver run` with two servers and two workers stands beside torchrun with two ranks (gloo, DDP), and beside
`paramserver run` without a preloaded process. A restart is the time from the death of a process to the end of the first
step in which its successor takes part.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.launch import RUN_S, SCRIPTS, call, environment
from benchmarks.rows import Row, rows
from paramserver.cli.look.facts import describe
from paramserver.machine.jobs import fetch_status, find_job

SCRIPT = SCRIPTS / "start.py"
OURS, ALONE, TORCHRUN = "paramserver run", "without preload", "torchrun, gloo"
BIG = 32
SMALL_CASE, BIG_CASE = "first step, 2 servers, 2 workers", f"first step, 1 server, {BIG} workers"
JOB = "benchmark-start"
POLL_S = 0.01
# Steps before the kill: by then all is warm.
WARM = 50


def run(repetitions: int) -> list[Row]:
    """All cases; alternatives take turns. Raises RuntimeError if a run fails."""
    small: dict[str, list[float]] = {OURS: [], ALONE: [], TORCHRUN: []}
    big: dict[str, list[float]] = {OURS: []}
    again: dict[str, dict[str, list[float]]] = {role: {OURS: [], ALONE: []} for role in ("server", "worker")}
    for number in range(repetitions):
        small[TORCHRUN].append(first_step(_torchrun(2), 2))
        small[OURS].append(first_step(_ours(2, 2, True), 2))
        small[ALONE].append(first_step(_ours(2, 2, False), 2))
        big[OURS].append(first_step(_ours(1, BIG, True), BIG))
        for preload, variant in ((True, OURS), (False, ALONE)):
            for role, seconds in restart(preload).items():
                again[role][variant].append(seconds)
        said = ", ".join(f"{name} {times[-1]:.1f} s" for name, times in small.items())
        back = ", ".join(f"{role} {times[OURS][-1]:.2f} s" for role, times in again.items())
        print(
            f"repetition {number + 1} of {repetitions}: {said}; {BIG} workers {big[OURS][-1]:.1f} s; again: {back}",
            file=sys.stderr,
            flush=True,
        )
    found = rows("start", SMALL_CASE, small, OURS) + rows("start", BIG_CASE, big, OURS)
    return found + [row for role, times in again.items() for row in rows("start", f"a {role} again", times, OURS)]


def _ours(servers: int, workers: int, preload: bool, *options: str) -> Sequence[str]:
    sizes = ["--servers", str(servers), "--workers", str(workers), "--set", f"cluster.preload={str(preload).lower()}"]
    return [sys.executable, "-m", "paramserver", "run", str(SCRIPT), *sizes, *options, "--"]


def _torchrun(ranks: int) -> Sequence[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, str(SCRIPT), "--ddp"]


def first_step(command: Sequence[str], ranks: int) -> float:
    """Seconds from the command to the first step of the last rank. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as directory:
        begun = time.time()
        call([*command, "--out", directory])
        return max(steps(Path(directory), rank)[0][0] for rank in range(ranks)) - begun


def steps(directory: Path, rank: int) -> list[tuple[float, int]]:
    """When this rank finished steps (seconds of the wall clock), and the pid of the process that did. Oldest first."""
    path = directory / f"steps.{rank}"
    words = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(float(at), int(pid)) for at, pid in (row for row in words if len(row) == 2)]


def back_at(times: Sequence[float], killed_at: float) -> float:
    """When steps went on after a pause: the end of the longest pause that a step after ``killed_at`` ends.

    ``times``: ends of steps, oldest first. Raises ValueError if no step has followed.
    """
    pauses = [(later - earlier, later) for earlier, later in pairwise(times) if later > killed_at]
    if not pauses:
        raise ValueError("no step has followed")
    return max(pauses)[1]


def restart(preload: bool) -> dict[str, float]:
    """Seconds from the kill of a server, then of a worker, to the next step with it. Raises RuntimeError."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        words = [*_ours(2, 2, preload, "--job", JOB), "--goes-on", "--out", name]
        with (directory / "said").open("w") as said:
            process = subprocess.Popen(words, env=environment(), stdout=said, stderr=subprocess.STDOUT)
        try:
            running = _Running(process, directory)
            found = {"server": running.server(), "worker": running.worker()}
            (directory / "over").touch()
            process.wait(RUN_S)
        except BaseException as error:
            process.send_signal(signal.SIGTERM)
            process.wait(RUN_S)
            raise RuntimeError(f"{error}\n{(directory / 'said').read_text()}") from error
        return found


class _Running:
    """A run whose processes are killed."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path) -> None:
        self._process = process
        self._directory = directory

    def server(self) -> float:
        """Seconds until a step with the next server is done."""

        def times() -> list[float]:
            return [at for at, _ in steps(self._directory, 0)]

        self._until("steps", lambda: len(times()) > WARM)
        before, killed_at = _kill("server-1"), time.time()
        self._until("another server", lambda: _pid("server-1") not in (0, before))
        seen_at = time.time()
        self._until("steps with it", lambda: len([at for at in times() if at > seen_at]) > WARM)
        return back_at(times(), killed_at) - killed_at

    def worker(self) -> float:
        """Seconds until the next worker has done a step."""
        before, killed_at = _kill("worker-1"), time.time()

        def first() -> list[float]:
            return [at for at, pid in steps(self._directory, 1) if at > killed_at and pid != before]

        self._until("a step of another worker", lambda: bool(first()))
        return first()[0] - killed_at

    def _until(self, what: str, found: Callable[[], bool]) -> None:
        deadline = time.monotonic() + RUN_S
        while not found():
            if self._process.poll() is not None:
                raise RuntimeError(f"the run has ended before: {what}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {RUN_S:g} s: {what}")
            time.sleep(POLL_S)


def _kill(name: str) -> int:
    pid = _pid(name)
    os.kill(pid, signal.SIGKILL)
    return pid


def _pid(name: str) -> int:
    """Of the present process of this name; 0 if there is none."""
    processes: list[dict[str, Any]] = describe(fetch_status(find_job(JOB).coordinator))["processes"]
    return next((int(one["pid"]) for one in processes if one["name"] == name and not one["gone"]), 0)
