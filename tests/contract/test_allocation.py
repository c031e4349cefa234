"""The limits of the C library's memory."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Page faults of 100 blocks that are taken, written, and given back.
_SCRIPT = """
import resource, sys
from paramserver.transport.allocation import keep_memory
assert keep_memory() is (sys.argv[1] == "kept")
def use():
    for _ in range(100):
        blocks = [b"x" * (4 * 2**20 + 1000 * n) for n in range(4)]
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str, **environment: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, how],
        env={"PATH": "", **environment},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert not done.stderr
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these limits")
def test_blocks_are_given_out_again() -> None:
    """400 blocks of 1,000 pages and more; a few pages move. With limits of the user's own nothing is changed."""
    assert faults("kept") < 4_000
    assert faults("left", MALLOC_TRIM_THRESHOLD_="131072") > 100_000
