"""The API over ASGI, without a network: answers are the models, commands are those of operators, nothing leaks."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from paramserver import errors
from paramserver.cli.look.facts import describe
from paramserver.config import load_settings
from paramserver.roles.dashboard import settings_of
from paramserver.transport.security.access import Security
from paramserver.transport.security.tokens import Tokens
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.web.access import Access
from paramserver.web.api import Api, make_app
from paramserver.web.facts import status_of
from paramserver.web.feed import IDLE_S, WATCHED_S, Feed, pause
from paramserver.web.guard import HEADERS, MAX_BODY_BYTES, MAX_HEAD_BYTES, App
from paramserver.web.history import MAX_NAMES, History
from paramserver.web.models import Update
from paramserver.web.operations import OPERATIONS, PREFIX, openapi
from tests.support.unit.asgi import JSON, Reply, ask

JOIN, ADMIN = "join-token-of-the-job", "admin-token-of-the-job"
AS_ADMIN = {"paramserver-admin": ADMIN, **JSON}
PAGE = Path(__file__).parents[2] / "docs/api.md"


def response(loss: float = 0.5, name: str = "worker-0", samples_per_s: float = 40.0) -> coordinator_pb2.StatusResponse:
    return coordinator_pb2.StatusResponse(
        job="digits",
        state="training",
        view=types_pb2.View(generation=4, consistency=types_pb2.Consistency(mode=types_pb2.MODE_SYNC)),
        data=types_pb2.DataSpec(samples=230, slice_size=16),
        term=1,
        samples_per_s=samples_per_s,
        processes=[
            coordinator_pb2.ProcessStatus(role="server", name="server-0", version=9, server={"applied": 18}),
            coordinator_pb2.ProcessStatus(role="worker", name=name, epochs_planned=2, metrics={"loss": loss}),
        ],
        events=[coordinator_pb2.Event(at_s=5.0, kind="joined", subject=name, text=f"{name} joined", version=0)],
    )


class Imagined:
    """A coordinator that notes the commands it gets."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.response = response()
        self.failure: Exception | None = None

    async def status(self, request: coordinator_pb2.StatusRequest) -> coordinator_pb2.StatusResponse:
        return self.response

    async def _take(self, request: Any) -> None:
        if self.failure is not None:
            raise self.failure
        self.got.append(request)

    async def set_consistency(self, request: Any) -> Any:
        await self._take(request)

    async def scale(self, request: Any) -> Any:
        await self._take(request)
        note = "" if request.HasField("servers") else "one is on its way"
        return coordinator_pb2.ScaleResponse(workers=request.workers, servers=request.servers, paused_s=0.5, note=note)

    async def drain(self, request: Any) -> Any:
        await self._take(request)

    async def checkpoint(self, request: Any) -> Any:
        await self._take(request)
        return coordinator_pb2.CheckpointResponse(name="step-00000050-t1", place="ckpt")

    async def stop(self, request: Any) -> Any:
        await self._take(request)

    async def ledger(self, request: Any) -> Any:
        await self._take(request)
        return coordinator_pb2.AccountsResponse(version=9, epochs=[{"epoch": 0, "samples": 230, "once": 230}])


def made(coordinator: Imagined, join: str = "") -> App:
    settings = load_settings(
        overrides={"cluster.store": "redis://user:secret-word@store:6379/0"},
        environ={"PARAMSERVER_SECURITY__ADMIN_TOKEN": ADMIN},
    )
    access = Access(Security(join=Tokens([join] if join else []), admin=Tokens([ADMIN])))
    return make_app(Api(coordinator, Feed(coordinator.status), access, settings_of(settings), False), access)


def get(app: App, path: str, **headers: str) -> Reply:
    return ask(app, "GET", PREFIX + path, headers)


def post(app: App, path: str, body: object, headers: dict[str, str] = AS_ADMIN) -> Reply:
    return ask(app, "POST", PREFIX + path, headers, body)


def test_the_api_and_the_command_say_the_same() -> None:
    coordinator = Imagined()
    assert get(made(coordinator), "/status").json() == describe(coordinator.response)


