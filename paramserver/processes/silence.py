"""How long processes have been silent, by a clock that stands still while this process is paused itself."""

from __future__ import annotations

from collections.abc import Iterable

# Longer steps between two looks do not count: this process was paused, and the others were not silent.
_LONGEST_STEP_S = 1.0


class Silence:
    """Seconds of silence by pid. ``now``: monotonic seconds; call :meth:`look` several times a second."""

    def __init__(self) -> None:
        self._quiet: dict[int, float] = {}
        self._looked_at: float | None = None

    def look(self, now: float, heard: Iterable[int], silent: Iterable[int]) -> None:
        """Note pids that were heard of since the last look, and silent ones. Silence counts after the first word."""
        step_s = min(now - self._looked_at, _LONGEST_STEP_S) if self._looked_at is not None else 0.0
        self._looked_at = now
        for pid in silent:
            if pid in self._quiet:
                self._quiet[pid] += step_s
        for pid in heard:
            self._quiet[pid] = 0.0

    def of(self, pid: int) -> float:
        """Seconds of silence of a process; 0 if it was never heard of."""
        return self._quiet.get(pid, 0.0)

    def forget(self, pid: int) -> None:
        """Forget a process that has ended."""
        self._quiet.pop(pid, None)
