"""How often the processes of a run have been started again, and when that is enough. Pure: no processes, no clock."""

from __future__ import annotations

from dataclasses import dataclass

_SECOND_S = 0.5
_LONGEST_S = 30.0


@dataclass(slots=True)
class _Row:
    """One process. ``failures`` in a row; ``begun_at``: the highest version of the job when it was started."""

    failures: int = 0
    begun_at: int = 0


class Restarts:
    """Counts failures in a row: between them, the job has reached no higher version than ever before.

    So a job that is rolled back and dies at the same version again and again makes no progress.
    ``most``: the number of failures in a row after which a process is still started again.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        # How often each process was started again, by name.
        self.total: dict[str, int] = {}
        self._rows: dict[str, _Row] = {}
        self._highest = 0

    def reached(self, version: int) -> None:
        """The job has this version now."""
        self._highest = max(self._highest, version)

    def started(self, name: str) -> None:
        """The process begins, for the first time or again."""
        self._rows.setdefault(name, _Row()).begun_at = self._highest

    def failed(self, name: str) -> float | None:
        """The process has ended. Returns the seconds until its next start; None if it has failed too often."""
        row = self._rows[name]
        if self._highest > row.begun_at:
            row.failures = 0
        row.failures += 1
        if row.failures > self.most:
            return None
        self.total[name] = self.total.get(name, 0) + 1
        return cool_down_s(row.failures)

    def failures(self, name: str) -> int:
        """How often it has failed in a row."""
        return self._rows[name].failures


def cool_down_s(failures: int) -> float:
    """Seconds before the next start of a process, by its failures in a row: 0, 0.5, 1, 2, ..."""
    return 0.0 if failures < 2 else min(_SECOND_S * 2 ** (failures - 2), _LONGEST_S)
