"""Records what this process does, while a trace is wanted. Otherwise each place in the code looks at one attribute."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from paramserver.core.trace.spans import Span

# The track of the thread in which a worker's script runs.
SCRIPT = "script"
# The most spans that wait to be handed in. The oldest are dropped.
MOST_SPANS = 20_000
# The same for the ranges of torch.profiler.
MOST_RANGES = 100_000


class Recorder:
    """The spans of one process. May be used from any thread. A place in the code that records looks like this::

    began = trace.now() if trace.on else 0
    ...
    if began:
        trace.span("update", "arithmetic", began)
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns, most: int = MOST_SPANS) -> None:
        # Whether spans are recorded.
        self.on = False
        # Whether the thread of the script still has something to add after its last step.
        self.script = False
        # How many steps are to be recorded, and how many have begun.
        self.steps = self.begun = 0
        self.profiler = False
        # Rises with each trace.
        self.number = 0
        self.now = clock
        self._spans: deque[Span] = deque(maxlen=most)
        self._ranges: deque[Span] = deque(maxlen=MOST_RANGES)
        self._dropped = 0
        self._lock = threading.Lock()

    def begin(self, steps: int, profiler: bool = False, script: bool = False) -> None:
        """Record from now on. ``script``: a thread of a script takes part, and ends the trace after ``steps`` steps."""
        with self._lock:
            self._spans.clear()
            self._ranges.clear()
            self._dropped = self.begun = 0
        self.steps, self.profiler, self.number = steps, profiler, self.number + 1
        self.on, self.script = True, script

    def end(self) -> None:
        """Record no more. What was recorded stays until it is taken."""
        self.on = False

    def span(
        self,
        name: str,
        track: str,
        begin_ns: int,
        step: int | None = None,
        flows: Sequence[int] = (),
        end_ns: int | None = None,
        whom: str = "",
        **notes: object,
    ) -> None:
        """Add a span, which ends now if no end is given. ``whom``: the process that was waited for."""
        end = self.now() if end_ns is None else end_ns
        facts = {key: str(value) for key, value in {"for": whom, **notes}.items() if value not in ("", None)}
        span = Span(name, track, begin_ns, max(begin_ns, end), step, tuple(flows), facts)
        with self._lock:
            self._dropped += len(self._spans) == self._spans.maxlen
            self._spans.append(span)

    def add_ranges(self, ranges: Iterable[Span]) -> None:
        """Add ranges of torch.profiler."""
        with self._lock:
            for span in ranges:
                self._dropped += len(self._ranges) == self._ranges.maxlen
                self._ranges.append(span)

    def take(self, most: int) -> tuple[list[Span], int]:
        """Take out the oldest spans, at most ``most``; and how many were dropped since the last call."""
        with self._lock:
            taken = [self._spans.popleft() for _ in range(min(most, len(self._spans)))]
            taken += [self._ranges.popleft() for _ in range(min(most - len(taken), len(self._ranges)))]
            dropped, self._dropped = self._dropped, 0
        return taken, dropped

    @property
    def empty(self) -> bool:
        """Whether nothing waits to be taken."""
        return not (self._spans or self._ranges)
