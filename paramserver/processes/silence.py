"""How long processes have been silent, and for whom a run waits at its end. Pure: the caller has the clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Longer steps between two looks do not count: this process was paused, and the others were not silent.
_LONGEST_STEP_S = 1.0
# After the end of the job a script may evaluate or save something; later on the wait is named again and again.
_FIRST_S = 5.0
_NEXT_S = 60.0


class Silence:
    """Seconds of silence by pid, by a clock that stands still while this process is paused.

    ``now``: monotonic seconds; call :meth:`look` several times a second.
    """

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


class Lingering:
    """Scripts may run on after they have left the job: the run waits for them as long as they take, and says so."""

    def __init__(self) -> None:
        self._since_s = self._said_s = 0.0
        # The processes that still ran at the last look.
        self._names: list[str] = []

    def look(self, now_s: float, names: Sequence[str]) -> str:
        """A sentence if it is time for one. ``names``: processes that run although the job is done."""
        if not self._names:
            self._since_s, self._said_s = now_s, now_s + _FIRST_S - _NEXT_S
        self._names = list(names)
        if not names or now_s - self._said_s < _NEXT_S:
            return ""
        self._said_s = now_s
        return (
            f"the job is done, and the run has waited {now_s - self._since_s:.0f} s for {', '.join(names)} to end: "
            "the script goes on after ctx.close(), or a thread of it that is no daemon does"
        )
