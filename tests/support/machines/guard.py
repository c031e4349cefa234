"""Removes network namespaces. As a program: those it is given, once its input ends, which is when its parent ends; then
the directories that the lines of its input have named.

Nothing of ours is imported, so that it is small and quick.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

PATIENCE_S = 10.0


def run(*argv: str) -> str:
    """The output of a command that succeeds."""
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr or done.stdout}"
    return done.stdout


def namespaces() -> list[str]:
    """The names of all network namespaces of this system."""
    return [line.split()[0] for line in run("ip", "netns", "list").splitlines()]


def pids(namespace: str) -> list[int]:
    """The processes in it."""
    return [int(pid) for pid in run("ip", "netns", "pids", namespace).split()]


def remove(namespace: str) -> None:
    """Kill what runs in a namespace, and remove it."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := pids(namespace)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
    run("ip", "netns", "del", namespace)


if __name__ == "__main__":
    directories = sys.stdin.read().splitlines()
    for name in sorted(set(sys.argv[1:]) & set(namespaces())):
        remove(name)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
