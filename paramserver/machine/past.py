"""The runs of this machine that have ended: one small file per run, of which the newest hundred are kept.

The files lie where this user's state lies, and only this user can read them.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from paramserver.config.private import state_root
from paramserver.machine.runtime import read, write

# Older runs are forgotten.
_KEPT = 100


@dataclass(frozen=True, slots=True)
class PastRun:
    """A run that has ended: when it began and ended (seconds since 1970), its command, and how it ended.

    ``directory`` is where the command was typed. ``report`` is the path of its report; empty: none.
    """

    name: str
    began_s: float
    ended_s: float
    command: str
    directory: str
    code: int
    result: str
    report: str = ""


def _directory() -> Path:
    return state_root() / ".runs"  # no job has a name that begins with a dot


def keep_run(run: PastRun) -> None:
    """Keep the run. Nothing happens where this user can write no state: the run does not depend on it."""
    with contextlib.suppress(OSError, RuntimeError):
        directory = _directory()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(f"{round(run.began_s * 1000):015d}-{run.name}.json", run, directory)
        for path in sorted(directory.glob("*.json"))[:-_KEPT]:
            path.unlink(missing_ok=True)


def past_runs(name: str | None = None) -> list[PastRun]:
    """The runs that are kept, the newest first; of this name, if one is given."""
    try:
        paths = sorted(_directory().glob("*.json"), reverse=True)
    except (OSError, RuntimeError):
        return []
    found = [run for path in paths if (run := read(path, PastRun)) is not None]
    return [run for run in found if name in (None, run.name)]


def told(run: PastRun) -> list[str]:
    """Lines about a run for people: when, its name and result; its command and directory; its report."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.began_s))
    lines = [f"{when}  {run.name}  {run.result}", f"  {run.command}  (in {run.directory})"]
    if run.report:
        lines.append(f"  report {run.report}" + ("" if Path(run.report).is_file() else ", which is not there any more"))
    return lines
