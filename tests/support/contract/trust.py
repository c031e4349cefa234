"""Certificates and tokens for tests, and stock gRPC to show them wrongly."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paramserver.pki import certs
from paramserver.transport.base import METHODS, Method
from paramserver.transport.grpcio import grpc
from paramserver.transport.security.access import Security
from paramserver.transport.security.tls import Certificates, server_name
from paramserver.transport.security.tokens import Tokens

JOIN = "a-join-token-for-tests-0123456789"
ADMIN_TOKEN = "an-admin-token-for-tests-012345678"
Headers = tuple[tuple[str, str], ...]


def member(directory: Path, role: str, insecure: bool = False) -> Security:
    """The security of a process of ``role``, with all that `certs init` makes for it."""
    return Security(
        role,
        Certificates(directory, role),
        Tokens(path=directory / certs.JOIN_TOKEN),
        Tokens(path=directory / certs.ADMIN_TOKEN) if role in ("coordinator", "admin") else Tokens(),
        insecure,
    )


def plain(join: Iterable[str] = (), admin: Iterable[str] = ()) -> Security:
    """Tokens without certificates."""
    return Security("", None, Tokens(tuple(join)), Tokens(tuple(admin)))


def bearer(token: str) -> Headers:
    """The metadata with a join token."""
    return (("authorization", f"Bearer {token}"),)


def replace_files(directory: Path, other: Path, *names: str) -> None:
    """Take over files from another directory, each at once."""
    for name in names:
        shutil.copy2(other / name, directory / f".{name}.new")
        os.replace(directory / f".{name}.new", directory / name)


def stock(address: str, root: Path, identity: tuple[Path, str] | None, peer: str = "coordinator") -> grpc.aio.Channel:
    """A channel of stock gRPC that trusts the ``ca.crt`` in ``root`` and shows the certificate (directory, role)."""
    key, certificate = None, None
    if identity is not None:
        directory, role = identity
        key, certificate = (directory / f"{role}.key").read_bytes(), (directory / f"{role}.crt").read_bytes()
    credentials = grpc.ssl_channel_credentials((root / "ca.crt").read_bytes(), key, certificate)
    return grpc.aio.secure_channel(
        f"ipv4:{address}",
        credentials,
        options=[("grpc.ssl_target_name_override", server_name(peer)), ("grpc.use_local_subchannel_pool", 1)],
    )


async def knock(channel: Any, method: Method | str, headers: Headers = (), timeout: float = 10.0) -> tuple[str, str]:
    """Call a method, of whatever kind, with one empty message; returns the status code's name and the details."""
    found = METHODS[method] if isinstance(method, str) else method
    # The message goes out together with the head: a separate write may fail and hide the status.
    call = channel.unary_stream(found.path)(b"", metadata=headers, timeout=timeout)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""
