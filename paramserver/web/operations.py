"""All operations of the API in one table, and the OpenAPI document that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from paramserver.web import models

PREFIX = "/api/v1"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. ``handler``: the method of `api.Api` that answers. ``admin``: takes the admin token."""

    method: str
    path: str
    summary: str
    answer: type[BaseModel]
    handler: str
    body: type[BaseModel] | None = None
    admin: bool = False


def _command(path: str, summary: str, body: type[BaseModel]) -> Operation:
    return Operation("POST", path, summary, models.Done, path.removeprefix("/"), body, admin=True)


OPERATIONS = (
    Operation("GET", "/status", "Where the job stands and why, and all its processes.", models.Status, "status"),
    Operation(
        "GET", "/series", "Version, samples per second and values of ctx.log over time.", models.Series, "series"
    ),
    Operation("GET", "/events", "Joins, deaths, takeovers, changes of mode, checkpoints.", models.Events, "events"),
    Operation("GET", "/ledger", "How often the samples of each epoch have counted.", models.Ledger, "ledger"),
    Operation("GET", "/settings", "The settings in force, and where each came from.", models.Settings, "settings"),
    Operation("GET", "/targets", "Where servers and workers serve metrics, for Prometheus.", models.Targets, "targets"),
    Operation("GET", "/stream", "Server-sent events, two per second at most.", models.Update, "stream"),
    Operation("GET", "/session", "What the caller may do.", models.Session, "session"),
    Operation("POST", "/login", "A session cookie in exchange for a token.", models.Done, "login", models.Login),
    Operation("POST", "/logout", "End the session.", models.Done, "logout"),
    _command("/consistency", "Change mode or staleness, as `paramserver set`.", models.ChangeConsistency),
    _command("/scale", "Change the number of workers or servers, as `paramserver scale`.", models.Scale),
    _command("/drain", "Ask a worker or server to leave, as `paramserver drain`.", models.Named),
    _command("/restart", "Restart a server, as `paramserver restart`.", models.Named),
    _command("/checkpoint", "Make a checkpoint, as `paramserver checkpoint now`.", models.Nothing),
    _command("/stop", "End the job, as `paramserver stop`.", models.Stop),
)


@cache
def openapi() -> dict[str, Any]:
    """The OpenAPI document of all operations."""
    used = {operation.answer for operation in OPERATIONS} | {models.Failure}
    taken = {operation.body for operation in OPERATIONS if operation.body}
    ways: list[tuple[type[BaseModel], Any]] = [(model, "serialization") for model in sorted(used, key=_name)]
    ways += [(model, "validation") for model in sorted(taken, key=_name)]
    references, definitions = models_json_schema(ways, ref_template="#/components/schemas/{model}")
    by_model = {model: reference for (model, _), reference in references.items()}
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        kind = "text/event-stream" if operation.path == "/stream" else "application/json"
        described: dict[str, Any] = {
            "summary": operation.summary,
            "operationId": operation.handler,
            "responses": {
                "200": {"description": "done", "content": {kind: {"schema": by_model[operation.answer]}}},
                "default": {
                    "description": "refused",
                    "content": {"application/json": {"schema": by_model[models.Failure]}},
                },
            },
        }
        if operation.body is not None:
            content = {"application/json": {"schema": by_model[operation.body]}}
            described["requestBody"] = {"required": True, "content": content}
        if operation.admin:
            described["security"] = [{"admin": []}]
        paths.setdefault(PREFIX + operation.path, {})[operation.method.lower()] = described
    schemes = {
        "token": {"type": "http", "scheme": "bearer", "description": "The token of all members (join.token)."},
        "admin": {"type": "apiKey", "in": "header", "name": "paramserver-admin", "description": "The admin token."},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "paramserver", "version": "1"},
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {"schemas": definitions.get("$defs", {}), "securitySchemes": schemes},
    }


def _name(model: type[BaseModel]) -> str:
    return model.__name__
