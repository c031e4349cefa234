"""How errors travel: by the name of their class, from an allow-list, and their text.

Status codes of gRPC are for programs that are not ours. One table gives every class its status code. A second table
gives the meaning of a bare code, which comes from gRPC itself, from a proxy, or from a peer that is none of ours.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from paramserver import errors
from paramserver.transport.base import MAX_MESSAGE_BYTES, too_large
from paramserver.transport.grpcio import grpc

# The key of the trailing metadata that carries the class name.
ERROR_KEY = "paramserver-error"
# Metadata are bounded, and an error is one sentence.
MAX_TEXT_CHARS = 2000

T = TypeVar("T")

_log = logging.getLogger(__name__)

CLASSES: Mapping[str, type[errors.ParamServerError]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.ParamServerError)
}

CODES: Mapping[type[errors.ParamServerError], grpc.StatusCode] = {
    errors.ParamServerError: grpc.StatusCode.INTERNAL,
    errors.UserError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.DeniedError: grpc.StatusCode.PERMISSION_DENIED,
    errors.ModelError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.DataError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.RetryableError: grpc.StatusCode.ABORTED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.NotLeaderError: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.StaleViewError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.FencedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotMemberError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RelievedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RolledBackError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OutOfOrderError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.GoneError: grpc.StatusCode.OUT_OF_RANGE,
    errors.ProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NonFiniteError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.VersionMismatchError: grpc.StatusCode.UNIMPLEMENTED,
    errors.StoreError: grpc.StatusCode.UNAVAILABLE,
    errors.CheckpointError: grpc.StatusCode.INTERNAL,
    errors.JobFailedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.EndedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RestartError: grpc.StatusCode.FAILED_PRECONDITION,
}

# A code without the name of one of our classes. OK: the peer has ended the call before we were through with the call.
# That happens to a session whose member was given up for lost while its process hung.
MEANINGS: Mapping[grpc.StatusCode, type[errors.ParamServerError]] = {
    grpc.StatusCode.OK: errors.UnavailableError,
    grpc.StatusCode.CANCELLED: errors.UnavailableError,
    grpc.StatusCode.UNKNOWN: errors.ParamServerError,
    grpc.StatusCode.INVALID_ARGUMENT: errors.ProtocolError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineError,
    grpc.StatusCode.NOT_FOUND: errors.ProtocolError,
    grpc.StatusCode.ALREADY_EXISTS: errors.ProtocolError,
    grpc.StatusCode.PERMISSION_DENIED: errors.DeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.OverloadedError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.StaleViewError,
    grpc.StatusCode.ABORTED: errors.RetryableError,
    grpc.StatusCode.OUT_OF_RANGE: errors.GoneError,
    grpc.StatusCode.UNIMPLEMENTED: errors.VersionMismatchError,
    grpc.StatusCode.INTERNAL: errors.ParamServerError,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.DATA_LOSS: errors.ProtocolError,
    grpc.StatusCode.UNAUTHENTICATED: errors.DeniedError,
}

_ENDS = {
    grpc.StatusCode.OK: "it ended the call",
    grpc.StatusCode.CANCELLED: "it stopped or closed the connection",
}
_TOO_LARGE = re.compile(r"message larger than max \((\d+) vs\.? (\d+)\)")
# Words of gRPC, under other codes, for a connection or a stream that was cut.
_CUT = re.compile(r"RST_STREAM|Stream removed|Socket closed|Connection reset|GOAWAY", re.IGNORECASE)


# Words of gRPC for a connection that failed because of TLS, and what they may mean. Under TLS 1.3 a client that is
# refused sees no more than a connection that closes.
_TLS_TROUBLE: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile("Hostname Verification|is not in peer certificate"),
        "who answers there has the certificate of another role",
    ),
    (re.compile("WRONG_VERSION_NUMBER"), "who answers there speaks no TLS: it has no security.certs, or is no member"),
    (
        re.compile("CERTIFICATE_VERIFY_FAILED: certificate has expired"),
        "its certificate has expired: run `paramserver certs renew`, and copy the new one there",
    ),
    (re.compile("CERTIFICATE_VERIFY_FAILED"), "its certificate was not made with the ca.crt that is here"),
    (
        re.compile("Socket closed|reset|EOF|Broken pipe|SSL_ERROR", re.IGNORECASE),
        "or it refuses this certificate: its log says why",
    ),
)
_EXPECTS_TLS = "or it expects TLS: name the directory with certificates in security.certs"


def unavailable(where: str, reason: str = "", hint: str = "") -> errors.UnavailableError:
    """The error if no answer comes. ``where``: method and address. ``hint``: another cause than a missing process."""
    because = f" ({reason})" if reason else ""
    also = f", {hint}" if hint else ""
    return errors.UnavailableError(
        f"{where}: nobody answers{because}{also}; check that it runs and can be reached from here"
    )


def connection_hint(details: str, tls: bool, ever: bool) -> str:
    """Another possible cause of a connection that failed with these details. ``ever``: it has worked before."""
    if tls:
        return next((meaning for sign, meaning in _TLS_TROUBLE if sign.search(details)), "")
    return _EXPECTS_TLS if not ever and "Socket closed" in details else ""


def denied(where: str, lacking: str = "") -> errors.DeniedError:
    """The error if the peer refused the call. ``lacking``: why, if that is known here; else the peer's log has it."""
    why = lacking or "the log of the process there says why, mend the token or certificate used here"
    return errors.DeniedError(f"{where}: permission denied; {why}")


