"""``paramserver logs``: the output of the processes of a job that ``paramserver run`` has started."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from paramserver.cli.common import Name, tell
from paramserver.errors import ConfigError
from paramserver.machine.jobs import Job, find_job
from paramserver.processes.alive import is_alive
from paramserver.processes.lines import harmless
from paramserver.processes.logfiles import Line, Reader, names_in

_EVERY_S = 0.2


def logs(*names: str, follow: bool = False, lines: int | None = None, job: Name = None) -> int:
    """Print the output of the processes of a job that "paramserver run" has started on this machine.

    Each line has its time and the name of its process. The launcher itself is called "run".

    Parameters
    ----------
    names
        Processes, such as worker-3; all if none is named.
    follow
        Go on with what the processes write, until the job ends.
    lines
        Begin with the last so many lines; all that are kept if not given.
    job
        Name of the job, where several run on this machine.
    """
    if lines is not None and lines < 0:
        raise ConfigError(f"--lines is {lines}, but must be 0 or more")
    found = find_job(job)
    if not found.logs:
        raise ConfigError(
            f"job {found.name} was not started by paramserver run, so its processes write where they were started; "
            "look there (a terminal, journalctl, docker logs, kubectl logs)"
        )
    directory = Path(found.logs)
    there = names_in(directory)
    if missing := [name for name in names if name not in there]:
        raise ConfigError(f'no process is called "{missing[0]}"; there are: {", ".join(there)}')
    readers: dict[str, Reader] = {}
    try:
        begin = _new_lines(directory, names, readers)
        _print(begin if lines is None else begin[max(0, len(begin) - lines) :])
        if follow:
            _follow(found, directory, names, readers)
    finally:
        for reader in readers.values():
            reader.close()
    return 0


def _follow(job: Job, directory: Path, names: tuple[str, ...], readers: dict[str, Reader]) -> None:
    """Print new lines until the launcher has ended."""
    alive = True
    while alive:
        time.sleep(_EVERY_S)
        alive = is_alive(job.pid, job.birth)
        _print(_new_lines(directory, names, readers))
    tell("The job has ended.", file=sys.stderr)


def _new_lines(directory: Path, names: tuple[str, ...], readers: dict[str, Reader]) -> list[Line]:
    """The lines since the last call, by time. ``readers``: of the processes that were seen before."""
    for name in names or names_in(directory):
        if name not in readers:
            readers[name] = Reader(directory, name)
    return sorted((line for reader in readers.values() for line in reader.lines()), key=lambda line: line.at)


def _print(lines: list[Line]) -> None:
    terminal = sys.stdout.isatty()
    for line in lines:
        clock = time.strftime("%H:%M:%S", time.localtime(line.at))
        text = f"{clock} {line.name} | {harmless(line.text) if terminal else line.text}"
        print(text.encode(sys.stdout.encoding, "backslashreplace").decode(sys.stdout.encoding))
    sys.stdout.flush()