def test_the_job_in_one_sentence() -> None:
    said = status_of(response())
    assert said.sentence == "Job digits is training in synchronous mode with 1 worker and 1 server."
    assert (said.version, said.slices_done, said.slices_planned, said.metrics) == (9, 18, 30, {"loss": 0.5})


def test_who_holds_the_job_up_in_words_and_as_data() -> None:
    found = response()
    found.blame.sentence, found.blame.steps = "step 8 waited 3.4 s for slice 5 on worker-0", 9
    found.blame.worst.add(step=8, waited_s=3.4, member="worker-0", slices="5", cause="its data loader", cause_s=3.1)
    found.processes[1].phases.data_s = 7.25
    said = status_of(found)
    assert said.blame == [found.blame.sentence]
    (step,) = said.waits.worst
    assert (step.step, step.waited_s, step.member, step.slices) == (8, 3.4, "worker-0", "5")
    assert (step.cause, step.cause_s) == ("its data loader", 3.1)
    server, worker = said.processes
    assert server.phases is None
    assert worker.phases is not None
    assert worker.phases["data"] == 7.25


def test_a_loss_that_is_no_number_is_valid_json() -> None:
    coordinator = Imagined()
    coordinator.response = response(loss=float("nan"))
    reply = get(made(coordinator), "/status")
    assert json.loads(reply.body, parse_constant=pytest.fail)["metrics"] == {"loss": "NaN"}


def test_every_operation_is_in_the_schema_on_the_page_and_answers() -> None:
    app, page = made(Imagined()), PAGE.read_text()
    assert get(app, "/openapi.json").json() == openapi()
    rows = set(re.findall(r"^\| `(GET|POST) (/\S+)` \|", page, re.MULTILINE))
    assert rows == {(operation.method, PREFIX + operation.path) for operation in OPERATIONS}
    for operation in OPERATIONS:
        assert operation.method.lower() in openapi()["paths"][PREFIX + operation.path]
        if operation.path != "/stream":
            assert ask(app, operation.method, PREFIX + operation.path, AS_ADMIN).status != 404


def test_all_references_of_the_schema_lead_somewhere() -> None:
    text = json.dumps(openapi())
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert named == set(openapi()["components"]["schemas"])
    assert {"Status", "Process", "Series", "Failure", "Scale"} <= named


def test_events_ledger_and_settings() -> None:
    app = made(Imagined())
    assert get(app, "/events").json()["events"][0]["text"] == "worker-0 joined"
    assert get(app, "/ledger").json()["epochs"][0]["once"] == 230
    settings = {one["key"]: one for one in get(app, "/settings").json()["settings"]}
    assert settings["consistency.mode"]["origin"] == "default"
    assert settings["cluster.store"]["origin"] == "flag"
    everything = get(app, "/settings").body.decode()
    assert "secret-word" not in everything
    assert ADMIN not in everything


