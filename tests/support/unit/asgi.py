"""Requests to an ASGI application without a network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from paramserver.web.guard import App

JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Reply:
    """An answer. ``headers``: by name in lower case; of a name that comes twice the last one."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as plain values."""
        return json.loads(self.body)


def ask(
    app: App,
    method: str,
    path: str,
    headers: Mapping[str, str] | None = None,
    body: object = None,
    scheme: str = "http",
) -> Reply:
    """One request and its whole answer. ``body``: bytes, a list of bytes that come in pieces, or a value for JSON."""
    given = {"host": "127.0.0.1:8780", **(headers or {})}
    pieces = body if isinstance(body, list) else [body if isinstance(body, bytes) else json.dumps(body).encode()]
    if body is None:
        pieces = [b""]
    target, _, query = path.partition("?")
    scope: MutableMapping[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": scheme,
        "path": target,
        "raw_path": target.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 5),
        "server": ("127.0.0.1", 8780),
    }
    sent: list[MutableMapping[str, Any]] = []
    left = list(pieces)

    async def receive() -> MutableMapping[str, Any]:
        if left:
            piece = left.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(left)}
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def once() -> None:
        await asyncio.wait_for(app(scope, receive, send), 10.0)

    asyncio.run(once())
    start = sent[0]
    found = {name.decode().lower(): value.decode() for name, value in start["headers"]}
    return Reply(start["status"], found, b"".join(message.get("body", b"") for message in sent[1:]))
