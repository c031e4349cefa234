"""What all tests share: property tests without a time limit of their own, and the same examples on every run."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import structlog

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """How a test has set the log up is no concern of the next one."""
    yield
    structlog.reset_defaults()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write the transcripts of tests/testdata again")
