"""How fast counters of members rise: samples per second, bytes per second."""

from __future__ import annotations

from collections import deque

# A rate is that of the last reports within so many seconds.
WINDOW_S = 5.0


class Rates:
    """Totals that members report now and then, by member number."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[float, int]]] = {}

    def hear(self, ident: int, total: int, now: float) -> None:
        """A member reports its total. A total that falls begins anew."""
        seen = self._seen.setdefault(ident, deque())
        if seen and total < seen[-1][1]:
            seen.clear()
        seen.append((now, total))
        while len(seen) > 2 and now - seen[1][0] > WINDOW_S:
            seen.popleft()

    def of(self, ident: int, now: float) -> float:
        """Units per second; 0 for a member that has not reported twice, or not for a while."""
        seen = self._seen.get(ident)
        if not seen or len(seen) < 2 or now - seen[-1][0] > WINDOW_S:
            return 0.0
        (then, before), (last, after) = seen[0], seen[-1]
        return (after - before) / (last - then) if last > then else 0.0

    def forget(self, ident: int) -> None:
        """The process is a member no more."""
        self._seen.pop(ident, None)
