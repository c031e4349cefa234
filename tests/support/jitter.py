"""A plugin of pytest, used by ``make test-jitter``: each test has another switch interval of the interpreter.

Short intervals interleave threads at unusual places, and long ones let a thread run on while others wait. Both find
races that an idle machine hides. JITTER_SEED repeats a run.
"""

from __future__ import annotations

import os
import random
import sys
import zlib

import pytest

_INTERVALS_S = (1e-6, 1e-5, 0.005, 0.03, 0.1)
_SEED = os.environ.setdefault("JITTER_SEED", str(random.SystemRandom().randrange(10**6)))


def pytest_report_header() -> str:
    return f"switch intervals by JITTER_SEED={_SEED}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    chosen = random.Random(zlib.crc32(f"{_SEED} {item.nodeid}".encode()))
    sys.setswitchinterval(chosen.choice(_INTERVALS_S))
