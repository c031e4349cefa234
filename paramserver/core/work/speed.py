"""How fast a synchronous worker is, and when it asks for work (work stealing). Times are arguments, in seconds."""

from __future__ import annotations

from collections import deque
from statistics import median

# So many of the last slices and steps count.
_SLICES, _STEPS = 7, 4
# After this part of the time that a slice takes, a worker that waits asks for work; not before the second number.
_PATIENCE, _PATIENCE_S = 0.25, 0.01
# After a question in vain a worker waits longer, in this and the following steps. At most so many doublings.
_DOUBLINGS = 3
# While nothing is known of the time that a slice takes.
_UNKNOWN_S = 0.5
# If other workers were given so many slices of a worker's range in the last steps, the worker is slow.
_LOST = 2
# Slices are given to other workers in the last part of a step, after this share of its usual time.
_EARLY = 0.5
# If a step takes so many times as long as the last steps, and at least so long, other workers may be helping.
_LONG, _LONG_S = 1.5, 0.1


def longest_patience_s(work_s: float) -> float:
    """How long a worker that takes ``work_s`` for a slice waits between two questions of a step, at most."""
    return _first_patience_s(work_s) * float(2**_DOUBLINGS)


def _first_patience_s(work_s: float) -> float:
    """How long a worker that takes ``work_s`` for a slice waits before its first question of a step."""
    return max(_PATIENCE_S, _PATIENCE * work_s)


class Speed:
    """One worker's own view of its speed."""

    def __init__(self) -> None:
        self._works: deque[float] = deque(maxlen=_SLICES)
        self._pushes: deque[float] = deque(maxlen=_SLICES)
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._lost: deque[int] = deque(maxlen=_STEPS)
        self._begun_at: float | None = None
        self._step_at: float | None = None
        # Questions in vain: how many steps in a row had only these, and how many there were in this step.
        self._vain_steps = 0
        self._in_vain = 0
        self._useful = False  # the last question of this step gave a slice
        self._helped = False  # some question of this step did

    @property
    def work_s(self) -> float:
        """How long a slice usually takes, until it is handed in and pushed; 0: none was computed yet."""
        if not self._works:
            return 0.0
        return median(self._works) + (median(self._pushes) if self._pushes else 0.0)

    @property
    def slow(self) -> bool:
        """Whether other workers have to help this worker again and again. Then it pushes every contribution at once."""
        return sum(self._lost) >= _LOST

    def step(self, now: float, lost: int = 0, steps: int = 1) -> None:
        """A step begins, so many ``steps`` after the last one that this worker has seen.

        ``lost``: how many slices of this worker's range were given to others in the previous step.
        """
        if self._step_at is not None:
            self._steps.append((now - self._step_at) / steps)
        self._step_at = now
        if self._helped:
            self._vain_steps = 0
        elif self._in_vain:
            self._vain_steps += 1
        self._in_vain, self._useful, self._helped = 0, False, False
        self._lost.append(lost)

    def begun(self, now: float) -> None:
        """A slice is handed to the script."""
        self._begun_at = now

    def finished(self, now: float) -> None:
        """The script has handed the slice in."""
        if self._begun_at is not None:
            self._works.append(now - self._begun_at)
            self._begun_at = None

    def pushed(self, seconds: float) -> None:
        """A push took so many seconds after the slice was computed."""
        self._pushes.append(seconds)

    def answered(self, useful: bool) -> None:
        """A question for work was answered, with a slice or in vain."""
        self._useful, self._helped = useful, self._helped or useful
        self._in_vain += not useful

    def patience_s(self) -> float:
        """How long to wait for the next version before asking for work; 0 after a question that brought a slice."""
        if self._useful:
            return 0.0
        base = _first_patience_s(self.work_s) if self._works else _UNKNOWN_S
        return base * float(2 ** min(_DOUBLINGS, self._vain_steps + self._in_vain))

    def asks(self, now: float, first: bool) -> bool:
        """Whether to ask before the next slice of the own range (``first``: of this step) is begun."""
        if first or self._step_at is None:
            return False
        passed_s = now - self._step_at
        if self.slow and passed_s > _EARLY * median(self._steps):
            return True
        return passed_s > max(_LONG_S, _LONG * max(self._steps, default=0.0))
