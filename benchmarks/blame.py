"""Causes injected one at a time into real runs, and healthy runs: are the named member and cause right?"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.launch import SCRIPTS, environment
from benchmarks.rows import Row
from paramserver.core.blame.causes import SHARE, Cause
from paramserver.testing.arming import environment as armed

SCRIPT = SCRIPTS / "blame.py"
RUN_S = 120.0
WORKERS, SERVERS, STEPS = 3, 2, 20
LONGER = 4
MODES = ("sync", "async")


@dataclass(frozen=True, slots=True)
class Injected:
    """A cause on purpose. ``script``: words for the script; ``fault``: a fault of a plan, as TOML.

    ``member`` and ``causes``: the member that has to be named, and its cause (several if each is true). ``options``:
    words for `paramserver run`; ``workers``: at the start.
    """

    name: str
    member: str
    causes: tuple[Cause, ...]
    script: Sequence[str] = ()
    fault: str = ""
    options: Sequence[str] = ()
    workers: int = WORKERS


def _fault(text: str) -> str:
    return f"[[fault]]\n{text}\n"


_GRPC = ("--set", "cluster.transport=grpc")
_WORKER, _SERVER = "worker-1", "server-1"
CAUSES = (
    Injected("the loader sleeps", _WORKER, (Cause.DATA,), ("--data", "sleep")),
    Injected("the loader computes", _WORKER, (Cause.DATA,), ("--data", "burn")),
    Injected("the loader is always slow", _WORKER, (Cause.DATA,), ("--data", "little", "--always")),
    Injected("a process of the loader sleeps", _WORKER, (Cause.DATA,), ("--data", "sleep", "--processes", "1")),
    Injected("the computation waits", _WORKER, (Cause.COMPUTE,), ("--compute", "sleep")),
    Injected("the computation computes", _WORKER, (Cause.COMPUTE,), ("--compute", "burn")),
    Injected("the computation is always slow", _WORKER, (Cause.COMPUTE,), ("--compute", "little", "--always")),
    Injected("the script is slow between steps", _WORKER, (Cause.OTHER,), ("--other", "sleep")),
    Injected("garbage while computing", _WORKER, (Cause.GC,), ("--compute", "collect")),
    Injected("garbage while loading", _WORKER, (Cause.GC,), ("--data", "collect")),
    Injected("a starved core while computing", _WORKER, (Cause.STARVED,), ("--compute", "starve")),
    Injected("a starved core while loading", _WORKER, (Cause.STARVED,), ("--data", "starve")),
    Injected(
        "a paused worker", _WORKER, (Cause.PAUSED,), (), 'process = "worker-1"\ndo = "stop"\nstep = 7\nseconds = 2.0'
    ),
    Injected(
        "a paused server", _SERVER, (Cause.PAUSED,), (), 'process = "server-1"\ndo = "stop"\nstep = 7\nseconds = 2.0'
    ),
    Injected(
        "a server's update is slow once",
        _SERVER,
        (Cause.SERVER,),
        (),
        'at = "apply.mid"\ndo = "delay"\nwho = "server-1"\nstep = 7\nseconds = 2.0',
    ),
    Injected(
        "a server's update is always slow",
        _SERVER,
        (Cause.SERVER,),
        (),
        'at = "apply.mid"\ndo = "delay"\nwho = "server-1"\ntimes = 0\nnth = 20\nseconds = 0.4',
    ),
    Injected(
        "a push takes long",
        _WORKER,
        (Cause.LINK,),
        (),
        'call = "Shard.Push"\ndo = "delay"\nwho = "worker-1"\nstep = 7\nseconds = 2.0',
        _GRPC,
    ),
    Injected(
        "pushes always take long",
        _WORKER,
        (Cause.LINK,),
        (),
        'call = "Shard.Push"\ndo = "delay"\nwho = "worker-1"\nstep = 4\ntimes = 0\nseconds = 0.4',
        _GRPC,
    ),
    Injected(
        "a pull takes long",
        _WORKER,
        (Cause.LINK,),
        (),
        'call = "Shard.Pull"\ndo = "delay"\nwho = "worker-1"\nstep = 7\nseconds = 2.0',
        _GRPC,
    ),
    Injected("a worker joins late", "worker-2", (Cause.JOINED,), ("--late",), workers=2),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of a run. ``named``: (member, cause) of the longest named step; ``others``: further named members.

    ``starved``: the injected work had no core for most of its time, since the machine was busy.
    """

    named: tuple[str, str]
    others: tuple[str, ...]
    sentence: str
    starved: bool = False

    def right(self, injected: Injected | None) -> bool:
        """Whether the verdict is right. None: a healthy run, which must name no member."""
        if injected is None:
            return not self.named[0] and not self.others
        member, cause = self.named
        causes = (*injected.causes, Cause.STARVED) if self.starved else injected.causes
        return member == injected.member and cause in causes and not self.others


