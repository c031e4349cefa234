"""The phases of the script's thread in a trace: data, compute, hand in, and the script's own code between slices."""

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
        # The slice at hand, and the number of its step; asynchronous slices have none.
        self._slice: Name | None = None
        self._profile: Profile | None = None

    def asks(self) -> None:
        """The script asks for a slice."""
        self._enter("next slice")

    def given(self, name: Name) -> None:
        """The script is given this slice, whose samples are to be loaded."""
        self._begins(name)
        self._enter("data")

    def loaded(self) -> None:
        """The samples are there, and the script computes."""
        self._enter("compute")

    def hands_in(self, name: Name, loader: bool) -> None:
        """The script hands a slice in. Without a ``loader`` this is the first moment in which its name is known."""
        if not loader:
            self._begins(name)
        self._enter("hand in")

    def handed_in(self, loader: bool) -> None:
        """The script goes on. Without a ``loader`` nobody sees when it computes and when it does something else."""
        self._enter("script" if loader else "compute")

    def _begins(self, name: Name) -> None:
        trace = self._trace
        self._follow()
        former = self._slice
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

    def _enter(self, phase: str) -> None:
        trace = self._trace
        self._follow()
        if not trace.on:  # ended from outside
            self._end()
            return
        now = self._close()
        self._phase = (phase, now, self._slice) if self._slice is not None else None

    def _close(self) -> int:
        """The present phase ends, now."""
        trace, now = self._trace, self._trace.now()
        if self._phase is not None and trace.on:
            phase, began, name = self._phase
            step = name.step if isinstance(name, SyncName) else None
            trace.span(phase, SCRIPT, began, step, end_ns=now, slice=name)
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
