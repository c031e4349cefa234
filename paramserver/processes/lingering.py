"""For whom a run waits when its job has nothing left to do. Pure: the caller has the clock."""

from __future__ import annotations

from collections.abc import Sequence

# After the end of the job a script may evaluate or save something; later on the wait is named again and again.
_FIRST_S = 5.0
_NEXT_S = 60.0


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
