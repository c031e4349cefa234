"""The directory that only this user can enter, and the small files in it by which processes find each other."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paramserver.errors import ConfigError
from paramserver.processes.alive import is_alive

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    D = TypeVar("D", bound=DataclassInstance)

ENV_RUNTIME_DIR = "PARAMSERVER_INTERNAL_RUNTIME_DIR"
# How the name of a file begins that is not written to its end; the pid of its writer follows.
_NEW = ".new-"
_KINDS = {"str": str, "int": int, "bool": bool, "float": float}


def runtime_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where the files of this user's jobs lie; the directory need not exist. Raises ConfigError without one."""
    environ = os.environ if environ is None else environ
    if explicit := environ.get(ENV_RUNTIME_DIR):
        return Path(explicit)
    if session := environ.get("XDG_RUNTIME_DIR"):
        return Path(session) / "paramserver"
    return _temporary(tempfile.gettempdir) / f"paramserver-{os.getuid()}"


def temporary_directory() -> Path:
    """A new directory for the files of a run, which only this user can enter. Raises ConfigError without a place."""
    return _temporary(lambda: tempfile.mkdtemp(prefix="paramserver-"))


def _temporary(make: Callable[[], str]) -> Path:
    try:
        return Path(make())
    except OSError as error:
        where = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        raise ConfigError(
            f"temporary files cannot be written ({where}): set TMPDIR to a directory of yours that has room"
        ) from error


def secure_runtime_directory() -> Path:
    """The runtime directory, made if missing. Raises ConfigError if others could write there."""
    directory = runtime_directory()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(directory)
    except OSError as error:
        raise ConfigError(
            f'runtime directory "{directory}" cannot be used ({error.strerror}); set XDG_RUNTIME_DIR to one of yours'
        ) from error
    return directory


def check_private(directory: Path) -> None:
    """Raises ConfigError if others could write there, FileNotFoundError if the directory does not exist."""
    facts = directory.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise ConfigError(f'runtime directory "{directory}" is not a directory of yours; remove it')
    if stat.S_IMODE(facts.st_mode) & 0o077:
        raise ConfigError(f'runtime directory "{directory}" is open to others; run: chmod 700 "{directory}"')


def state_root(environ: Mapping[str, str] | None = None) -> Path:
    """Where files of this user lie that outlive a restart of the machine. Raises RuntimeError without a home."""
    environ = os.environ if environ is None else environ
    given = environ.get("XDG_STATE_HOME")
    return (Path(given) if given else Path.home() / ".local/state") / "paramserver"


def write(name: str, facts: DataclassInstance, directory: Path | None = None) -> Path:
    """Write a file of the runtime directory, which only this user can read, and which is replaced as a whole.

    ``directory``: another one, which is there. Raises ConfigError if the runtime directory cannot be used, OSError if
    the file cannot be written.
    """
    directory = directory or secure_runtime_directory()  # somebody may have cleaned up the temporary files
    handle, temporary = tempfile.mkstemp(dir=directory, prefix=f"{_NEW}{os.getpid()}-")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(facts), file)
        os.replace(temporary, directory / name)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
    return directory / name


def sweep(directory: Path) -> None:
    """Remove the files that processes were writing when they were killed."""
    for path in directory.glob(f"{_NEW}*"):
        pid = path.name.removeprefix(_NEW).partition("-")[0]
        if not (pid.isascii() and pid.isdecimal() and is_alive(int(pid))):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def read(path: Path, kind: type[D]) -> D | None:
    """The facts that `write` has written; None if the file makes no sense, or has gone meanwhile.

    ``kind``: a dataclass whose fields are texts, numbers and flags.
    """
    try:
        values: Any = json.loads(path.read_text())
        facts = kind(**values)
    except (OSError, ValueError, TypeError):
        return None
    fits = all(type(getattr(facts, field.name)) is _KINDS[str(field.type)] for field in fields(facts))
    return facts if fits else None
