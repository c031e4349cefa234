"""Child processes that do not outlive their parent, however it ends.

Linux kills a process for us when the thread that started it has ended; therefore a short-lived thread must not start
processes. Other systems cannot do this; there, children notice by themselves that nobody answers.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Call this first thing in a child process. ``parent`` is the parent's pid, if the child was told.

    If the parent has died already, this process ends at once.
    """
    if sys.platform != "linux":
        return
    before = os.getppid() if parent is None else parent
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != before:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def dying_with_me(argv: Sequence[str]) -> list[str]:
    """The argv of a program, changed so that the program dies with this process.

    A small Python, which needs none of our packages, asks the system for this and then becomes the program: same pid,
    same files.
    """
    if sys.platform != "linux":
        return list(argv)
    return [sys.executable, "-I", "-S", "-c", _WRAPPER, str(os.getpid()), *argv]


_WRAPPER = """
import ctypes, os, signal, sys
parent, argv = int(sys.argv[1]), sys.argv[2:]
if ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0) != 0:
    sys.exit("prctl failed")
if os.getppid() != parent:
    os.kill(os.getpid(), signal.SIGKILL)
os.execvp(argv[0], argv)
"""
