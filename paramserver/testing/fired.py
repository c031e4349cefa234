"""The faults that have struck so far: one JSON line per fault in a file that all processes of a run append to.

A line is written before the fault takes effect, so that the line is there even if the process dies of the fault. The
file also counts how often a fault has struck, so a process that begins anew does not die of the same fault again.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Fired:
    """A fault that has struck. ``fault``: its place in the plan; ``step``: -1 if not known; ``at``: wall clock."""

    fault: int
    who: str
    what: str
    do: str
    step: int
    pid: int
    at: float


class FiredLog:
    """The file. Processes and threads may use it at the same time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def beside(cls, plan: Path) -> FiredLog:
        """The log that belongs to the plan in this file."""
        return cls(plan.with_name(plan.name + ".fired"))

    def take(self, fault: int, times: int, who: str, what: str, do: str, step: int, pid: int = 0) -> bool:
        """Write down that a fault strikes now; False if it has struck ``times`` times already (0: no limit).

        ``pid``: the process that is struck, if it is not this one.
        """
        entry = Fired(fault, who, what, do, step, pid or os.getpid(), time.time())
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # the lock ends with the descriptor
            if times:
                with open(descriptor, closefd=False) as file:
                    if _counts(_parse(file))[fault] >= times:
                        return False
            os.write(descriptor, (json.dumps(asdict(entry)) + "\n").encode())
            return True
        finally:
            os.close(descriptor)

    def read(self) -> list[Fired]:
        """All faults that have struck, in order."""
        if not self.path.exists():
            return []
        with self.path.open() as file:
            return list(_parse(file))

    def counts(self) -> Counter[int]:
        """How often each fault has struck, by its place in the plan."""
        return _counts(self.read())


def _parse(lines: Iterable[str]) -> Iterable[Fired]:
    for line in lines:
        yield Fired(**json.loads(line))


def _counts(entries: Iterable[Fired]) -> Counter[int]:
    return Counter(entry.fault for entry in entries)
