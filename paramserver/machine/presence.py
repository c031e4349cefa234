"""How a started role makes itself known to `paramserver health` on the same machine, or in the same container.

Each process has one small file beside those of the jobs, in the directory that only this user can enter. It says what
the process last said of itself, and when; the process writes it again about once a second. So a file that is old, or
whose process is gone, tells that something is wrong. It never holds a secret.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from paramserver.errors import ConfigError
from paramserver.machine.jobs import process_birth, runtime_directory, secure_runtime_directory

# After this silence a process counts as hanging, seconds.
STALE_S = 15.0
# Not .json: those are jobs.
_SUFFIX = ".role"


@dataclass(frozen=True, slots=True)
class Sign:
    """What a process says of itself.

    `address` is host:port, empty if nobody calls it. `certs`, `token_file` and `insecure` are the settings of
    [security] with which it can be called. `beat` is the monotonic clock of this machine, in seconds, when it was
    written. `birth` tells the process from a later one with the same pid.
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
    def alive(self) -> bool:
        """Whether that process still runs."""
        return _is_alive(self.pid) and self.birth in (0, process_birth(self.pid))

    def silence(self, now: float) -> float:
        """Seconds since it was last heard of. ``now``: `time.monotonic()`."""
        return max(now - self.beat, 0.0)


class Presence:
    """This process's own file. All methods are cheap, block on no other process, and may be called from any thread."""

    def __init__(self, sign: Sign) -> None:
        self._sign = sign
        self._path = runtime_directory() / f"{sign.role}-{sign.pid}{_SUFFIX}"
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

        What is None stays as it was. A file that cannot be written does not disturb the process: `health` sees that it
        is old.
        """
        with self._lock:
            if self._closed or os.getpid() != self._sign.pid:
                return
            old = self._sign
            self._sign = replace(
                old,
                name=old.name if name is None else name,
                ready=old.ready if ready is None else ready,
                state=old.state if state is None else state,
                address=old.address if address is None else address,
            )
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
        directory = secure_runtime_directory()  # somebody may have cleaned up the temporary files
        handle, temporary = tempfile.mkstemp(dir=directory, prefix=".role-")  # readable for this user only
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(asdict(self._sign), file)
            os.replace(temporary, self._path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise


def list_signs() -> list[Sign]:
    """The files of this user's role processes, those of dead processes included: these are removed by this call.

    Raises ConfigError if others could write there.
    """
    if not runtime_directory().exists():
        return []
    signs = []
    for path in sorted(secure_runtime_directory().glob(f"*{_SUFFIX}")):
        sign = _read(path)
        if sign is not None:
            signs.append(sign)
        if sign is None or not sign.alive:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    return signs


def _read(path: Path) -> Sign | None:
    """What the file says; None if it makes no sense, or has gone meanwhile."""
    try:
        values: Any = json.loads(path.read_text())
        sign = Sign(**values)
    except (OSError, ValueError, TypeError):
        return None
    return sign if all(_fits(sign)) and path.name == f"{sign.role}-{sign.pid}{_SUFFIX}" else None


def _fits(sign: Sign) -> Iterator[bool]:
    kinds = {"str": str, "int": int, "bool": bool, "float": float}
    return (type(getattr(sign, field.name)) is kinds[str(field.type)] for field in fields(sign))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        # A process that has ended, but whose parent has not asked for its exit code, is dead all the same.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (ProcessLookupError, PermissionError, OverflowError):
        return False
    except OSError:
        return True  # a system without /proc
