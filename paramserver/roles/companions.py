"""Server processes that ``paramserver start`` starts beside its own: more servers on a host, or one beside a worker.

They get the settings of this process, write to the same output, and die with it if it is killed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping

import structlog

from paramserver.config import Settings, env_name
from paramserver.machine.hosts import split
from paramserver.processes.children import dying_with_me
from paramserver.processes.environment import ENV_COMPANION
from paramserver.transport.addresses import join

log = structlog.get_logger("paramserver")

# Seconds in which a server that was told to end leaves the job.
_END_S = 20.0
_COMMAND = (sys.executable, "-m", "paramserver", "start", "server")


def is_companion() -> bool:
    """Whether this process is a companion; a companion starts no others."""
    return ENV_COMPANION in os.environ


class Companions:
    """Some server processes. Must be made in the main thread, with which the processes die."""

    def __init__(self, settings: Settings, given: Mapping[str, str], count: int, beside_worker: bool) -> None:
        """``given``: variables with which the processes load the settings that this process was given."""
        environ = {**os.environ, **given, ENV_COMPANION: "1", "OMP_NUM_THREADS": "1"}
        if beside_worker:
            environ[env_name("cluster.beside_worker")] = "true"
        if ":" in settings.cluster.listen.rpartition("]")[2]:  # each takes a port of its own
            host, _ = split(settings.cluster.listen)
            environ[env_name("cluster.listen")] = join(host, 0)
        argv = dying_with_me(_COMMAND)
        self._processes = [subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL) for _ in range(count)]

    def failed(self) -> int:
        """The exit code of a process that has ended badly already, else 0."""
        return next(filter(None, [process.poll() for process in self._processes]), 0)

    def wait(self) -> int:
        """Wait until all have ended by themselves; 0 if all ended well, else an exit code of a failed one."""
        return next(filter(None, [process.wait() for process in self._processes]), 0)

    def end(self) -> int:
        """Tell all to end, and wait; the exit code as in :meth:`wait`, where an end by SIGTERM is a good one."""
        for process in self._processes:
            process.terminate()
        codes = []
        for process in self._processes:
            try:
                codes.append(process.wait(_END_S))
            except subprocess.TimeoutExpired:
                log.warning("a server does not end; it is killed", pid=process.pid)
                process.kill()
                codes.append(process.wait())
        return next((code for code in codes if code not in (0, 128 + 15, -15)), 0)

    def __enter__(self) -> Companions:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
