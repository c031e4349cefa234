"""Ends what a killed launcher leaves behind. Run by path, with nothing of ours imported, so that it is small and quick.

Reads lines from standard input: ``group N`` and ``directory PATH`` add something to end, ``forget N`` takes a process
group back. When the input ends without ``done`` the launcher has died: all groups are killed, directories removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys


def main() -> None:
    groups: set[int] = set()
    directories: list[str] = []
    for line in sys.stdin:
        word, _, rest = line.rstrip("\n").partition(" ")
        if word == "group":
            groups.add(int(rest))
        elif word == "forget":
            groups.discard(int(rest))
        elif word == "directory":
            directories.append(rest)
        elif word == "done":
            return
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
