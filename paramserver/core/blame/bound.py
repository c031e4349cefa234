"""Asynchronous mode: who holds the others at the bound most of the time, over many slices."""

from __future__ import annotations

from collections import Counter, deque

from paramserver.core.blame.causes import SHARE, Cause, Finding
from paramserver.core.blame.facts import Blamed
from paramserver.core.blame.sentences import of_held

# The time that is looked at, in seconds; after less than the second number nothing is said.
_WINDOW_S, _LEAST_S = 30.0, 5.0
# A worker is named if it was waited for so often, in this part of all waits, and for this part of the time.
_LEAST_MANY, _MOST, _LONG = 8, 0.7, 0.3
_KEPT = 1024


class AtBound:
    """The waits at the bound of the last half minute, one for each clock of a worker that others waited for."""

    def __init__(self) -> None:
        self._waits: deque[Blamed] = deque(maxlen=_KEPT)
        self._began: float | None = None

    def add(self, blamed: Blamed) -> None:
        """Workers were held at the bound by ``blamed.member``."""
        self._began = blamed.at - blamed.waited if self._began is None else self._began
        self._waits.append(blamed)

    def chronic(self, now: float) -> str:
        """The worker that holds the others up, in words; empty: no worker, or the data does not say why."""
        while self._waits and self._waits[0].at < now - _WINDOW_S:
            self._waits.popleft()
        lasted = min(_WINDOW_S, now - self._began) if self._began is not None else 0.0
        if lasted < _LEAST_S or not self._waits:
            return ""
        member, times = Counter(one.member for one in self._waits).most_common(1)[0]
        waits = [one for one in self._waits if one.member == member]
        waited = sum(one.waited for one in waits)
        if times < _LEAST_MANY or times < _MOST * len(self._waits) or waited < _LONG * lasted:
            return ""
        causes = {cause: sum(one.seconds for one in waits if one.cause is cause) for cause in Cause}
        cause, seconds = max(causes.items(), key=lambda item: item[1])
        if cause in (Cause.UNKNOWN, Cause.JOINED) or seconds < SHARE * waited:
            return ""
        return of_held(member, Finding(cause, seconds), min(1.0, waited / lasted), lasted)
