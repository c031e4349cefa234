"""What all tests share: property tests without a time limit of their own, and the same examples on every run."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import hypothesis
import pytest
import structlog

from paramserver import logs

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _own_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """How a test has set the log up is no concern of the next one. The tests may run in a container."""
    monkeypatch.setattr(logs, "in_container", lambda: False)
    yield
    structlog.reset_defaults()


def pytest_collection_finish() -> None:
    """The nine thousand collected tests stay to the end, so the collector of garbage leaves them out from now on."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write the transcripts of tests/testdata again")
    parser.addoption("--one-core", action="store_true", help="with -n: each test process stays on one core")


def pytest_configure(config: pytest.Config) -> None:
    """Threads of one interpreter run one after the other; on one core they wake each other at a fifth less cost."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if config.getoption("--one-core") and worker.startswith("gw") and hasattr(os, "sched_setaffinity"):  # not on macOS
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker[2:]) % len(cores)]})
