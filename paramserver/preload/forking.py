"""The side of the preloaded process: it forks a process for each request, and knows nothing of them afterwards.

It forks twice. The process between ends at once, so that the new process becomes a child of the launcher, like any
process that the launcher has started itself. A new process goes through these steps before it does anything else:

1. It waits until the process between has ended, begins a session of its own, and asks to die with the launcher.
2. It tells the launcher its pid, and waits for a byte. Without one it ends: the launcher does not want it any more.
3. It takes over descriptors, variables, and command line.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
from collections.abc import Sequence

from paramserver.preload.request import Request
from paramserver.preload.title import set_command_line
from paramserver.processes.children import die_with_parent

READY = b"ready"
# Descriptors that travel with a request: the request itself, the line to the launcher, two outputs, and some more.
MOST_FDS = 16


def obstacle() -> str:
    """Why this process must not be forked, in words; "" if nothing speaks against it.

    A forked process has one thread only. What other threads held or did at that moment stays so for ever.
    """
    if sys.gettrace() is not None or sys.getprofile() is not None or _monitored():
        return "a debugger, a profiler or a tool for coverage watches it"
    if threads() > 1:
        # Some libraries (OpenBLAS) end their threads at a fork, and start them again when they need them.
        _try_fork()
    if threads() > 1:
        return f"it has {threads()} threads after its imports"
    return ""


def threads() -> int:
    """How many threads this process has, those of C libraries, too."""
    return len(os.listdir("/proc/self/task"))


def _monitored() -> bool:
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12
    return monitoring is not None and any(monitoring.get_tool(number) for number in range(6))


def _try_fork() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def serve(control: socket.socket) -> Request | None:
    """Fork a process for each request. Returns the request in each forked process, None when the launcher has ended."""
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(control, 1, MOST_FDS)
        except ConnectionResetError:
            return None
        if not data:
            return None
        memory, line, *given = fds
        request = Request.decode(_content(memory))
        if _fork():
            control.close()
            _introduce(request, line)
            _become(request, given)
            return request
        for fd in (line, *given):
            os.close(fd)


def _content(memory: int) -> bytes:
    with open(memory, "rb") as file:
        file.seek(0)
        return file.read()


def _fork() -> bool:
    """Whether this is the new process, whose parent is the launcher."""
    reading, writing = os.pipe()
    try:
        between = os.fork()
    except OSError as error:
        print(f"cannot fork: {error.strerror}", file=sys.stderr)
        os.close(reading)
        os.close(writing)
        return False
    if between == 0:
        _leave_a_child()
        os.close(writing)
        os.read(reading, 1)  # until the process between has ended
        os.close(reading)
        return True
    os.close(reading)
    os.waitpid(between, 0)
    os.close(writing)
    return False


def _leave_a_child() -> None:
    try:
        pid = os.fork()
    except OSError:
        os._exit(1)
    if pid:
        os._exit(0)


def _introduce(request: Request, line: int) -> None:
    """Tell the launcher the pid; end if the launcher does not want this process."""
    os.setsid()
    if os.getppid() != request.parent:
        os._exit(1)
    die_with_parent(request.parent)
    with socket.socket(fileno=line) as launcher, contextlib.suppress(OSError):
        launcher.sendall(str(os.getpid()).encode())
        if launcher.recv(1):
            return
    os._exit(1)


def _become(request: Request, given: Sequence[int]) -> None:
    """Take over descriptors, variables, command line."""
    above = max((2, *request.targets)) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in given]
    for fd in given:
        os.close(fd)
    for fd, target in zip(moved, request.targets, strict=True):
        os.dup2(fd, target)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request.environment)
    set_command_line(request.argv)
    sys.orig_argv = list(request.argv)
