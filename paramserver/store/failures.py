"""Errors of a Redis or Valkey server as one sentence of ours. A table: the first row that fits is taken.

redis-py has a class for some errors and hides others in the text or the history of another error, differently from
version to version; so a row is matched with the names and texts of all of them.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator

from paramserver.errors import StoreError
from paramserver.store.base import TransientStoreError

MAX_TEXT = 200


class ForbiddenError(StoreError):
    """The server does not allow this user the command, or does not know the command."""


# A pattern in the error, the class for the caller, and the sentence.
# {where}: the server, {what}: the wanted operation, {text}: the server's text.
_ROWS: tuple[tuple[str, type[StoreError], str], ...] = (
    (
        r"NoPermissionError|\bNOPERM\b|ACL failure|user executing the script can't|unknown command",
        ForbiddenError,
        "the store at {where} does not let us {what}: correct user and password in cluster.store, or the user's "
        "permissions (docs/store.md has the line)",
    ),
    (
        r"Authentication|\bWRONGPASS\b|\bNOAUTH\b",
        StoreError,
        "the store at {where} does not let us {what}: correct user and password in cluster.store, or the password file",
    ),
    (
        r"SSLCertVerificationError",
        StoreError,
        "the store at {where} shows a certificate that we do not trust ({reason}): correct ssl_ca_certs or the host in "
        "cluster.store, or the server's certificate",
    ),
    (
        r"SSLError",
        StoreError,
        "the store at {where} does not agree with us on TLS ({reason}): write redis:// if it has none, or correct "
        "ssl_certfile and ssl_keyfile in cluster.store",
    ),
    (
        r"BusyLoadingError|\bLOADING\b",
        TransientStoreError,
        "the store at {where} still loads its data: wait until it has",
    ),
    (
        r"ReadOnlyError|\bREADONLY\b",
        TransientStoreError,
        "the store at {where} is a replica and takes no writes: wait for the end of the fail-over, or point "
        "cluster.store to the primary",
    ),
    (
        r"MasterDownError|\bMASTERDOWN\b|ClusterDownError|\bCLUSTERDOWN\b|TryAgainError|\bTRYAGAIN\b|\bNOREPLICAS\b",
        TransientStoreError,
        "the store at {where} has lost its primary or its replicas: wait for the end of the fail-over, or repair them",
    ),
    (
        r"MovedError|\bMOVED\b|AskError|CrossSlotError|\bCROSSSLOT\b",
        StoreError,
        "the store at {where} is a Redis Cluster, whose keys are spread: point cluster.store to a server of its own",
    ),
    (
        r"OutOfMemoryError|\bOOM\b",
        TransientStoreError,
        "the store at {where} is full: raise its maxmemory, or remove keys that no program needs",
    ),
    (
        r"\bMISCONF\b",
        TransientStoreError,
        "the store at {where} takes no writes because it cannot write to its disk: make room there, and see its log",
    ),
    (
        r"\bBUSY\b|\bUNKILLABLE\b",
        TransientStoreError,
        "the store at {where} is busy with another client's script: wait, or end the script with SCRIPT KILL",
    ),
    (
        r"max number of clients",
        TransientStoreError,
        "the store at {where} has too many clients: raise its maxclients, or close some clients",
    ),
    (
        r"DB index|Invalid Database",
        StoreError,
        "the store at {where} does not have the database of cluster.store: write a lower number",
    ),
    (
        r"ResponseError|InvalidResponse|ValueError",
        StoreError,
        "the store at {where} could not {what}: {text}",
    ),
    (
        r"(Timeout|Cancelled)Error",
        TransientStoreError,
        "the store at {where} did not answer in time: see whether it is overloaded or cut off",
    ),
)
_AWAY = "no store answers at {where}: start Redis or Valkey there, or correct cluster.store"


def explain(
    error: BaseException,
    what: str,
    where: str,
    secrets: tuple[str, ...] = (),
    before: BaseException | None = None,
) -> StoreError:
    """The error to raise in place of ``error``. None of ``secrets`` is in its text.

    ``before``: an earlier error that the caller was handling already, and that is not the cause.
    """
    history = list(_history(error, before))
    found = "\n".join(f"{type(one).__name__}: {one}" for one in history)
    reason = next((_reason(one) for one in history if isinstance(one, ssl.SSLError)), "")
    text = str(error)
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "…")
    for pattern, kind, sentence in _ROWS:
        if re.search(pattern, found):
            return kind(sentence.format(where=where, what=what, text=text[:MAX_TEXT], reason=reason))
    return TransientStoreError(_AWAY.format(where=where))


def _history(error: BaseException | None, end: BaseException | None) -> Iterator[BaseException]:
    while error is not None and error is not end:
        yield error
        error = error.__cause__ or error.__context__


def _reason(error: ssl.SSLError) -> str:
    # errors that do not come from OpenSSL have neither
    given = getattr(error, "verify_message", None) or getattr(error, "reason", None) or "no reason given"
    return str(given).lower().rstrip(".")
