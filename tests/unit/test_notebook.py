"""What paramserver.launch refuses before it forks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paramserver as ps
from paramserver.errors import ConfigError
from paramserver.processes.environment import ENV_INDEX
from paramserver.transport import fork


def train() -> None:
    raise AssertionError("no worker calls it")


def test_settings_are_checked_here() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.workers is 0"):
        ps.launch(train, workers=0)
    with pytest.raises(ConfigError, match=r"training\.sed"):
        ps.launch(train, training__sed=1)


def test_a_function_is_named_and_not_called() -> None:
    called: Any = None
    with pytest.raises(ConfigError, match="launch takes a function, not None"):
        ps.launch(called)


def test_what_cannot_be_forked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="threads_per_worker is 2, but forked workers compute with one thread each"):
        ps.launch(train, training__threads_per_worker=2)
    monkeypatch.setattr(fork, "_used", True)
    with pytest.raises(ConfigError, match="this process was a member of a job"):
        ps.launch(train)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="CUDA is in use in this process already"):
        ps.launch(train)


def test_a_worker_launches_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would never end."""
    monkeypatch.setenv(ENV_INDEX, "0")
    with pytest.raises(ConfigError, match="a worker of a job has called launch"):
        ps.launch(train)
