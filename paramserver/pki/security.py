"""The security settings as one object for this process: certificate and tokens."""

from __future__ import annotations

from pathlib import Path

from paramserver.config import Settings, split_addresses
from paramserver.pki.certs import ADMIN_TOKEN, JOIN_TOKEN
from paramserver.pki.nearby import token_paths
from paramserver.transport.security.access import Security
from paramserver.transport.security.policy import ADMIN, COORDINATOR, ROLES
from paramserver.transport.security.tls import Certificates
from paramserver.transport.security.tokens import Tokens


def load_security(settings: Settings, role: str, admin_token: str = "") -> Security:
    """Read the certificate of ``role``, one of `policy.ROLES`, and the tokens that it needs.

    The admin token is only read for coordinator and admin; ``admin_token`` is used where none is configured. A token in
    the environment goes before a file. Without a join token, that of the coordinator on this machine counts, which its
    user alone can read (`nearby`). Raises ConfigError if a file cannot be used.
    """
    assert role in ROLES, role
    wanted = settings.security
    directory = Path(wanted.certs) if wanted.certs else None
    certificates = Certificates(directory, role) if directory is not None else None
    join = _tokens(wanted.token.get_secret_value(), wanted.token_file, directory, JOIN_TOKEN)
    if not join and role != COORDINATOR and (paths := token_paths(split_addresses(settings.cluster.coordinator))):
        join = Tokens(path=paths[0], what=_what(JOIN_TOKEN), awaited=True)
    admin = Tokens()
    if role in (COORDINATOR, ADMIN):
        admin = _tokens(wanted.admin_token.get_secret_value(), wanted.admin_token_file, directory, ADMIN_TOKEN)
        if not admin and admin_token:
            admin = Tokens([admin_token])
    return Security(role, certificates, join, admin, wanted.insecure)


def _tokens(fixed: str, file: str, directory: Path | None, name: str) -> Tokens:
    if fixed:
        return Tokens([fixed])
    if file:
        return Tokens(path=Path(file), what=_what(name))
    if directory is not None and (directory / name).exists():
        return Tokens(path=directory / name, what=_what(name))
    return Tokens()


def _what(name: str) -> str:
    return name.replace(".", " ") + " file"
