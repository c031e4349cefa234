"""The numbers of the processes of a run under faults, by name: a file beside the plan, a JSON line per process."""

from __future__ import annotations

import json
import os
from pathlib import Path

from paramserver.processes.alive import is_alive


class ProcessBook:
    """The file. Of several processes with one name the latest counts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def beside(cls, plan: Path) -> ProcessBook:
        """The book that belongs to the plan in this file."""
        return cls(plan.with_name(plan.name + ".processes"))

    def note(self, name: str, pid: int) -> None:
        """The process ``pid`` is ``name`` from now on."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, (json.dumps({"name": name, "pid": pid}) + "\n").encode())
        finally:
            os.close(descriptor)

    def alive(self, name: str) -> int | None:
        """The number of the living process of this name; None if there is none."""
        if not self.path.exists():
            return None
        entries = [json.loads(line) for line in self.path.read_text().splitlines()]
        pids = [int(entry["pid"]) for entry in entries if entry["name"] == name]
        return pids[-1] if pids and is_alive(pids[-1]) else None
