"""The security settings as one object for this process: certificate and tokens."""

from __future__ import annotations

from pathlib import Path

from paramserver.config import Settings
from paramserver.pki.certs import ADMIN_TOKEN, JOIN_TOKEN
from paramserver.transport.security.access import Security
from paramserver.transport.security.policy import ADMIN, COORDINATOR, ROLES
from paramserver.transport.security.tls import Certificates
from paramserver.transport.security.tokens import Tokens


def load_security(settings: Settings, role: str, admin_token: str = "") -> Security:
    """Read the certificate of ``role``, one of `policy.ROLES`, and the tokens that it needs.

    The admin token is only read for coordinator and admin; ``admin_token`` is used where none is configured. A token in
    the environment goes before a file. Raises ConfigError if a file cannot be used.
    """
    assert role in ROLES, role
    wanted = settings.security
    directory = Path(wanted.certs) if wanted.certs else None
    certificates = Certificates(directory, role) if directory is not None else None
    join = _tokens(wanted.token.get_secret_value(), wanted.token_file, directory, JOIN_TOKEN)
    admin = Tokens()
    if role in (COORDINATOR, ADMIN):
        admin = _tokens(wanted.admin_token.get_secret_value(), wanted.admin_token_file, directory, ADMIN_TOKEN)
        if not admin and admin_token:
            admin = Tokens([admin_token])
    return Security(role, certificates, join, admin, wanted.insecure)


def _tokens(fixed: str, file: str, directory: Path | None, name: str) -> Tokens:
    what = name.replace(".", " ") + " file"
    if fixed:
        return Tokens([fixed])
    if file:
        return Tokens(path=Path(file), what=what)
    if directory is not None and (directory / name).exists():
        return Tokens(path=directory / name, what=what)
    return Tokens()