def late(where: str, timeout: float) -> errors.DeadlineError:
    """The error if there was no answer within ``timeout`` seconds."""
    return errors.DeadlineError(f"{where}: no answer within {timeout:g} s")


async def in_time(where: str, timeout: float, deadline: float | None, work: Awaitable[T]) -> T:
    """The result of ``work``. Raises DeadlineError after ``deadline`` (in the loop's time)."""
    try:
        async with asyncio.timeout_at(deadline):
            result = await work
    except TimeoutError:
        raise late(where, timeout) from None
    if deadline is not None and asyncio.get_running_loop().time() >= deadline:
        raise late(where, timeout)
    return result


def unknown_call(where: str) -> errors.VersionMismatchError:
    """The error if the peer does not have the RPC."""
    return errors.VersionMismatchError(
        f"{where}: the peer does not know this call; it runs another version, or it is something else"
    )


async def answered(where: str, work: Callable[[], Awaitable[T]]) -> T:
    """The result of a service's method. An exception becomes a new error that may travel, see `travelling`.

    Cancellation passes if this task was cancelled. Otherwise it is an error like any other.
    """
    try:
        return await work()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        kind, text = travelling(error, where)
    except Exception as error:
        kind, text = travelling(error, where)
    raise kind(text)  # outside of the handlers: it does not refer to the old one


def travelling(error: BaseException, where: str) -> tuple[type[errors.ParamServerError], str]:
    """The class and the text under which an error of a service goes to the caller; foreign ones are logged here."""
    if not isinstance(error, errors.ParamServerError):
        _log.error("internal error in %s", where, exc_info=error)
        kind = type(error).__name__
        return errors.ParamServerError, f"internal error in {where}: {kind}; the log of that process tells more"
    # A subclass from elsewhere travels as the nearest class that everybody knows.
    kind_of = next(kind for kind in type(error).__mro__ if CLASSES.get(kind.__name__) is kind)
    text = str(error)
    return kind_of, text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 2] + " …"


def remote_error(name: str, text: str) -> errors.ParamServerError:
    """The error that a peer sent. An unknown name gives the base class."""
    return CLASSES.get(name, errors.ParamServerError)(text)


def from_code(
    code: grpc.StatusCode, details: str, where: str, timeout: float, hint: str = ""
) -> errors.ParamServerError:
    """The error for a failed call that carries no class name; ``hint`` as in `unavailable`."""
    oversized = _TOO_LARGE.search(details)
    if oversized:
        return too_large(where, int(oversized[1]), int(oversized[2]) or MAX_MESSAGE_BYTES)
    if _CUT.search(details) and code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL):
        code = grpc.StatusCode.UNAVAILABLE
    meaning = MEANINGS[code]
    if meaning is errors.UnavailableError:
        return unavailable(where, _ENDS.get(code) or _last_part(details), hint)
    if meaning is errors.DeniedError:
        return denied(where)
    if meaning is errors.DeadlineError:
        return late(where, timeout)
    if meaning is errors.OverloadedError:
        return errors.OverloadedError(f"{where}: the peer is overloaded, slow down ({_last_part(details)})")
    if meaning is errors.VersionMismatchError:
        return unknown_call(where)
    return meaning(f"{where}: the call failed with {code.name} ({_last_part(details)})")


def _last_part(details: str) -> str:
    """gRPC tells the whole story, from the outside inwards; the end of it is the cause."""
    return details.strip().removesuffix(": OK").rsplit(": ", 1)[-1][:200] or "no details"
