"""Directories which only this user can enter: for files of the processes that run now, and for those that last."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from paramserver.errors import ConfigError

ENV_RUNTIME_DIR = "PARAMSERVER_INTERNAL_RUNTIME_DIR"
# Of the files in the runtime directory with the join token of a coordinator, see `paramserver.pki.nearby`.
TOKEN_SUFFIX = ".token"


def runtime_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where the files of this user's jobs lie; the directory need not exist. Raises ConfigError without one.

    Without XDG_RUNTIME_DIR the directory lies where this user keeps its files, under the name of this host: in the
    directory for temporary files, another user could take the name first. A user without a home has no other place.
    """
    environ = os.environ if environ is None else environ
    if explicit := environ.get(ENV_RUNTIME_DIR):
        return Path(explicit)
    if session := environ.get("XDG_RUNTIME_DIR"):
        return Path(session) / "paramserver"
    try:
        kept = state_root(environ)
    except RuntimeError:
        kept = Path()
    if _is_own(kept):
        return kept / f".runtime-{os.uname().nodename}"
    return _temporary(tempfile.gettempdir) / f"paramserver-{os.getuid()}"


def _is_own(directory: Path) -> bool:
    """Whether this user may write to an absolute directory of its own, or can make it in one."""
    for place in (directory, *directory.parents) if directory.is_absolute() else ():
        try:
            return os.stat(place).st_uid == os.geteuid() and os.access(place, os.W_OK)
        except OSError:
            continue
    return False


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


def sweep_tokens(directory: Path) -> None:
    """Remove the links to tokens of jobs that were killed: the files are gone with the jobs' own directories."""
    for path in directory.glob(f"*{TOKEN_SUFFIX}"):
        if path.is_symlink() and not path.exists():
            path.unlink(missing_ok=True)


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
