"""The gate of everything served over HTTP: an ASGI application around another one."""

from __future__ import annotations

import json
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import structlog

from paramserver.transport.security.access import RefusalLog
from paramserver.web.access import Access, Refused, Request, open_to_all

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 64 << 10
MAX_HEAD_BYTES = 16 << 10
# A body has to arrive within so many seconds.
BODY_S = 10.0
TOO_MUCH = f"a request has at most {MAX_BODY_BYTES} bytes"
# The entry in the state of a request: tells the port that the caller has shown a token.
KNOWN = "known"
BROKEN = "this request could not be answered; the coordinator's log says why"
HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

log = structlog.get_logger("paramserver.web")


class Guard:
    """Refuses requests by their heads and sizes, adds headers to answers, and hides the text of unexpected errors."""

    def __init__(self, app: App, access: Access) -> None:
        self._app = app
        self._access = access
        self._refusals = RefusalLog()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        request = head_of(scope)
        refused = self._access.check(request) or _too_long(request)
        if refused is not None:
            self._refusals.say(f"{request.method} {request.path[:100]}", _peer(scope), refused.reason)
            await _answer(send, refused.status, refused.text)
            return
        if not open_to_all(request) and KNOWN in scope.get("state", ()):
            scope["state"][KNOWN]()
        await self._pass_on(scope, receive, send)

    async def _pass_on(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        began, received = False, 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise TooMuchError
            return message

        async def with_headers(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                own = {name for name, _ in message.get("headers", [])}
                message["headers"] = [*message.get("headers", []), *(h for h in _HEADERS if h[0] not in own)]
            await send(message)

        try:
            await self._app(scope, limited, with_headers)
        except Exception as error:  # a mistake of ours: in the log in full, and nothing of it in the answer
            trace = "".join(traceback.format_exception(error))
            log.error("a request could not be answered", path=scope["path"], trace=trace)
            if not began:
                await _answer(send, 500, BROKEN)


class TooMuchError(Exception):
    """The body of a request is longer than its head said, or than is allowed."""


def head_of(scope: MutableMapping[str, Any]) -> Request:
    """The head of an ASGI request."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        key = name.decode("latin-1").lower()
        headers[key] = "" if key in headers else value.decode("latin-1")
    return Request(scope["method"], scope["path"], scope["scheme"], headers)


def _too_long(request: Request) -> Refused | None:
    if len(request.path) + sum(len(name) + len(value) for name, value in request.headers.items()) > MAX_HEAD_BYTES:
        return Refused(431, f"the head of a request has at most {MAX_HEAD_BYTES} bytes", "its head is too long")
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and len(length) < 20 and int(length) <= MAX_BODY_BYTES:
        return None
    return Refused(413, TOO_MUCH, "its body is too long")


def _peer(scope: MutableMapping[str, Any]) -> str:
    client = scope.get("client")
    return f"{client[0]}:{client[1]}" if client else ""


async def _answer(send: Send, status: int, text: str) -> None:
    body = json.dumps({"error": text}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *_HEADERS]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