def watch(injected: Injected | None, mode: str) -> Verdict:
    """A run with this cause, or a healthy one. Raises RuntimeError if the run fails."""
    workers = injected.workers if injected else WORKERS
    slices = STEPS * WORKERS
    if injected and injected.workers < WORKERS:
        slices *= LONGER  # on a busy machine the process that joins takes long to begin
    with tempfile.TemporaryDirectory(prefix="blame-") as directory:
        place = Path(directory)
        summary = place / "summary.json"
        command = [sys.executable, "-m", "paramserver", "run", str(SCRIPT), "--summary", str(summary), "--mode", mode]
        command += ["--workers", str(workers), "--servers", str(SERVERS), "--slices-per-step", str(WORKERS)]
        command += ["--staleness", "1"] if mode == "async" else []
        command += [*(injected.options if injected else ()), "--", "--slices", str(slices)]
        command += injected.script if injected else ()
        # Commands that the script starts find this job, and no other job.
        environ = {**environment(), "TMPDIR": directory, "XDG_STATE_HOME": directory}
        environ.pop("XDG_RUNTIME_DIR", None)
        if injected and injected.fault:
            plan = place / "plan.toml"
            plan.write_text(_fault(_in_mode(injected.fault, mode)))
            environ |= armed(plan)
        try:
            done = subprocess.run(command, env=environ, cwd=place, capture_output=True, text=True, timeout=RUN_S)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{injected and injected.name}: longer than {RUN_S:g} s") from error
        if done.returncode:
            raise RuntimeError(f"{injected and injected.name}: code {done.returncode}\n{done.stdout}{done.stderr}")
        shares = [int(share) for share in re.findall(r"had a core for (\d+)% of its time", done.stdout)]
        starved = bool(shares) and min(shares) < 100 * (1 - SHARE)
        return replace(verdict(json.loads(summary.read_text())["blame"]), starved=starved)


def _in_mode(fault: str, mode: str) -> str:
    """Steps are versions: in asynchronous mode there are as many times more of them as there are workers."""
    if mode == "sync":
        return fault
    lines = [line.split(" = ") for line in fault.splitlines()]
    return "\n".join(f"step = {int(value) * WORKERS}" if key == "step" else f"{key} = {value}" for key, value in lines)


def verdict(blame: dict[str, Any]) -> Verdict:
    """The verdict in the summary of a run."""
    steps = [step for step in blame["worst"] if step["member"]]
    first = steps[0] if steps else {"member": "", "cause": "", "sentence": ""}
    named = {step["member"] for step in steps} | ({blame["chronic"].split()[0]} if blame["chronic"] else set())
    sentence = first["sentence"] or blame["chronic"]
    return Verdict((first["member"], first["cause"]), tuple(sorted(named - {first["member"]})), sentence)


def run(repetitions: int) -> list[Row]:
    """All causes in both modes, and as many healthy runs, and a table of them. ``repetitions`` is ignored."""
    del repetitions
    only = os.environ.get("BLAME_ONLY", "")
    print(f"{'mode':<6}{'cause on purpose':<36}{'named':<12}{'cause':<30}right")
    for mode in MODES:
        for kind, cases in (("causes", CAUSES), ("healthy", (None,) * len(CAUSES))):
            right = tried = 0
            for case in cases:
                name = case.name if case else "healthy"
                if only and only not in f"{mode} {name}":
                    continue
                found = watch(case, mode)
                good = found.right(case)
                tried, right = tried + 1, right + good
                also = f" also {', '.join(found.others)}" if found.others else ""
                print(
                    f"{mode:<6}{name:<36}{found.named[0]:<12}{found.named[1]:<30}{'yes' if good else 'NO'}{also}",
                    flush=True,
                )
                if not good:
                    print(f"      {found.sentence}", flush=True)
            print(f"{mode}, {kind}: {right} of {tried} right", flush=True)
    return []
