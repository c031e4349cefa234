"""How a started role makes itself known to `paramserver health` on the same machine, or in the same container.

Each process has one small file beside those of the jobs, in the directory that only this user can enter. The process
writes its sign of life there about once a second. So a file that is old, or whose process is gone, tells that something
is wrong. The file never holds a secret.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from paramserver.config.private import runtime_directory, secure_runtime_directory
from paramserver.errors import ConfigError
from paramserver.machine.runtime import read, sweep, write
from paramserver.processes.alive import is_alive, process_birth

# After this silence a process counts as hanging, seconds.
STALE_S = 15.0
# Not .json: those are jobs.
_SUFFIX = ".role"


@dataclass(frozen=True, slots=True)
class Sign:
    """The sign of life of a process.

    `address` is host:port, empty if the process takes no calls. `certs`, `token_file` and `insecure` are the settings
    of [security] with which it can be called. `beat` is the monotonic clock of this machine, in seconds, at the time of
    writing. `birth` tells the process from a later one with the same pid.
    """

    role: str
    job: str
    address: str
    pid: int
    birth: int
    certs: str = ""
    token_file: str = ""
    insecure: bool = False
    name: str = ""
    ready: bool = False
    state: str = ""
    beat: float = 0.0

    @property
    def title(self) -> str:
        """The process in words, for messages."""
        return f"{self.name or self.role} (process {self.pid})"

    @property
    def file(self) -> str:
        """Name of the file in the runtime directory."""
        return f"{self.role}-{self.pid}{_SUFFIX}"

    @property
    def alive(self) -> bool:
        """Whether that process still runs."""
        return is_alive(self.pid, self.birth)

    def silence(self, now: float) -> float:
        """Seconds since it was last heard of. ``now``: `time.monotonic()`."""
        return max(now - self.beat, 0.0)


class Presence:
    """This process's own file. All methods are cheap, block on no other process, and may be called from any thread."""

    def __init__(self, sign: Sign) -> None:
        self._sign = sign
        self._path = runtime_directory() / sign.file
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def publish(
        cls, role: str, job: str, address: str, *, certs: str = "", token_file: str = "", insecure: bool = False
    ) -> Presence:
        """Make this process known. ``certs``, ``token_file``: paths as in [security]; a token itself never comes here.

        Raises ConfigError if the runtime directory cannot be used.
        """
        secure_runtime_directory()
        list_signs()  # files of dead processes must not speak for this one
        pid = os.getpid()
        sign = Sign(
            role=role,
            job=job,
            address=address,
            pid=pid,
            birth=process_birth(pid),
            certs=os.path.abspath(certs) if certs else "",
            token_file=os.path.abspath(token_file) if token_file else "",
            insecure=insecure,
        )
        presence = cls(sign)
        presence._write()
        return presence

    def update(
        self,
        *,
        name: str | None = None,
        ready: bool | None = None,
        state: str | None = None,
        address: str | None = None,
    ) -> None:
        """Say that this process is well; call it about once a second from where its work is done.

        A value of None stays as it was. A file that cannot be written does not disturb the process: `health` sees
        that it is old.
        """
        with self._lock:
            if self._closed or os.getpid() != self._sign.pid:
                return
            changes: dict[str, Any] = {"name": name, "ready": ready, "state": state, "address": address}
            self._sign = replace(self._sign, **{key: value for key, value in changes.items() if value is not None})
            with contextlib.suppress(OSError, ConfigError):
                self._write()

    def close(self) -> None:
        """This process leaves in order. May be repeated; does nothing in a forked child."""
        with self._lock:
            if self._closed or os.getpid() != self._sign.pid:
                return
            self._closed = True
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        self._sign = replace(self._sign, beat=time.monotonic())
        write(self._sign.file, self._sign)


def list_signs() -> list[Sign]:
    """The files of this user's role processes, those of dead processes included: these are removed by this call.

    Raises ConfigError if others could write there.
    """
    if not runtime_directory().exists():
        return []
    signs = []
    directory = secure_runtime_directory()
    sweep(directory)
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        sign = read(path, Sign)
        ours = [sign] if sign is not None and sign.file == path.name else []
        signs += ours
        if not any(sign.alive for sign in ours):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    return signs
