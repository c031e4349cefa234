"""Where the time of the script's thread goes. It enters a phase with one look at the clock."""

from __future__ import annotations

import time
from collections import deque

from paramserver.core.blame.spent import PHASES, Spent
from paramserver.core.versions.names import Name
from paramserver.membership.pulse import Pulse
from paramserver.tracing import Recorder
from paramserver.v1 import coordinator_pb2
from paramserver.wire.blame import spent_to_proto
from paramserver.worker.job.garbage import GARBAGE
from paramserver.worker.job.traced import ScriptTrace

# Indices of PHASES.
DATA, COMPUTE, SEND, WAIT, RECEIVE, OTHER = range(len(PHASES))
# Between two reports. Of more slices, the former ones are not told.
_KEPT = 4096
# A report tells of so many slices, those that took longest. A report is sent twice a second.
MOST = 8
_Mark = tuple[int, bool, float, bool, float, list[float]]


class Phases:
    """Written by the script's thread, read in the background. ``pulse`` tells what the thread has lost.

    While ``trace`` is wanted, each phase is a span of it, too.
    """

    def __init__(self, pulse: Pulse, trace: Recorder) -> None:
        self._pulse = pulse
        self._trace, self._traced = trace, ScriptTrace(trace)
        # Totals by phase, without the present phase.
        self._spent = [0.0] * len(PHASES)
        self._phase, self._since = OTHER, time.monotonic()
        self._first = True
        # A mark for each slice handed in, and the mark before the oldest of them.
        self._marks: deque[_Mark] = deque(maxlen=_KEPT)
        self._before: _Mark = (0, False, self._since, True, 0.0, list(self._spent))
        self._starved = self._paused = 0.0
        GARBAGE.begin()

    # ---- the script's thread

    def enter(self, phase: int) -> int:
        """A phase begins; returns the one that ends."""
        now = time.monotonic()
        self._spent[self._phase] += now - self._since
        self._since = now
        former, self._phase = self._phase, phase
        if self._trace.script:
            self._traced.enters(PHASES[phase])
        return former

    def begins(self, name: Name) -> None:
        """The script has this slice; may be called more than once."""
        if self._trace.script:
            self._traced.begins(name)

    def waited(self, began_ns: int, whom: str) -> None:
        """A call of the script has waited for ``whom`` since ``began_ns``, by the clock of the trace."""
        if self._trace.script:
            self._traced.waited(began_ns, whom)

    def hands_in(self, step: int, asynchronous: bool) -> None:
        """A slice is handed in. ``step``: the version it was computed on, asynchronous: the clock of the worker."""
        now, spent = time.monotonic(), self._spent
        spent[self._phase] += now - self._since
        self._since = now
        self._marks.append((step, asynchronous, now, self._first, GARBAGE.seconds, list(spent)))
        self._first = False

    def begins_anew(self) -> None:
        """The worker follows the job to another timeline."""
        self._first = True

    # ---- the report

    def write(self, report: coordinator_pb2.WorkerReport, last: bool) -> None:
        """Tell of the slices since the last report, as far as the losses in them are known, and of all so far.

        ``last``: no other report follows.
        """
        steps = []
        while self._marks and (last or self._marks[0][2] <= self._pulse.beat_at):
            mark = self._marks.popleft()
            steps.append(self._step(self._before, mark))
            self._before = mark
        longest = sorted(range(len(steps)), key=lambda index: -steps[index][0])[:MOST]
        report.steps.extend(steps[index][1] for index in sorted(longest))
        report.untold = bool(self._marks)
        mark = self._marks[-1] if self._marks else self._before
        phase, since = self._phase, self._since
        spent, now = list(self._spent), time.monotonic()
        spent[phase] += max(0.0, now - since)
        report.phase, report.phase_s = PHASES[phase], max(0.0, now - since)
        report.phases.CopyFrom(_message(spent, GARBAGE.seconds, self._starved, self._paused))
        took = [max(0.0, after - former) for after, former in zip(spent, mark[5], strict=True)]
        report.since.CopyFrom(_message(took, GARBAGE.seconds - mark[4], *self._pulse.within(mark[2], now)))

    def _step(self, before: _Mark, mark: _Mark) -> tuple[float, coordinator_pb2.WorkerStep]:
        """The time between two marks, and all about it."""
        step, asynchronous, end, first, gc, spent = mark
        begin = before[2]
        starved, paused = self._pulse.within(begin, end)
        self._starved += starved
        self._paused += paused
        took = [after - former for after, former in zip(spent, before[5], strict=True)]
        phases = _message(took, gc - before[4], starved, paused)
        message = coordinator_pb2.WorkerStep(step=step, asynchronous=asynchronous, first=first, phases=phases)
        return end - begin, message


def _message(spent: list[float], gc: float, starved: float, paused: float) -> coordinator_pb2.Phases:
    data, compute, send, wait, receive, other = spent
    return spent_to_proto(Spent(data, compute, send, wait, receive, other, gc, starved, paused))
