"""How errors travel: by the name of their class, from an allow-list, and their text. gRPC status codes are for others.

One table gives every class its status code; a second one says what a bare code means, when it comes from gRPC itself,
from a proxy, or from a peer that is none of ours.
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
    errors.OutOfOrderError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.GoneError: grpc.StatusCode.OUT_OF_RANGE,
    errors.ProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NonFiniteError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.VersionMismatchError: grpc.StatusCode.UNIMPLEMENTED,
    errors.StoreError: grpc.StatusCode.UNAVAILABLE,
    errors.JobFailedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.EndedError: grpc.StatusCode.FAILED_PRECONDITION,
}

# A code without the name of one of our classes. OK never comes here.
MEANINGS: Mapping[grpc.StatusCode, type[errors.ParamServerError]] = {
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

_TOO_LARGE = re.compile(r"message larger than max \((\d+) vs\.? (\d+)\)")
# What gRPC says, under other codes, when a connection or a stream was cut.
_CUT = re.compile(r"RST_STREAM|Stream removed|Socket closed|Connection reset|GOAWAY", re.IGNORECASE)


def unavailable(where: str, reason: str = "") -> errors.UnavailableError:
    """Nobody answers; ``where`` names method and address."""
    because = f" ({reason})" if reason else ""
    return errors.UnavailableError(f"{where}: nobody answers{because}; check that it runs and can be reached from here")


def late(where: str, timeout: float) -> errors.DeadlineError:
    """No answer within ``timeout`` seconds."""
    return errors.DeadlineError(f"{where}: no answer within {timeout:g} s")


def unknown_call(where: str) -> errors.VersionMismatchError:
    """The peer has no such RPC."""
    return errors.VersionMismatchError(
        f"{where}: the peer does not know this call; it runs another version, or it is something else"
    )


async def answered(where: str, work: Callable[[], Awaitable[T]]) -> T:
    """What a service's method returns; whatever it raises becomes a new error that may travel, see `travelling`.

    Cancellation passes, unless nobody asked for it: then it is an error like any other.
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


def arrived(name: str, text: str) -> errors.ParamServerError:
    """The error that a peer sent. An unknown name gives the base class."""
    return CLASSES.get(name, errors.ParamServerError)(text)


def from_code(code: grpc.StatusCode, details: str, where: str, timeout: float) -> errors.ParamServerError:
    """The error for a failed call that carries no class name."""
    oversized = _TOO_LARGE.search(details)
    if oversized:
        return too_large(where, int(oversized[1]), int(oversized[2]) or MAX_MESSAGE_BYTES)
    if _CUT.search(details) and code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL):
        code = grpc.StatusCode.UNAVAILABLE
    meaning = MEANINGS[code]
    if meaning is errors.UnavailableError:
        reason = "it stopped or closed the connection" if code is grpc.StatusCode.CANCELLED else _last_part(details)
        return unavailable(where, reason)
    if meaning is errors.DeadlineError:
        return late(where, timeout)
    if meaning is errors.OverloadedError:
        return errors.OverloadedError(f"{where}: the peer is overloaded, slow down ({_last_part(details)})")
    if meaning is errors.VersionMismatchError:
        return unknown_call(where)
    return meaning(f"{where}: the call failed with {code.name} ({_last_part(details)})")


def _last_part(details: str) -> str:
    """gRPC tells the whole story, from the outside inwards; the end of it is the cause."""
    return details.strip().rsplit(": ", 1)[-1][:200] or "no details"
