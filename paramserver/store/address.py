"""The address of a Redis or Valkey server: a URL, and perhaps a file with the password."""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from paramserver.errors import ConfigError
from paramserver.store.base import redacted

PORT = 6379
MAX_PASSWORD_BYTES = 65536
# Docker and Compose put secrets here, readable by all in the container.
SECRETS = "/run/secrets"
_QUERY = ("db", "username", "password", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


@dataclass(frozen=True, slots=True)
class Address:
    """Place of a server, and the login. ``where`` is for messages; neither ``where`` nor the repr has a secret."""

    where: str
    # A Unix socket; empty: TCP.
    path: str = field(default="", repr=False)
    host: str = ""
    port: int = PORT
    database: int = 0
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)


def parse(url: str, password_file: str = "") -> Address:
    """The address that a URL of the schemes redis, rediss and unix means. Raises ConfigError if it is malformed.

    In the query: ``db``, ``username``, ``password``; with rediss ``ssl_ca_certs`` (file with the authority that has
    signed the server's certificate, in place of the system's), ``ssl_certfile`` and ``ssl_keyfile`` (our own).
    """
    where = redacted(url)
    try:
        parts = urlsplit(url)
        port = parts.port
        query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise _malformed(where, "write redis://user:password@host:6379/0, with odd characters as %41") from None
    for name in query:
        if name not in _QUERY:
            raise _malformed(where, f"its query has a name other than {_list()}")
    if parts.fragment:
        raise _malformed(where, "a # in a password is written %23")
    user = unquote(parts.username or "") or query.get("username", "")
    password = unquote(parts.password or "") or query.get("password", "")
    if password_file:
        if password:
            raise ConfigError("the store's password is both in cluster.store and in a file: leave one of them out")
        password = read_password(password_file)
    if parts.scheme == "unix":
        path = unquote(parts.path)
        if parts.hostname or not path.startswith("/") or path == "/":
            raise _malformed(where, "write unix:///path/to/socket?db=0")
        return Address(where, path=path, database=_database(where, query.get("db", "")), user=user, password=password)
    if not parts.hostname:
        raise _malformed(where, "it names no host")
    database = _database(where, query.get("db") or unquote(parts.path).strip("/"))
    tls = _context(where, query) if parts.scheme == "rediss" else None
    if tls is None and any(name.startswith("ssl_") for name in query):
        raise _malformed(where, "certificates are for rediss://")
    return Address(
        where,
        host=unquote(parts.hostname),
        port=port or PORT,
        database=database,
        user=user,
        password=password,
        tls=tls,
    )


def read_password(path: str) -> str:
    """The line in the file. Raises ConfigError if the file cannot be used.

    Only the owner may read the file, unless it lies under /run/secrets.
    """
    name = f"the store's password file {path}"
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{name} is no file")
            if status.st_mode & 0o077 and not os.path.abspath(path).startswith(SECRETS + "/"):
                raise ConfigError(f"{name} can be read by others: chmod 600 {path}")
            content = file.read(MAX_PASSWORD_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from None
    if len(content) > MAX_PASSWORD_BYTES:
        raise ConfigError(f"{name} is larger than {MAX_PASSWORD_BYTES} bytes: it is not a password")
    try:
        password = content.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        password = "\n"
    if not password or "\n" in password:
        raise ConfigError(f"{name} must hold one line, the password")
    return password


def _database(where: str, text: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()):
        raise _malformed(where, "the database is a number, as in redis://host:6379/0")
    return int(text)


def _context(where: str, query: dict[str, str]) -> ssl.SSLContext:
    """Settings of TLS for a connection whose server must show a certificate for its host name."""
    certificate, key = query.get("ssl_certfile", ""), query.get("ssl_keyfile", "")
    if bool(certificate) != bool(key):
        raise _malformed(where, "ssl_certfile and ssl_keyfile come together")
    try:
        context = ssl.create_default_context(cafile=query.get("ssl_ca_certs") or None)
        if certificate:
            context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or "it is none"
        raise ConfigError(f"a certificate or key that cluster.store {where!r} names cannot be read: {reason}") from None
    return context


def _no_password() -> str:
    """Refuses an encrypted key, in place of a question on the terminal."""
    raise ValueError("the key is encrypted")


def _list() -> str:
    return ", ".join(_QUERY)


def _malformed(where: str, hint: str) -> ConfigError:
    return ConfigError(f"cluster.store {where!r} is malformed: {hint}")
