"""Decides which workers are *stalled*: they live and report, but their scripts hand in no slice.

For example, a worker whose data loader hangs still renews its lease. Times are arguments, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

# A worker may take this many times the usual time of a slice in this job.
_TIMES = 4.0


@dataclass(slots=True)
class _Seen:
    slices: int
    slice_s: float
    since: float  # when it last handed in a slice, or waited for others


class Progress:
    """Hears the reports of workers, and says which of them are stalled."""

    def __init__(self, stall_s: float) -> None:
        """``stall_s``: for how long a worker may hand in nothing, unless slices usually take longer; 0: for ever."""
        self.stall_s = stall_s
        self.stalled: frozenset[int] = frozenset()
        self._seen: dict[int, _Seen] = {}

    def hear(self, worker: int, slices: int, at_work: bool, slice_s: float, now: float) -> None:
        """A report: slices so far, whether it is the script's turn, and how long its slices usually take (0: unknown).

        A worker that has made progress is no longer stalled.
        """
        seen = self._seen.get(worker)
        if seen is None or not at_work or seen.slices != slices:
            self._seen[worker] = _Seen(slices, slice_s, now)
            self.stalled -= {worker}

    def gone(self, worker: int) -> None:
        """The worker is no longer a member."""
        self._seen.pop(worker, None)
        self.stalled -= {worker}

    @property
    def limit_s(self) -> float:
        """For how long a worker may hand in nothing at present."""
        usual = [seen.slice_s for seen in self._seen.values() if seen.slice_s > 0]
        return max(self.stall_s, _TIMES * median(usual) if usual else 0.0)

    def look(self, now: float) -> frozenset[int]:
        """Workers that have become stalled since the last call. Empty if all workers would be stalled."""
        if not self.stall_s:
            return frozenset()
        limit_s, before = self.limit_s, self.stalled
        slow = frozenset(worker for worker, seen in self._seen.items() if now - seen.since > limit_s)
        self.stalled = slow if len(slow) < len(self._seen) else frozenset()
        return self.stalled - before
