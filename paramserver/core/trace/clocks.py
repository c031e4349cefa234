"""The clock of a process in terms of the coordinator's clock, from questions that the process has asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One question for the coordinator's clock. Times in nanoseconds; the first two by the clock of the process."""

    asked_ns: int
    answered_ns: int
    coordinator_ns: int

    @property
    def offset_ns(self) -> int:
        """How far the coordinator's clock is ahead, if the way there takes as long as the way back."""
        return self.coordinator_ns - (self.asked_ns + self.answered_ns) // 2

    @property
    def error_ns(self) -> int:
        """The offset is right up to this error, however long each way has taken."""
        return (self.answered_ns - self.asked_ns + 1) // 2


@dataclass(frozen=True, slots=True)
class Alignment:
    """Times of a process as times of the coordinator, right up to ``error_ns``; None: the error is not known.

    The offset at ``at_ns`` is ``offset_ns``, and changes by ``drift`` nanoseconds in each nanosecond.
    """

    offset_ns: int = 0
    error_ns: int | None = 0
    at_ns: int = 0
    drift: float = 0.0

    def aligned(self, time_ns: int) -> int:
        """The same moment by the coordinator's clock."""
        return time_ns + self.offset_ns + round((time_ns - self.at_ns) * self.drift)


def align(samples: Sequence[Sample], same_clock: bool = False) -> Alignment:
    """The alignment that agrees with the questions. Without a question the clocks are taken as equal.

    ``same_clock``: both processes say that they read the same clock. Believed unless a question shows the opposite.
    """
    if not samples:
        return Alignment(error_ns=0 if same_clock else None)
    if same_clock and all(abs(sample.offset_ns) <= sample.error_ns for sample in samples):
        return Alignment()
    low = max(sample.offset_ns - sample.error_ns for sample in samples)
    high = min(sample.offset_ns + sample.error_ns for sample in samples)
    if low <= high:  # one offset agrees with all questions
        return Alignment((low + high) // 2, (high - low + 1) // 2)
    # One clock is faster than the other: a line through the best question of each half.
    ordered = sorted(samples, key=lambda sample: sample.asked_ns)
    half = len(ordered) // 2
    early, late = (min(part, key=lambda sample: sample.error_ns) for part in (ordered[:half], ordered[half:]))
    apart = max(1, late.asked_ns - early.asked_ns)
    drift = (late.offset_ns - early.offset_ns) / apart
    return Alignment(early.offset_ns, max(early.error_ns, late.error_ns), early.asked_ns, drift)
