"""The actor of a job on Ray: it runs one process of ``paramserver start`` on its node, and ends with the process."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paramserver import errors
from paramserver.config import env_name
from paramserver.processes.children import dying_with_me
from paramserver.processes.environment import ENV_PART, JOB_FAILED_CODE
from paramserver.processes.process import Guard

# Stands in a command line for the directory with the files of the process.
FILES = "{files}"
# Ports of coordinators; below those that Linux gives to connections.
_PORTS = range(20000, 30000)
# Ends of a server after which another one would end in the same way.
_FINAL = (0, errors.UserError.exit_code, errors.VersionMismatchError.exit_code, JOB_FAILED_CODE)
_CRASHED = 1


def to_restart(role: str, code: int) -> bool:
    """Whether Ray is to start the process of an actor again. ``code``: its exit code, below 0 after a signal.

    A script that fails, a configuration that is refused and a job that has failed would fail again.
    """
    return code < 0 or (role == "server" and code not in _FINAL)


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """The options of an actor that takes these resources, which have the names that Ray gives them."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {"num_cpus": 0} | {named[key]: resources[key] for key in named if key in resources}
    return options | {"resources": {key: amount for key, amount in resources.items() if key not in named}}


class Role:
    """One process of the job. The actor lives in a process of Ray on the same node, and has one thread."""

    def __init__(self) -> None:
        self._again = True

    def place(self) -> tuple[str, int]:
        """The address of the node, and a free port there. Only the first actor of a seat is asked."""
        import ray

        self._again = False
        for port in random.SystemRandom().sample(_PORTS, 100):
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("", port))
                return ray.util.get_node_ip_address(), port
        raise errors.UnavailableError(f"no port from {_PORTS.start} to {_PORTS.stop} is free on the coordinator's node")

    def run(
        self, role: str, argv: Sequence[str], environ: Mapping[str, str], files: Mapping[str, bytes]
    ) -> tuple[int, str]:
        """Run the process to its end; returns its exit code, and the summary of a coordinator.

        ``files``: keys, tokens and the function, by name. They lie in a directory that goes when the process ends. A
        process that has crashed takes the actor along, so that Ray starts the actor again and calls this method again.
        """
        guard = Guard()
        with tempfile.TemporaryDirectory(prefix="paramserver-ray-") as directory:
            guard.tell("directory", directory)
            for name, content in files.items():
                with open(os.open(Path(directory, name), os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
                    file.write(content)
            # Ray has put the driver's paths there, and those of a working_dir.
            own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            if role == "server":
                own[ENV_PART] = "1"
            if f"{role}.key" in files:
                own[env_name("security.certs")] = directory
            summary = Path(environ.get(env_name("run.summary")) or Path(directory, "summary.json"))
            if role == "coordinator":
                own[env_name("run.summary")] = str(summary)
                argv = [*argv, "--continue"] if self._again else argv
            command = [sys.executable, "-m", "paramserver", "start", role, *(_in(directory, word) for word in argv)]
            process = subprocess.Popen(
                dying_with_me(command), env={**os.environ, **environ, **own}, start_new_session=True
            )
            guard.tell("group", process.pid)
            code = process.wait()
            text = summary.read_text() if role == "coordinator" and summary.exists() else ""
            with contextlib.suppress(ProcessLookupError):  # loaders of data must not outlive a worker
                os.killpg(process.pid, signal.SIGKILL)
        guard.close()
        if to_restart(role, code):
            os._exit(_CRASHED)
        return code, text


def _in(directory: str, word: str) -> str:
    return word.replace(FILES, directory, 1) if word.startswith(FILES) else word
