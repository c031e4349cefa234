"""The limits of the C library's memory."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Page faults of blocks that are taken, written, and given back: 100 times a few, in another thread or not.
_SCRIPT = """
import resource, sys, threading
from paramserver.transport.allocation import keep_memory
how, count = sys.argv[1], int(sys.argv[2])
assert keep_memory(server=how == "server") is (how != "left")
def use():
    for _ in range(400 // count):
        blocks = [b"x" * (4 * 2**20 + 1000 * n) for n in range(count)]
def use_elsewhere():
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
go = use_elsewhere if how == "server" else use
go()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
go()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str, count: int, **environment: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, how, str(count)],
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
    assert faults("kept", 4) < 4_000
    assert faults("server", 40) < 4_000
    assert faults("left", 4, MALLOC_TRIM_THRESHOLD_="131072") > 100_000
