"""Which cases of a test run in `make test`, and which in `make test-long` only."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def long_but(short: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """``cases`` for `pytest.mark.parametrize`, of which all but those in ``short`` are long."""
    return [case if case in short else pytest.param(case, marks=pytest.mark.long) for case in cases]
