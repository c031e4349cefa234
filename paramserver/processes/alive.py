"""Whether a process that is known by its number still runs."""

from __future__ import annotations

import os
from pathlib import Path


def is_alive(pid: int, birth: int = 0) -> bool:
    """Whether process ``pid`` runs. ``birth``: the number that `process_birth` gave for the process; 0: not known.

    A process that has ended is dead, even if its parent has not asked for the exit code.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError, OverflowError):
        return False  # PermissionError: the pid is another user's by now
    facts = _facts(pid)
    return facts[0] not in ("Z", "X") and birth in (0, int(facts[19])) if facts else birth == 0


def process_birth(pid: int) -> int:
    """A number that tells this process from a later one with the same pid, or 0 if the system does not say."""
    facts = _facts(pid)
    return int(facts[19]) if facts else 0


def _facts(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if the process is gone, or the system has no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the command's name, in parentheses, may hold anything
