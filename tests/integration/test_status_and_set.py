"""`paramserver status` and `paramserver set` against a coordinator that answers over gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from paramserver.cli.look.top import Source
from paramserver.cli.main import main
from paramserver.cli.target import NEAR
from paramserver.config import load_settings
from paramserver.config.private import ENV_RUNTIME_DIR
from paramserver.errors import ConfigError, UnavailableError
from paramserver.machine.jobs import Job, publish_job
from paramserver.pki.security import load_security
from paramserver.processes.alive import process_birth
from paramserver.transport import grpc as grpc_transport
from paramserver.transport.security.access import Security
from paramserver.transport.security.tokens import Tokens
from paramserver.v1 import coordinator_pb2, types_pb2

TOKEN = "of-the-operators-of-this-job"


class FakeCoordinator:
    """Knows one job in synchronous mode and takes any change of consistency but staleness 13."""

    def __init__(self) -> None:
        self.changes: list[coordinator_pb2.ChangeConsistencyRequest] = []

    async def status(self, request: coordinator_pb2.StatusRequest) -> coordinator_pb2.StatusResponse:
        return coordinator_pb2.StatusResponse(
            job="digits",
            state="training",
            term=1,
            view=types_pb2.View(
                generation=3,
                state=types_pb2.JOB_STATE_RUNNING,
                consistency=types_pb2.Consistency(revision=1, mode=types_pb2.MODE_SYNC),
            ),
            processes=[coordinator_pb2.ProcessStatus(role="worker", name="worker-0", pid=5, version=17)],
        )

    async def set_consistency(
        self, request: coordinator_pb2.ChangeConsistencyRequest
    ) -> coordinator_pb2.ChangeConsistencyResponse:
        self.changes.append(request)
        if request.staleness == 13:
            raise ConfigError("thirteen is refused")
        consistency = types_pb2.Consistency(revision=2, mode=request.mode, from_version=20)
        if request.HasField("staleness"):
            consistency.staleness = request.staleness
        return coordinator_pb2.ChangeConsistencyResponse(consistency=consistency)

    def __getattr__(self, method: str) -> Callable[..., Awaitable[None]]:
        async def refuse(*_: object) -> None:
            raise ConfigError(f"the fake has no {method}")

        return refuse


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(ENV_RUNTIME_DIR, str(tmp_path / "runtime"))


def with_job(use: Callable[[FakeCoordinator], Awaitable[None]]) -> None:
    """Run `use` while a job is published whose coordinator is a fake."""

    async def body() -> None:
        coordinator = FakeCoordinator()
        security = Security(admin=Tokens([TOKEN]))
        server = await grpc_transport.serve([("Coordinator", coordinator)], security=security)
        try:
            pid = os.getpid()
            publish_job(Job("digits", server.address, pid, started=0.0, birth=process_birth(pid), admin_token=TOKEN))
            async with asyncio.timeout(60):
                await use(coordinator)
        finally:
            await server.stop(0)

    asyncio.run(body())


def command(*tokens: str) -> Awaitable[int]:
    """A command, in a thread of its own, as commands block."""
    return asyncio.to_thread(main, tokens)


def test_status_finds_the_job_and_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    async def use(_: FakeCoordinator) -> None:
        assert await command("status", "--json") == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["job"], facts["state"], facts["mode"], facts["staleness"]) == ("digits", "training", "sync", None)
        assert facts["processes"][0]["version"] == 17
        assert await command("status", "--job", "digits") == 0
        assert "worker-0" in capsys.readouterr().out
        assert await command("status", "--job", "letters") == 3
        assert "running: digits" in capsys.readouterr().err

    with_job(use)


def test_set_sends_the_wish_and_prints_what_is_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    async def use(coordinator: FakeCoordinator) -> None:
        assert await command("set", "consistency.mode=async", "--staleness", "4") == 0
        assert capsys.readouterr().out == "digits: mode async, staleness 4, from version 20 on\n"
        (change,) = coordinator.changes
        assert (change.mode, change.staleness) == (types_pb2.MODE_ASYNC, 4)

    with_job(use)


def test_refusal_of_the_coordinator_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def use(_: FakeCoordinator) -> None:
        assert await command("set", "consistency.mode=async", "--staleness", "13") == 2
        assert capsys.readouterr().err == "paramserver: error: thirteen is refused\n"

    with_job(use)


def test_coordinator_that_does_not_answer_is_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    async def use(_: FakeCoordinator) -> None:
        pass

    with_job(use)
    coordinator = json.loads(Path("runtime/digits.json").read_text())["coordinator"]
    assert main(["status"]) == 3
    err = capsys.readouterr().err
    assert err.startswith("paramserver: error: ")
    assert coordinator in err
    assert err.count("\n") == 1


def test_top_finds_the_job_again_when_its_coordinator_has_another_address() -> None:
    async def body() -> None:
        source = Source(NEAR)
        with pytest.raises(UnavailableError, match="no job runs on this machine"):
            await source.ask()
        for _ in range(2):
            server = await grpc_transport.serve([("Coordinator", FakeCoordinator())])
            pid = os.getpid()
            publish_job(Job("digits", server.address, pid, started=0.0, birth=process_birth(pid)))
            assert [process.name for process in (await source.ask()).processes] == ["worker-0"]
            await server.stop(0)
            with pytest.raises(UnavailableError, match="nobody answers"):
                await source.ask()
        await source.close()

    asyncio.run(asyncio.wait_for(body(), 60.0))


def test_a_failed_handshake_is_one_sentence() -> None:
    """gRPC itself writes nothing about it where the command was typed."""
    assert [main(["certs", "init", name]) for name in ("certs", "others")] == [0, 0]
    security = load_security(load_settings(overrides={"security.certs": "certs"}), "coordinator")

    async def body() -> str:
        server = await grpc_transport.serve([("Coordinator", FakeCoordinator())], security=security)
        try:
            argv = ["-m", "paramserver", "status", "--coordinator", server.address, "--certs", "others"]
            process = await asyncio.create_subprocess_exec(sys.executable, *argv, stderr=asyncio.subprocess.PIPE)
            _, err = await process.communicate()
            assert process.returncode == 3
            return err.decode()
        finally:
            await server.stop(0)

    err = asyncio.run(asyncio.wait_for(body(), 60.0))
    assert err.startswith("paramserver: error: Coordinator.Status at 127.0.0.1:")
    assert err.count("\n") == 1, err
