"""The clock of a script that measures its steps."""

from __future__ import annotations

import time


class Clock:
    """The moments at which steps began, and the last step ended. The first ``skip`` steps do not count."""

    def __init__(self, skip: int) -> None:
        self._skip = skip
        self._began: dict[int, float] = {}

    def at(self, step: int) -> None:
        """A step begins now, unless its beginning was noted before."""
        self._began.setdefault(step, time.monotonic())

    def seconds(self) -> float:
        """Mean seconds of a step."""
        steps = [step for step in sorted(self._began) if step >= self._skip]
        return (self._began[steps[-1]] - self._began[steps[0]]) / (steps[-1] - steps[0])

    def each(self) -> list[float]:
        """Seconds of each step."""
        return [self._began[step + 1] - self._began[step] for step in range(self._skip, max(self._began))]
