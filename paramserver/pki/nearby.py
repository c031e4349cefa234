"""The join token of a job on this machine: in a file that only its user can read, by the address of its coordinator.

A coordinator on the loopback interface needs no certificates, but every user of the machine can connect to it. So its
members and the commands of the same user show a token, and nobody has to type anything: they know the address.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from paramserver.config.private import TOKEN_SUFFIX, runtime_directory, secure_runtime_directory, sweep_tokens
from paramserver.errors import ConfigError
from paramserver.pki.certs import replace_file
from paramserver.transport.addresses import host_of, loopback
from paramserver.transport.security.access import Security
from paramserver.transport.security.files import read_secret
from paramserver.transport.security.tokens import Tokens

# Not TOKEN_SUFFIX: a job may have the name of an address.
_OF_JOB = ".job-token"
_WHAT = "join token file"


def token_path(address: str) -> Path | None:
    """Where the token of the coordinator at ``host:port`` lies, or would lie; None if others can reach the address."""
    host, port = host_of(address), address.rpartition(":")[2]
    if not loopback(host):
        return None
    near = "localhost" if host in ("localhost", "127.0.0.1", "::1") else host
    return runtime_directory() / f"{near}-{port}{TOKEN_SUFFIX}"


def token_paths(addresses: Sequence[str]) -> list[Path]:
    """`token_path` of each address of a job; empty if one of them can be reached by others."""
    paths = [path for address in addresses if (path := token_path(address)) is not None]
    return paths if len(paths) == len(addresses) else []


def share_token(security: Security, job: str, addresses: Sequence[str]) -> str:
    """Give a coordinator at one of these addresses a token, if only this machine can reach them, and it has none.

    All coordinators of a job on this machine have one token. It stays when they end, so that a coordinator which is
    started again finds its members'. Returns the token; "": everybody may join who can connect, or the user has
    configured a token. Raises ConfigError if there is no place for the file. `show_token` comes when it listens.
    """
    if security.join or security.insecure or not token_paths(addresses):
        return ""
    directory = secure_runtime_directory()
    sweep_tokens(directory)
    kept = directory / f"{job}{_OF_JOB}"
    with _locked(directory):
        token = read_secret(kept, _WHAT).decode().strip() if kept.is_file() else secrets.token_urlsafe(32)
        write_token(kept, token)
    security.join = Tokens([token])
    return token


def show_token(token: str, addresses: Sequence[str]) -> None:
    """Leave the token of `share_token` where members look that know one of these addresses of the job's coordinators.

    The caller listens at one of them: a coordinator whose port is taken must not replace the token of another job.
    ``token`` empty: nobody needs one. Raises ConfigError if it cannot be written.
    """
    for path in token_paths(addresses):
        if token:
            write_token(path, token)
        else:  # of a coordinator that was here before
            path.unlink(missing_ok=True)


def point_at_token(address: str, file: Path) -> Path:
    """Tell this user's other processes the file with the token of the coordinator at a loopback address: by a link.

    A link whose file is gone counts for nothing, see `sweep_tokens`. Returns the link. Raises ConfigError if there is
    no place for it.
    """
    path = token_path(address)
    assert path is not None, address
    directory = secure_runtime_directory()
    try:
        sweep_tokens(directory)
        with _locked(directory):
            path.unlink(missing_ok=True)
            path.symlink_to(file.absolute())
    except OSError as error:
        raise ConfigError(f'{_WHAT} "{path}" cannot be written: {(error.strerror or "error").lower()}') from error
    return path


def write_token(path: Path, token: str) -> None:
    """Write the file of a token, which is replaced as a whole. Raises ConfigError if that cannot be."""
    try:
        replace_file(path, f"{token}\n".encode(), 0o600)
    except OSError as error:
        raise ConfigError(f'{_WHAT} "{path}" cannot be written: {(error.strerror or "error").lower()}') from error


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Two coordinators of a job that start at once agree on a token."""
    lock = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
