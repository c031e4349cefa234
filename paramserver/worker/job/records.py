"""The values that the script logs, on their way to the coordinator."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import structlog

from paramserver.v1 import types_pb2
from paramserver.v1.coordinator_pb2 import Logged, WorkerReport

log = structlog.get_logger("paramserver.worker")

# So many values wait for a report, and so many calls of a former report are sent again to another coordinator.
PENDING_VALUES = 10_000
KEPT_CALLS = 2000
# Timeline and step, the slice with its samples, the values.
_Call = tuple[tuple[int, int], tuple[int, int, int] | None, Mapping[str, float]]


class Records:
    """The script's thread logs; the background takes what is new into each report.

    A report may get lost with the session, or with the coordinator that heard it. So the first report of a session
    has the last calls again; they are numbered.
    """

    def __init__(self) -> None:
        # Timeline and step of the slice that the script has, or had last: it logs nothing for earlier steps.
        self._place = (0, 0)
        # Its epoch and index, and its samples; None: the script makes its slices itself.
        self._slice: tuple[int, int, int] | None = None
        # Written at one end by the script's thread, at the other end by the background.
        self._new: deque[_Call] = deque()
        self._pending = 0
        # Of the background alone: calls that were reported, the number of the next one, the session of the last report.
        self._reported: deque[Logged] = deque(maxlen=KEPT_CALLS)
        self._number, self._session = 0, 0

    # ---- the script's thread

    def has(self, timeline: int, step: int, slice_: tuple[int, int, int] | None = None) -> None:
        """The script has this slice of this step now: epoch, index, samples. None: it makes its slices itself."""
        self._place, self._slice = (timeline, step), slice_

    def log(self, values: Mapping[str, float], outside: tuple[int, int] | None) -> None:
        """The script logs. ``outside``: timeline and version at hand if the values are not of the present slice."""
        if self._pending > PENDING_VALUES:
            if self._pending != PENDING_VALUES + 1:
                log.warning(
                    f"ctx.log was called with more than {PENDING_VALUES} values between two reports to the "
                    "coordinator: further ones are left out; log less often"
                )
                self._pending = PENDING_VALUES + 1
            return
        self._pending += len(values)
        self._new.append((outside or self._place, None if outside else self._slice, values))

    # ---- the background

    def report(self, report: WorkerReport, session: int) -> None:
        """Add what the script has logged to a report in this session, which has a number."""
        # Before the calls are taken: the script may go on to the next step meanwhile.
        report.logging_timeline, report.logging_step = self._place
        again = list(self._reported) if session != self._session else []
        self._session = session
        new = [_message(*self._new.popleft()) for _ in range(len(self._new))]
        self._pending = 0
        report.logged_from = self._number - len(again)
        report.logged.extend(again + new)
        self._reported.extend(new)
        self._number += len(new)


def _message(place: tuple[int, int], slice_: tuple[int, int, int] | None, values: Mapping[str, float]) -> Logged:
    timeline, step = place
    if slice_ is None:
        return Logged(step=step, timeline=timeline, samples=1, values=values)
    epoch, index, samples = slice_
    ref = types_pb2.SliceRef(epoch=epoch, index=index)
    return Logged(step=step, timeline=timeline, slice=ref, samples=samples, values=values)
