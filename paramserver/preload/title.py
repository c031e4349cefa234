"""The command line of this process as `ps` and /proc show it: written over in memory, as setproctitle does."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

# Where a preloaded process ends its arguments with one of so many bytes, forked ones have room for theirs.
ROOM = " " * 4096
# Behind the name of the command in /proc/PID/stat, counted from the state.
_ARG_START, _ARG_END = 45, 46


def fitting(argv: Sequence[str], size: int) -> bytes:
    """The arguments as /proc shows them, in exactly ``size`` bytes: cut, or filled up with zeros. The last byte is 0.

    >>> fitting(["a", "bc"], 8)
    b'a\\x00bc\\x00\\x00\\x00\\x00'
    >>> fitting(["a", "bc"], 4)
    b'a\\x00b\\x00'
    """
    text = b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in argv)
    return text[: size - 1].ljust(size, b"\0")


def set_command_line(argv: Sequence[str]) -> None:
    """Show these arguments. Does nothing where the system does not say where the arguments are."""
    try:
        facts = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(facts[_ARG_START]), int(facts[_ARG_END])
    except (OSError, IndexError, ValueError):
        return
    if 0 < start < end:
        ctypes.memmove(start, fitting(argv, end - start), end - start)