def test_commands_are_those_of_operators() -> None:
    coordinator = Imagined()
    app = made(coordinator)
    assert post(app, "/scale", {"workers": 5}).json() == {"message": "5 workers now; one is on its way"}
    assert post(app, "/scale", {"servers": 3}).json() == {"message": "3 servers now; workers waited for 0.50 s"}
    assert coordinator.got.pop().servers == 3
    assert post(app, "/drain", {"name": "worker-3"}).status == 200
    assert post(app, "/restart", {"name": "server-1"}).status == 200
    assert post(app, "/consistency", {"mode": "async", "staleness": 4}).status == 200
    assert post(app, "/consistency", {"mode": "async", "staleness": "unbounded"}).status == 200
    assert post(app, "/consistency", {"mode": "sync"}).status == 200
    assert post(app, "/checkpoint", {}).json() == {"message": "step-00000050-t1 is complete, in ckpt"}
    assert post(app, "/stop", {"reason": "enough"}).status == 200
    scale, drain, restart, bounded, unbounded, sync, checkpoint, stop = coordinator.got
    assert checkpoint.wait_s == 60.0
    assert (scale.workers, drain.name, drain.restart, restart.name, restart.restart) == (
        *(5, "worker-3", False, "server-1", True),
    )
    assert (bounded.mode, bounded.staleness, unbounded.HasField("staleness")) == (types_pb2.MODE_ASYNC, 4, False)
    assert (sync.mode, stop.reason) == (types_pb2.MODE_SYNC, "enough")


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/scale", {"workers": 0}, "workers: Input should be greater"),
        ("/scale", {"workers": "5"}, "workers: Input should be a valid integer"),
        ("/scale", {"workers": True}, "workers"),
        ("/scale", {"workers": 5, "servers": 2}, "one of them"),
        ("/scale", {}, "one of them"),
        ("/scale", {"workers": 5, "hosts": 2}, "hosts: Extra"),
        ("/scale", b"{", "the body: Invalid JSON"),
        ("/scale", [1, 2], "the body"),
        ("/drain", {"name": "x" * 101}, "name: String should have at most 100"),
        ("/consistency", {"mode": "sync", "staleness": 3}, "no meaning"),
        ("/consistency", {"mode": "async"}, "takes a staleness"),
        ("/consistency", {"mode": "async", "staleness": -1}, "staleness"),
    ],
)
def test_a_wrong_body_is_refused_in_a_sentence(path: str, body: object, says: str) -> None:
    coordinator = Imagined()
    sent = json.dumps(body).encode() if isinstance(body, list) else body
    reply = post(made(coordinator), path, sent)
    assert reply.status == 400
    assert says in reply.json()["error"]
    assert coordinator.got == []


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (errors.ConfigError("there is no worker-9"), 400),
        (errors.NotLeaderError("this coordinator stands by"), 503),
        (errors.DeadlineError("worker-3 has not left yet"), 504),
        (errors.JobFailedError("the job has failed"), 409),
    ],
)
def test_a_refused_command_says_why(failure: Exception, status: int) -> None:
    coordinator = Imagined()
    coordinator.failure = failure
    reply = post(made(coordinator), "/drain", {"name": "worker-9"})
    assert (reply.status, reply.json()) == (status, {"error": str(failure)})


def test_an_error_of_ours_shows_no_trace_and_no_text() -> None:
    coordinator = Imagined()
    coordinator.failure = RuntimeError("/home/secret/path")
    reply = post(made(coordinator), "/drain", {"name": "worker-9"})
    assert reply.status == 500
    assert b"secret" not in reply.body
    assert b"Traceback" not in reply.body


@pytest.mark.parametrize("path", ["/", "/api/v1/status", "/api/v1/none", "/static/none.js", "/static/..%2fapi.py"])
def test_every_answer_has_the_headers_of_a_safe_page(path: str) -> None:
    reply = ask(made(Imagined()), "GET", path)
    assert {name: reply.headers.get(name) for name in HEADERS} == HEADERS
    assert "unsafe" not in HEADERS["content-security-policy"]


def test_a_body_has_a_limit_whatever_its_head_says() -> None:
    app = made(Imagined())
    assert post(app, "/scale", b"x", {**AS_ADMIN, "content-length": str(MAX_BODY_BYTES + 1)}).status == 413
    assert post(app, "/scale", [b"x" * 40_000, b"x" * 40_000]).status == 413
    assert post(app, "/scale", b"x", {**AS_ADMIN, "content-length": "-1"}).status == 413


def test_a_head_has_a_limit() -> None:
    assert get(made(Imagined()), "/status", cookie="x" * MAX_HEAD_BYTES).status == 431


def test_logging_in_gives_a_cookie_that_scripts_and_other_sites_do_not_get() -> None:
    app = made(Imagined(), JOIN)
    assert get(app, "/status").status == 401
    assert post(app, "/login", {"token": "wrong"}, JSON).status == 401
    reply = post(app, "/login", {"token": JOIN}, JSON)
    cookie = reply.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    assert JOIN not in cookie
    session = cookie.partition(";")[0]
    assert get(app, "/status", cookie=session).status == 200
    assert get(app, "/session", cookie=session).json() == {"reads": True, "commands": False}
    assert post(app, "/scale", {"workers": 5}, {"cookie": session, **JSON}).status == 401


