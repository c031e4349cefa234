"""What the launcher shows of a running job."""

from __future__ import annotations

import io
import re
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from paramserver.launch.display import LiveDisplay, Rates
from paramserver.v1 import coordinator_pb2


def test_a_rate_is_never_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is started again counts from nothing."""
    seconds = iter(range(100))
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr("paramserver.launch.display.time", clock)
    rates = Rates()
    found = [rates.of("worker-0", samples) for samples in (0, 10, 20, 5, 15)]
    assert found == [0.0, 10.0, 10.0, 0.0, 10.0]


def test_the_table_on_a_terminal_leaves_lines_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not cut to its width, and each state of a progress bar has a line."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    display = LiveDisplay()
    try:
        display.line("worker-0", "x" * 1_000_000)
        display.line("worker-0", "10%\r20%")
    finally:
        display.close()
    lines = out.getvalue().splitlines()
    assert "worker-0 | " + "x" * 1_000_000 in lines
    assert "worker-0 | 10%" in lines
    assert "20%" in lines


def test_long_reasons_leave_room_for_names_and_states() -> None:
    status = coordinator_pb2.StatusResponse(job="digits", state="degraded", reason="server-1 is lost; " * 9)
    status.processes.add(role="coordinator", name="coordinator", state="degraded", reason=status.reason)
    status.processes.add(role="worker", name="worker-0", state="waiting", reason=status.reason)
    display = LiveDisplay()
    display.close()
    console = Console(width=80)
    with console.capture() as capture:
        console.print(display._table(status))
    assert "job digits: degraded" in capture.get()
    assert re.search(r"^coordinator +degraded", capture.get(), re.MULTILINE)
    assert re.search(r"^worker-0 +waiting .*server-1 is", capture.get(), re.MULTILINE)
