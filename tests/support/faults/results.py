"""The file of results of tests/faults: one entry for each case, the newest one."""

from __future__ import annotations

import fcntl
from pathlib import Path

from tests.support.faults.runs import Outcome, load, save

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "build" / "faults" / "results.json"


class Results:
    """Outcomes by the name of the case. Several processes may add to one file."""

    def __init__(self, path: Path = RESULTS) -> None:
        self._path = path

    def all(self) -> dict[str, Outcome]:
        """All outcomes, in the order in which the cases were run first."""
        return load(self._path)

    def good(self) -> set[str]:
        """The names of the cases that have gone well."""
        return {name for name, outcome in self.all().items() if outcome.verdict == "ok"}

    def add(self, outcome: Outcome) -> None:
        """Write one outcome in place of the former one of its case."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            save(self._path, {**self.all(), outcome.name: outcome})