def test_reading_has_no_effect() -> None:
    coordinator = Imagined()
    app = made(coordinator)
    for operation in OPERATIONS:
        if operation.method == "GET" and operation.path not in ("/stream", "/ledger"):
            get(app, operation.path + "?workers=5&name=worker-0", **AS_ADMIN)
        elif operation.method == "POST":
            assert get(app, operation.path, **AS_ADMIN).status == 405
    assert coordinator.got == []


def test_series_are_thinned_out_evenly() -> None:
    history = History(most=8)
    for second in range(1000):
        history.take(status_of(response(loss=float(second))), float(second))
    series = history.series()
    assert len(series.at_s) <= 9
    assert series.at_s[0] == 0.0
    assert series.at_s[-1] == 999.0
    gaps = {after - before for before, after in zip(series.at_s[:-2], series.at_s[1:-1], strict=True)}
    assert len(gaps) == 1
    assert series.values["loss"] == series.at_s


def test_series_have_a_hole_where_a_value_is_no_number_and_a_limit_of_names() -> None:
    history = History()
    history.take(status_of(response(loss=float("inf"))), 0.0)
    for number in range(2 * MAX_NAMES):
        status = response()
        status.processes[1].metrics[f"value-{number}"] = 1.0
        history.take(status_of(status), 1.0 + number)
    series = history.series()
    assert series.values["loss"][:2] == [None, 0.5]
    assert len(series.values) == MAX_NAMES
    assert {len(column) for column in series.values.values()} == {len(series.at_s)}


def test_looking_takes_no_more_than_its_share_of_a_core() -> None:
    assert (pause(0.001, True), pause(0.001, False)) == (WATCHED_S, IDLE_S)
    assert pause(0.03, True) == pytest.approx(3.0)


def test_the_stream_has_the_status_the_moment_and_new_events() -> None:
    async def newest() -> Update:
        return Update.model_validate_json(await anext(Feed(Imagined().status).updates()))

    first = asyncio.run(newest())
    assert first.status == status_of(response())
    assert [event.text for event in first.events] == ["worker-0 joined"]
    assert first.at_s > 1.7e9


def test_a_run_that_has_ended_says_how_in_its_sentence() -> None:
    found = response()
    found.state, found.reason = "done", "sync, 64 steps in 8.1 s"
    found.said.extend(["done: sync, 64 steps in 8.1 s", "everything promised is there: 64 steps"])
    found.processes[1].gone, found.processes[1].epoch = True, 1
    said = status_of(found)
    assert said.sentence == "Job digits is done: sync, 64 steps in 8.1 s."
    assert (said.said[1], said.epoch, said.metrics) == (found.said[1], 1, {"loss": 0.5})
    found.state, found.reason = "failed", "worker-0 failed with exit code 1."
    assert status_of(found).sentence == "Job digits has failed: worker-0 failed with exit code 1."


def test_whoever_watches_sees_the_last_state_though_the_coordinator_ends_at_once() -> None:
    """The stream then ends by itself, so that the page asks no more."""

    async def watched() -> list[str]:
        coordinator = Imagined()
        feed = Feed(coordinator.status)
        updates = feed.updates()
        seen = [Update.model_validate_json(await anext(updates)).status.state]
        coordinator.response.state = "done"
        coordinator.response.said.append("done: sync, 64 steps in 8.1 s")
        await feed.look()
        await feed.close()
        return seen + [Update.model_validate_json(update).status.state async for update in updates]

    assert asyncio.run(watched()) == ["training", "done"]


def test_a_stream_ends_with_a_run_though_its_coordinator_stays() -> None:
    async def watched() -> int:
        coordinator = Imagined()
        coordinator.response.said.append("done: sync, 64 steps in 8.1 s")
        return len([update async for update in Feed(coordinator.status).updates()])

    assert asyncio.run(asyncio.wait_for(watched(), 10.0)) == 1
