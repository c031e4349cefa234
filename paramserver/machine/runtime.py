"""Small files by which processes find each other, in the directory that only this user can enter."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paramserver.config.private import secure_runtime_directory
from paramserver.processes.alive import is_alive

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    D = TypeVar("D", bound=DataclassInstance)

# How the name of a file begins that is not written to its end; the pid of its writer follows.
_NEW = ".new-"
_KINDS = {"str": str, "int": int, "bool": bool, "float": float}


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
