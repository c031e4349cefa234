"""The memory of this process."""

from __future__ import annotations

import os


def resident_bytes() -> int:
    """What this process has in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
