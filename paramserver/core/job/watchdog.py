"""Decides whether a training job is stuck: no contribution counts, and no process can change that. Times in seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

# Nothing may count for so many times as long as it has lately taken at most.
_TIMES = 4.0
_INTERVALS = 8
# A script that is at work, and does not wait, may evaluate for long: its limit is longer by this factor.
_AT_WORK = 4.0
_NAMES = 4


@dataclass(frozen=True, slots=True)
class Sight:
    """Facts about the job at one moment."""

    # Another value whenever something has counted.
    progress: Hashable
    # How long nothing may count while nobody is at work, at least.
    limit_s: float
    # Workers whose scripts have their turn, and whether nothing else is to be expected of them than slices.
    at_work: Sequence[str] = ()
    watched: bool = True
    # Who waits for what: "worker-0 waits for step 7: slice 2 (worker-1)".
    waits: Sequence[str] = ()
    # Members without whom nothing goes on, and whom nobody here replaces: whole clauses.
    missed: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """``stuck``: a sentence, empty while the job gets on; for how long it has been so; whether that is without hope.

    Without hope: neither a script at work nor anybody who is missed may change it.
    """

    stuck: str = ""
    for_s: float = 0.0
    hopeless: bool = False


class Watchdog:
    """Looks at one job after the other moment. A look with None means that there is nothing to watch just now."""

    def __init__(self) -> None:
        self._progress: Hashable = None
        self._since: float | None = None
        self._intervals: deque[float] = deque(maxlen=_INTERVALS)

    def look(self, sight: Sight | None, now: float) -> Verdict:
        """How the job stands at ``now``."""
        if sight is None:
            self._since = None
            return Verdict()
        if self._since is None or sight.progress != self._progress:
            if self._since is not None:
                self._intervals.append(now - self._since)
            self._progress, self._since = sight.progress, now
            return Verdict()
        quiet_s = now - self._since
        limit_s = max(sight.limit_s, _TIMES * max(self._intervals, default=0.0))
        hopeless = not sight.missed and not sight.at_work
        if sight.at_work and not sight.missed:
            limit_s *= _AT_WORK
            if not sight.watched:
                return Verdict()
        if quiet_s <= limit_s:
            return Verdict()
        return Verdict(f"nothing has counted for {quiet_s:.0f} s: {_why(sight)}", quiet_s - limit_s, hopeless)


def _why(sight: Sight) -> str:
    if sight.missed:
        return "; ".join(sight.missed)
    if sight.at_work:
        names = ", ".join(sight.at_work[:_NAMES]) + (", ..." if len(sight.at_work) > _NAMES else "")
        return (
            f"{names} {'is' if len(sight.at_work) == 1 else 'are'} at work, but hand in nothing (an evaluation ends by "
            "itself; otherwise see what the script does)"
        )
    waits = "; ".join(sight.waits[:_NAMES]) + ("; ..." if len(sight.waits) > _NAMES else "")
    return waits or "nobody says what it waits for"
