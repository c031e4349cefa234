"""Settings that hold secrets, and how these settings are shown without their secrets."""

from __future__ import annotations

import re

from pydantic import SecretStr

# Settings that may hold a secret. They go to the one process that needs them and are never shown in full.
SECRETS = ("cluster.store", "security.token", "security.admin_token")
# Settings that are nothing but a secret: everybody can see flags, and files are soon shared.
ENVIRONMENT_ONLY = {"security.token": "security.token_file", "security.admin_token": "security.admin_token_file"}

_PASSWORD_IN_AUTHORITY = re.compile(r"(://[^:/@]*):.*@")
_PASSWORD_IN_QUERY = re.compile(r"((?:^|[?&])(?:password|secret|token|sig)=)[^&]*")


def shown(key: str, value: object) -> object:
    """The value of a setting without its secrets: any setting may be a URL with a password.

    >>> shown("checkpoint.dir", "s3://user:secret@bucket/run")
    's3://user:***@bucket/run'
    """
    if isinstance(value, SecretStr):
        return "***" if value else ""
    return hide_password(value) if isinstance(value, str) and "://" in value else value


def hide_password(url: str) -> str:
    """The URL with its password replaced by ``***``; safe to print and to log."""
    return _PASSWORD_IN_QUERY.sub(r"\1***", _PASSWORD_IN_AUTHORITY.sub(r"\1:***@", url))
