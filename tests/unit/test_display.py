"""What the launcher shows of a running job."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paramserver.local.display import Rates


def test_a_rate_is_never_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is started again counts from nothing."""
    seconds = iter(range(100))
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr("paramserver.local.display.time", clock)
    rates = Rates()
    found = [rates.of("worker-0", samples) for samples in (0, 10, 20, 5, 15)]
    assert found == [0.0, 10.0, 10.0, 0.0, 10.0]
