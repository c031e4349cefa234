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
    """Counts failures in a row: those between which the job has not reached a version it had not reached before.

    A job that was rolled back and dies at the same version over and over makes no progress by this measure.
    ``most``: after how many failures in a row a process is started again.
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
        """The process has ended: after how many seconds to start it again, or None if that was once too often."""
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
    """How long to wait before a process is started again that has failed so often in a row: 0, 0.5, 1, 2, ... s."""
    return 0.0 if failures < 2 else min(_SECOND_S * 2 ** (failures - 2), _LONGEST_S)
