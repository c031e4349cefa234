"""Errors of redis-py, in the forms that its versions 5 and 8 give them, and what is made of them."""

from __future__ import annotations

import ssl

import pytest
from redis import exceptions

from paramserver.errors import StoreError
from paramserver.store import TransientStoreError
from paramserver.store.failures import ForbiddenError, explain


def hidden(error: BaseException) -> BaseException:
    """As the cause of another one, as redis-py 5 does with errors of the login."""
    outer = exceptions.ConnectionError(str(error))
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (exceptions.AuthenticationError("invalid username-password pair"), StoreError, "correct user and password"),
        (exceptions.AuthenticationWrongNumberOfArgsError("wrong number"), StoreError, "correct user and password"),
        (exceptions.ResponseError("NOAUTH Authentication required."), StoreError, "correct user and password"),
        (exceptions.NoPermissionError("this user has no permissions"), ForbiddenError, "permissions"),
        (exceptions.ResponseError("NOPERM this user has no permissions"), ForbiddenError, "permissions"),
        (exceptions.ResponseError("unknown command 'INFO'"), ForbiddenError, "does not let us write"),
        (exceptions.BusyLoadingError("Redis is loading"), TransientStoreError, "still loads"),
        (exceptions.ResponseError("LOADING Redis is loading"), TransientStoreError, "still loads"),
        (exceptions.ReadOnlyError("You can't write"), TransientStoreError, "is a replica"),
        (exceptions.ResponseError("-READONLY You can't write"), TransientStoreError, "is a replica"),
        (exceptions.OutOfMemoryError("command not allowed"), TransientStoreError, "is full"),
        (exceptions.ResponseError("Error running script: -OOM command not allowed"), TransientStoreError, "is full"),
        (exceptions.ResponseError("MISCONF Redis is configured to save"), TransientStoreError, "write to its disk"),
        (
            exceptions.ResponseError("BUSY Redis is busy running a script"),
            TransientStoreError,
            "another client's script",
        ),
        (exceptions.ResponseError("MASTERDOWN Link with MASTER is down"), TransientStoreError, "lost its primary"),
        (exceptions.ResponseError("NOREPLICAS Not enough good replicas"), TransientStoreError, "lost its primary"),
        (exceptions.ResponseError("MOVED 3999 127.0.0.1:6381"), StoreError, "is a Redis Cluster"),
        (exceptions.ResponseError("CROSSSLOT Keys in request"), StoreError, "is a Redis Cluster"),
        (exceptions.ResponseError("DB index is out of range"), StoreError, "does not have the database"),
        (exceptions.ConnectionError("max number of clients reached"), TransientStoreError, "too many clients"),
        (exceptions.ResponseError("WRONGTYPE Operation against a key"), StoreError, "could not write: WRONGTYPE"),
        (exceptions.InvalidResponse("Protocol Error: b'HTTP'"), StoreError, "could not write: Protocol Error"),
        (exceptions.TimeoutError("Timeout reading"), TransientStoreError, "did not answer in time"),
        (TimeoutError(), TransientStoreError, "did not answer in time"),
        (exceptions.ConnectionError("Error 111"), TransientStoreError, "no store answers"),
        (ConnectionResetError(), TransientStoreError, "no store answers"),
        (ssl.SSLCertVerificationError(1, "certificate verify failed"), StoreError, "certificate that we do not trust"),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"), StoreError, "agree with us on TLS"),
    ],
)
def test_each_error_is_a_sentence(error: Exception, kind: type[StoreError], says: str) -> None:
    for given in (error, hidden(error)):
        explained = explain(given, "write", "redis://host")
        assert type(explained) is kind
        assert says in str(explained)
        assert "the store at redis://host" in str(explained) or "answers at redis://host" in str(explained)
        assert str(explained).count("\n") == 0


def test_a_secret_in_an_answer_is_not_shown() -> None:
    said = exceptions.ResponseError("somebody sent canary-long, canary, and canary again")
    explained = explain(said, "write", "x", ("", "canary", "canary-long"))
    assert str(explained) == "the store at x could not write: somebody sent …, …, and … again"


def test_a_long_answer_is_cut() -> None:
    assert len(str(explain(exceptions.ResponseError("x" * 10000), "write", "y"))) < 300


def test_an_error_of_before_does_not_count() -> None:
    before = ValueError("READONLY NOPERM")
    error = exceptions.ConnectionError("Error 111")
    error.__context__ = before
    assert type(explain(error, "write", "x")) is ForbiddenError
    assert "no store answers" in str(explain(error, "write", "x", before=before))
