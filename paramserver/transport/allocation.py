"""Memory for messages that the C library gives out again instead of returning it to the system after each one.

Every message that arrives or leaves is a fresh block of a few megabytes. Returned and taken again each time, its pages
are cleared by the kernel each time, which costs a quarter of the processor time of a transfer. glibc raises its limits
by itself when larger blocks are freed; here they are set at once to their final values. A server holds all
contributions of a step and frees them together, again and again. So a server returns nothing at all, and all its
threads share one heap.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of mallopt(3)
_BLOCK_BYTES = 32 * 2**20
_NEVER = 2**31 - 1


def keep_memory(server: bool = False) -> bool:
    """Keep freed memory from now on in this process; whether that worked. Limits in the environment are left alone."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    kept = mallopt(_MMAP_THRESHOLD, _BLOCK_BYTES) and mallopt(_TRIM_THRESHOLD, _NEVER if server else 2 * _BLOCK_BYTES)
    return bool(kept and (not server or mallopt(_ARENA_MAX, 1)))
