"""Ranges of ``torch.profiler`` for a trace: what torch does in the script's thread, and the script's own ranges."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import structlog

from paramserver.core.trace.spans import Span

log = structlog.get_logger("paramserver.worker")

# A range that the profile is known to contain, so that its clock can be compared with ours.
_MARK = "paramserver: clock"
_SHORTEST_US = 1.0


class Profile:
    """A profile, from now on. Begun and stopped by the script's thread. ``clock``: nanoseconds, as for other spans."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        from torch import profiler

        self._profile = profiler.profile(activities=[profiler.ProfilerActivity.CPU])
        self._marked_ns = 0
        try:
            self._profile.start()
        except RuntimeError as error:  # the script has a profiler of its own
            log.warning("torch.profiler cannot be started, so the trace lacks its ranges", reason=str(error))
            self._marked_ns = -1
            return
        self._marked_ns = clock()
        with profiler.record_function(_MARK):
            pass

    def stop(self) -> list[Span]:
        """The ranges that were recorded, by our clock; ranges below a microsecond are left out."""
        if self._marked_ns < 0:
            return []
        self._profile.stop()
        events: list[Any] = self._profile.events() or []  # type: ignore[no-untyped-call]
        mark = next((event for event in events if event.name == _MARK), None)
        if mark is None:
            return []
        zero_ns = self._marked_ns - round(mark.time_range.start * 1000)
        return [
            Span(
                event.name,
                f"torch {event.thread}",
                zero_ns + round(event.time_range.start * 1000),
                zero_ns + round(event.time_range.end * 1000),
            )
            for event in events
            if event is not mark and event.time_range.end - event.time_range.start >= _SHORTEST_US
        ]
