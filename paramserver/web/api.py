"""The answers of `/api/v1`. This module needs the extra `dashboard`, and is imported when somebody looks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from paramserver import errors
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.web import models
from paramserver.web.access import Access, cookie_name
from paramserver.web.facts import ledger_of
from paramserver.web.feed import Feed
from paramserver.web.guard import BODY_S, BROKEN, TOO_MUCH, App, Guard, TooMuchError, head_of
from paramserver.web.metrics.exposition import CONTENT_TYPE, exposition
from paramserver.web.metrics.job import METRICS, samples
from paramserver.web.metrics.targets import targets_of
from paramserver.web.operations import OPERATIONS, PREFIX, openapi
from paramserver.web.page.files import contents
from paramserver.web.tickets import SESSION_S

MAX_STREAMS = 64
# How long commands may take, as those of the command line.
WAIT_S = 60.0
RESTART_S = 600.0

B = TypeVar("B", bound=BaseModel)


class Coordinator(Protocol):
    """The coordinator of this process, whether it leads or not: the methods that answer operators."""

    async def set_consistency(self, request: Any) -> Any:
        """Change mode or staleness."""

    async def scale(self, request: Any) -> Any:
        """Change the number of workers or servers."""

    async def drain(self, request: Any) -> Any:
        """Ask a member to leave."""

    async def checkpoint(self, request: Any) -> Any:
        """Make a checkpoint."""

    async def stop(self, request: Any) -> Any:
        """End the job."""

    async def ledger(self, request: Any) -> Any:
        """How often samples have counted."""


class Api:
    """One method for each operation of `operations.OPERATIONS`."""

    def __init__(
        self, coordinator: Any, feed: Feed, access: Access, settings: Sequence[models.Setting], secure: bool
    ) -> None:
        """``secure``: cookies are sent over TLS only."""
        self._coordinator: Coordinator = coordinator
        self._feed = feed
        self._access = access
        self._settings = models.Settings(settings=list(settings))
        self._secure = secure

    # ---- reading

    async def status(self, request: Request) -> Response:
        """The state of the job now."""
        return _json(await self._feed.status())

    async def series(self, request: Request) -> Response:
        """Values over time."""
        return _json(self._feed.series())

    async def events(self, request: Request) -> Response:
        """The events of the job."""
        return _json(models.Events(events=await self._feed.events()))

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        status, events = await self._feed.status(), await self._feed.events()
        return Response(exposition(METRICS, samples(status, events)), media_type=CONTENT_TYPE)

    async def targets(self, request: Request) -> Response:
        """Where members serve metrics."""
        return _json(targets_of(await self._feed.status(), request.query_params.get("role", "")))

    async def ledger(self, request: Request) -> Response:
        """How often samples have counted."""
        asked = coordinator_pb2.AccountsRequest(slices=request.query_params.get("slices", "") in ("1", "true"))
        if epoch := request.query_params.get("epoch", ""):
            if not (epoch.isascii() and epoch.isdigit() and len(epoch) < 19):
                raise errors.UserError("epoch is a number, from 0")
            asked.epoch = int(epoch)
        return _json(ledger_of(await self._coordinator.ledger(asked)))

    async def settings(self, request: Request) -> Response:
        """The settings in force."""
        return _json(self._settings)

    async def stream(self, request: Request) -> Response:
        """Server-sent events."""
        if self._feed.watching >= MAX_STREAMS:
            raise errors.OverloadedError(f"{MAX_STREAMS} streams are open already: close one, or ask for /status")

        async def lines() -> AsyncIterator[str]:
            async for update in self._feed.updates():
                yield f"data: {update}\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    # ---- sessions

    async def session(self, request: Request) -> Response:
        """The rights of the caller."""
        head = head_of(request.scope)
        return _json(models.Session(reads=self._access.reads(head), commands=self._access.commands(head)))

    async def login(self, request: Request) -> Response:
        """A session in exchange for a token."""
        session = self._access.log_in((await _body(request, models.Login)).token.strip())
        if session is None:
            return JSONResponse({"error": "this is no token of this job"}, 401)
        response = _json(models.Done(message="logged in"))
        name, age_s = cookie_name(head_of(request.scope)), int(SESSION_S)
        response.set_cookie(name, session, max_age=age_s, httponly=True, samesite="strict", secure=self._secure)
        return response

    async def logout(self, request: Request) -> Response:
        """End the session."""
        head = head_of(request.scope)
        self._access.log_out(head)
        response = _json(models.Done(message="logged out"))
        response.delete_cookie(cookie_name(head), httponly=True, samesite="strict", secure=self._secure)
        return response

    # ---- commands

    async def consistency(self, request: Request) -> Response:
        """Change mode or staleness."""
        wish = await _body(request, models.ChangeConsistency)
        if wish.mode == "sync":
            if wish.staleness is not None:
                raise errors.ConfigError("staleness has no meaning with mode sync; give one or the other")
            change = coordinator_pb2.ChangeConsistencyRequest(mode=types_pb2.MODE_SYNC, wait_s=WAIT_S)
        else:
            if wish.staleness is None:
                raise errors.ConfigError('mode async takes a staleness: a number, or "unbounded"')
            change = coordinator_pb2.ChangeConsistencyRequest(mode=types_pb2.MODE_ASYNC, wait_s=WAIT_S)
            if isinstance(wish.staleness, int):
                change.staleness = wish.staleness
        await self._coordinator.set_consistency(change)
        return _json(models.Done(message=f"the mode is {wish.mode}"))

    async def scale(self, request: Request) -> Response:
        """Change the number of workers or servers."""
        wish = await _body(request, models.Scale)
        if (wish.workers is None) == (wish.servers is None):
            raise errors.ConfigError("scale takes workers or servers: one of them")
        if wish.servers is not None:
            reply = await self._coordinator.scale(coordinator_pb2.ScaleRequest(servers=wish.servers, wait_s=WAIT_S))
            return _json(models.Done(message=f"{reply.servers} servers now; workers waited for {reply.paused_s:.2f} s"))
        reply = await self._coordinator.scale(coordinator_pb2.ScaleRequest(workers=wish.workers, wait_s=WAIT_S))
        note = f"; {reply.note}" if reply.note else ""
        return _json(models.Done(message=f"{reply.workers} workers now{note}"))

    async def drain(self, request: Request) -> Response:
        """Ask a member to leave."""
        name = (await _body(request, models.Named)).name
        await self._coordinator.drain(coordinator_pb2.DrainRequest(name=name, wait_s=WAIT_S))
        return _json(models.Done(message=f"{name} has left"))

    async def restart(self, request: Request) -> Response:
        """Restart a server."""
        name = (await _body(request, models.Named)).name
        await self._coordinator.drain(coordinator_pb2.DrainRequest(name=name, wait_s=RESTART_S, restart=True))
        return _json(models.Done(message=f"{name} has been restarted"))

    async def checkpoint(self, request: Request) -> Response:
        """Make a checkpoint."""
        await _body(request, models.Nothing)
        reply = await self._coordinator.checkpoint(coordinator_pb2.CheckpointRequest(wait_s=WAIT_S))
        return _json(models.Done(message=f"{reply.name} is complete, in {reply.place}"))

    async def stop(self, request: Request) -> Response:
        """End the job."""
        reason = (await _body(request, models.Stop)).reason
        await self._coordinator.stop(coordinator_pb2.StopRequest(reason=reason))
        return _json(models.Done(message="the job is stopping"))


def make_app(api: Api, access: Access) -> App:
    """The ASGI application: the API, the page, and the gate in front of both."""

    async def document(request: Request) -> Response:
        return JSONResponse(openapi())

    files = contents()

    async def file(request: Request) -> Response:
        content, kind = files.get(request.path_params.get("name", "index.html"), (b"", ""))
        if not kind:
            return JSONResponse({"error": "there is no such page"}, 404)
        return Response(content, media_type=kind)

    routes = [
        Route(PREFIX + operation.path, getattr(api, operation.handler), methods=[operation.method])
        for operation in OPERATIONS
    ]
    routes += [
        Route(f"{PREFIX}/openapi.json", document),
        Route("/metrics", api.metrics),
        Route("/", file),
        Route("/static/{name:str}", file),
    ]
    handlers: dict[Any, Any] = {
        errors.ParamServerError: _refusal,
        ValidationError: _invalid,
        TimeoutError: _says(408, f"a request has to arrive within {BODY_S:g} s"),
        TooMuchError: _says(413, TOO_MUCH),
        404: _says(404, f"there is no such page; {PREFIX}/openapi.json lists all operations"),
        405: _says(405, f"this method is not allowed; {PREFIX}/openapi.json lists all operations"),
        Exception: _says(500, BROKEN),
    }
    return Guard(Starlette(routes=routes, exception_handlers=handlers), access)


async def _body(request: Request, model: type[B]) -> B:
    """The body of a request. Raises ValidationError, TimeoutError."""
    async with asyncio.timeout(BODY_S):
        text = await request.body()
    return model.model_validate_json(text, strict=True)


def _json(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")


_STATUSES = (
    (errors.UserError, 400),
    (errors.UnavailableError, 503),
    (errors.OverloadedError, 503),
    (errors.DeadlineError, 504),
)


async def _refusal(request: Request, error: Exception) -> Response:
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 409)
    return JSONResponse({"error": str(error)}, status)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, ValidationError)
    wrong = [f"{'.'.join(map(str, one['loc'])) or 'the body'}: {one['msg']}" for one in error.errors()[:5]]
    return JSONResponse({"error": "; ".join(wrong)}, 400)


def _says(status: int, text: str) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": text}, status)

    return answer
