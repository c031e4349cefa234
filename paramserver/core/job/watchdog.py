"""Decides whether a training job is stuck: no contribution counts, and no process can change that. Times in seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

# Nothing may count for this many times the longest of the last intervals between two counts.
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
    # For how long, at least, nothing may count while no script is at work.
    limit_s: float
    # Workers whose scripts are at work, and whether these scripts have to hand in slices in a limited time.
    at_work: Sequence[str] = ()
    watched: bool = True
    # Clauses such as "worker-0 waits for step 7: slice 2 (worker-1)".
    waits: Sequence[str] = ()
    # Clauses about missing members that no launcher replaces.
    missed: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """``stuck``: a sentence, empty while the job makes progress. ``for_s``: for how long it has been stuck.

    ``hopeless``: no script is at work and no member is missing, so that nothing can change it.
    """

    stuck: str = ""
    for_s: float = 0.0
    hopeless: bool = False


class Watchdog:
    """Looks at one job, again and again."""

    def __init__(self) -> None:
        self._progress: Hashable = None
        self._since: float | None = None
        self._intervals: deque[float] = deque(maxlen=_INTERVALS)

    def look(self, sight: Sight | None, now: float) -> Verdict:
        """Judge the job at ``now``. ``sight`` None: there is nothing to watch just now."""
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
