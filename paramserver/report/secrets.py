"""Nothing secret is in a report, whichever text it came with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from pydantic import SecretStr

from paramserver.config import SECRETS, Settings
from paramserver.report.data import Report

# Shorter texts are no secrets, and occur by chance.
_SHORTEST = 4
# Fields that only hold words of ours.
_WORDS = ("kind", "paramserver", "state", "role")

T = TypeVar("T")


def secrets_of(settings: Settings) -> list[str]:
    """Tokens and passwords in the settings of this process."""
    found: list[str] = []
    values = settings.values()
    for key in SECRETS:
        value = values[key]
        if isinstance(value, SecretStr):
            found.append(value.get_secret_value())
    for value in values.values():
        if isinstance(value, str) and "://" in value:
            try:
                password = urlsplit(value).password or ""
            except ValueError:
                continue
            found += [password, unquote(password)]
    return found


def without(report: Report, secrets: Iterable[str]) -> Report:
    """The report with ``***`` in place of each of these texts."""
    return Report.model_validate(hidden(report.model_dump(mode="json"), secrets))


def hidden(value: T, secrets: Iterable[str]) -> T:
    """The same texts, lists and dictionaries with ``***`` in place of each of these secrets."""
    found: T = _replaced(value, sorted({one for one in secrets if len(one) >= _SHORTEST}, key=len, reverse=True))
    return found


def _replaced(value: Any, hidden: list[str]) -> Any:
    if isinstance(value, dict):
        return {name: one if name in _WORDS else _replaced(one, hidden) for name, one in value.items()}
    if isinstance(value, list):
        return [_replaced(one, hidden) for one in value]
    if isinstance(value, str):
        for secret in hidden:
            value = value.replace(secret, "***")
    return value
