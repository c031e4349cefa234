"""Hyper-parameters of two contributions: which one differs, and what counts as rounding."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paramserver.server.arithmetic.hypers import differing

GROUP: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.999), "maximize": False}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"lr": math.nextafter(0.1, 1.0)}, ""),
        ({"lr": 0.1000001}, "lr of parameter group 1 is 0.1 and 0.1000001"),
        ({"lr": 0.0}, "lr of parameter group 1 is 0.1 and 0.0"),
        ({"betas": (0.9, math.nextafter(0.999, 1.0))}, ""),
        ({"betas": (0.8, 0.999)}, "betas of parameter group 1 is (0.9, 0.999) and (0.8, 0.999)"),
        ({"maximize": True}, "maximize of parameter group 1 is False and True"),
    ],
)
def test_the_first_hyper_parameter_that_differs(change: dict[str, Any], words: str) -> None:
    assert differing([GROUP, GROUP], [GROUP, {**GROUP, **change}]) == words
