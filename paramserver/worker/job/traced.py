"""The phases of the script's thread as spans of a trace, and the end of the trace after so many steps."""

from __future__ import annotations

from paramserver.core.versions.names import Name, SyncName
from paramserver.tracing import SCRIPT, Recorder
from paramserver.worker.job.profiling import Profile


class ScriptTrace:
    """Called by the script's thread, and only while `Recorder.script` is set. Each phase ends the phase before it."""

    def __init__(self, trace: Recorder) -> None:
        self._trace = trace
        self._number = 0
        # The name of the present phase, when it began, and the slice that it belongs to.
        self._phase: tuple[str, int, Name | None] | None = None
        # For whom the script has waited in this phase.
        self._whom = ""
        # The slice at hand, and the number of its step; asynchronous slices have none.
        self._slice: Name | None = None
        self._profile: Profile | None = None

    def enters(self, phase: str) -> None:
        """A phase begins, unless the script is in it."""
        trace = self._trace
        self._follow()
        if not trace.on:  # ended from outside
            self._end()
        elif self._phase is None or self._phase[0] != phase:
            now = self._close()
            self._phase = (phase, now, self._slice) if self._slice is not None else None

    def waited(self, began_ns: int, whom: str) -> None:
        """In the present phase the script has waited for ``whom``, until now. ``began_ns``: by the trace's clock."""
        if self._phase is not None and self._phase[0] in ("wait", "receive"):
            self._whom = whom or self._whom
        else:
            self._trace.span("wait", SCRIPT, began_ns, whom=whom)

    def begins(self, name: Name) -> None:
        """The script has this slice. After the last step of the trace the script's part of it ends."""
        trace = self._trace
        self._follow()
        former = self._slice
        if name == former:
            return
        if isinstance(name, SyncName) and isinstance(former, SyncName) and name.step == former.step:
            self._slice = name
            return
        if trace.begun >= trace.steps:
            self._end()
            return
        trace.begun += 1
        self._slice = name
        if trace.profiler and self._profile is None:
            self._profile = Profile(trace.now)

    def _close(self) -> int:
        """The present phase ends, now."""
        trace, now = self._trace, self._trace.now()
        if self._phase is not None and trace.on:
            phase, began, name = self._phase
            step = name.step if isinstance(name, SyncName) else None
            trace.span(phase, SCRIPT, began, step, end_ns=now, whom=self._whom, slice=name)
        self._whom = ""
        return now

    def _follow(self) -> None:
        """If another trace has begun, forget the former one."""
        if self._number != self._trace.number:
            self._number = self._trace.number
            self._phase = self._slice = None
            if self._profile is not None:
                self._profile.stop()
                self._profile = None

    def _end(self) -> None:
        trace, profile = self._trace, self._profile
        self._close()
        self._profile = self._phase = self._slice = None
        if profile is not None:
            trace.add_ranges(profile.stop())
        trace.end()
        trace.script = False
