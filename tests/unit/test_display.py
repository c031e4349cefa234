"""What the launcher shows of a running job."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from paramserver.local.display import LiveDisplay, Rates


def test_a_rate_is_never_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is started again counts from nothing."""
    seconds = iter(range(100))
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr("paramserver.local.display.time", clock)
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
