"""`paramserver health` against processes that answer, hang, have died, stand by, or are not ready yet."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paramserver.cli.look.health import health
from paramserver.config import load_settings
from paramserver.config.private import ENV_RUNTIME_DIR
from paramserver.errors import FencedError, NotLeaderError, UnavailableError
from paramserver.machine.health import callable_address
from paramserver.machine.presence import STALE_S, Presence
from paramserver.pki import certs
from paramserver.pki.security import load_security
from paramserver.transport import grpc as grpc_transport
from paramserver.transport.security.access import OPEN, Security
from paramserver.v1 import coordinator_pb2, shard_pb2

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0

# A server process: it answers Stats, beats, and says its pid and address.
SERVER = """
import asyncio
from paramserver.machine.presence import Presence
from paramserver.transport import grpc
from paramserver.v1 import shard_pb2

class Shard:
    async def stats(self, request):
        return shard_pb2.StatsResponse()
    def __getattr__(self, name):
        return None

async def main():
    server = await grpc.serve([("Shard", Shard())])
    presence = Presence.publish("server", "digits", server.address)
    presence.update(name="server-1", ready=True)
    print("here", flush=True)
    while True:
        await asyncio.sleep(0.2)
        presence.update()

asyncio.run(main())
"""


class Stub:
    """Answers one call as it is told to, or raises it; the others are refused."""

    def __init__(self, method: str, answer: object) -> None:
        self.method = method
        self.answer = answer

    def __getattr__(self, name: str) -> Callable[[object], Awaitable[object]]:
        async def handler(_: object) -> object:
            if name != self.method:
                raise UnavailableError(f"the stub has no {name}")
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

        return handler


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("PARAMSERVER_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(ENV_RUNTIME_DIR, str(tmp_path / "runtime"))
    return tmp_path / "runtime"


def with_service(service: str, stub: Stub, use: Callable[[str], Awaitable[None]], security: Security = OPEN) -> None:
    """Run `use` while the stub listens; it gets the address."""

    async def body() -> None:
        server = await grpc_transport.serve([(service, stub)], security=security)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await use(server.address)
        finally:
            await server.stop(0)

    asyncio.run(body())


async def said(capsys: pytest.CaptureFixture[str], **options: object) -> tuple[int, str]:
    """Exit code and output of the command, in a thread of its own, as commands block."""
    code = await asyncio.to_thread(health, **options)  # type: ignore[arg-type]
    return code, capsys.readouterr().out.removesuffix("\n")


def test_no_process_is_unhealthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert health() == 5
    assert "no role process of this user runs here" in capsys.readouterr().out
    assert health(role="server", json_=True) == 5
    assert json.loads(capsys.readouterr().out) == {"healthy": False, "processes": []}


def test_a_server_is_healthy_when_it_answers_and_ready_when_it_has_joined(capsys: pytest.CaptureFixture[str]) -> None:
    async def use(address: str) -> None:
        presence = Presence.publish("server", "digits", address)
        presence.update(state="waiting for the coordinator")
        assert await said(capsys) == (0, f"healthy: server (process {os.getpid()}), waiting for the coordinator")
        code, line = await said(capsys, ready=True)
        assert (code, line) == (5, f"not ready: server (process {os.getpid()}): waiting for the coordinator")
        presence.update(name="server-0", ready=True, state="serving")
        assert await said(capsys, ready=True) == (0, f"healthy: server-0 (process {os.getpid()})")

    with_service("Shard", Stub("stats", shard_pb2.StatsResponse()), use)


def test_all_processes_have_to_be_well_or_those_of_the_role_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    async def use(address: str) -> None:
        Presence.publish("server", "digits", address).update(ready=True)
        Presence.publish("coordinator", "digits", "127.0.0.1:1").update(ready=True)
        code, line = await said(capsys)
        assert code == 5
        assert line.startswith(f"unhealthy: coordinator (process {os.getpid()}) does not answer: ")
        assert "127.0.0.1:1" in line
        assert "server" not in line.split("check that")[0]
        assert (await said(capsys, role="server"))[0] == 0
        code, text = await said(capsys, json_=True)
        facts = json.loads(text)
        assert (code, facts["healthy"]) == (5, False)
        assert [(one["role"], one["healthy"]) for one in facts["processes"]] == [
            ("coordinator", False),
            ("server", True),
        ]

    with_service("Shard", Stub("stats", shard_pb2.StatsResponse()), use)


def test_a_coordinator_that_leads_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    async def use(address: str) -> None:
        # It listens on all addresses: it is called at one of them.
        presence = Presence.publish("coordinator", "digits", address.replace("127.0.0.1", "0.0.0.0"))
        presence.update(ready=True)
        assert (await said(capsys, ready=True))[0] == 0

    with_service("Coordinator", Stub("status", coordinator_pb2.StatusResponse(term=3)), use)


@pytest.mark.parametrize(
    "answer",
    [coordinator_pb2.StatusResponse(term=0), NotLeaderError("ask the other one")],
    ids=["no term", "refused"],
)
def test_a_coordinator_that_stands_by_is_healthy_but_not_ready(
    capsys: pytest.CaptureFixture[str], answer: object
) -> None:
    async def use(address: str) -> None:
        Presence.publish("coordinator", "digits", address).update(ready=True)
        assert (await said(capsys))[0] == 0
        code, line = await said(capsys, ready=True)
        assert code == 5
        assert line.endswith("stands by for another coordinator")

    with_service("Coordinator", Stub("status", answer), use)


def test_a_worker_is_judged_by_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    presence = Presence.publish("worker", "digits", "")
    presence.update(name="worker-2", state="waiting for servers")
    assert health() == 0
    assert health(ready=True) == 5
    presence.update(ready=True)
    assert health(ready=True) == 0
    assert "worker-2" in capsys.readouterr().out


def test_silence_is_unhealthy(capsys: pytest.CaptureFixture[str], runtime: Path) -> None:
    Presence.publish("worker", "digits", "").update(name="worker-2", ready=True)
    (path,) = runtime.iterdir()
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "beat": facts["beat"] - STALE_S - 5.0}))
    assert health() == 5
    line = capsys.readouterr().out
    assert line.startswith(f"unhealthy: worker-2 (process {os.getpid()}) hangs: nothing heard of it for 2")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    certs.init(tmp_path / "certs")
    return tmp_path / "certs"


def secure(directory: Path, role: str) -> Security:
    return load_security(load_settings(overrides={"security.certs": str(directory)}), role)


@pytest.mark.parametrize(
    ("role", "service", "stub"),
    [
        ("coordinator", "Coordinator", Stub("status", coordinator_pb2.StatusResponse(term=1))),
        ("server", "Shard", Stub("stats", shard_pb2.StatsResponse())),
    ],
    ids=["coordinator", "server"],
)
def test_with_tls_it_shows_the_certificate_and_the_token_of_the_process(
    role: str, service: str, stub: Stub, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def use(address: str) -> None:
        open_one = Presence.publish(role, "digits", address)
        assert (await said(capsys))[0] == 5  # whoever comes without is not let in
        open_one.close()
        Presence.publish(role, "digits", address, certs=str(directory)).update(ready=True)
        assert (await said(capsys, ready=True))[0] == 0

    with_service(service, stub, use, secure(directory, role))


def test_a_token_comes_from_its_file_or_the_environment_and_is_not_shown(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    token = (directory / "join.token").rename(tmp_path / "elsewhere").read_text().strip()
    security = load_security(
        load_settings(overrides={"security.certs": str(directory), "security.token_file": str(tmp_path / "elsewhere")}),
        "server",
    )

    async def use(address: str) -> None:
        presence = Presence.publish("server", "digits", address, certs=str(directory))
        code, line = await said(capsys)
        assert (code, "permission denied" in line) == (5, True)
        monkeypatch.setenv("PARAMSERVER_SECURITY__TOKEN", token)
        assert (await said(capsys))[0] == 0
        monkeypatch.delenv("PARAMSERVER_SECURITY__TOKEN")
        presence.close()
        Presence.publish("server", "digits", address, certs=str(directory), token_file="elsewhere")
        code, line = await said(capsys)
        assert code == 0
        assert token not in line
        assert all(token not in path.read_text() for path in runtime.iterdir())

    with_service("Shard", Stub("stats", shard_pb2.StatsResponse()), use, security)


def test_certificates_that_cannot_be_used_are_unhealthy(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def use(address: str) -> None:
        Presence.publish("server", "digits", address, certs=str(directory))
        assert (await said(capsys))[0] == 0
        (directory / "server.key").chmod(0o644)
        code, line = await said(capsys)
        assert (code, "can be read by others" in line) == (5, True)

    with_service("Shard", Stub("stats", shard_pb2.StatsResponse()), use, secure(directory, "server"))


def test_a_server_that_knows_the_job_by_another_name_answers(capsys: pytest.CaptureFixture[str]) -> None:
    async def use(address: str) -> None:
        Presence.publish("server", "", address)
        assert (await said(capsys))[0] == 0

    with_service("Shard", Stub("stats", FencedError("this server belongs to job 'digits'")), use)


@contextmanager
def server_process() -> Iterator[subprocess.Popen[str]]:
    """A server in a process of its own."""
    argv = [sys.executable, "-c", SERVER]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
            yield process
        finally:
            process.kill()


def test_a_killed_server_is_unhealthy_and_then_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    with server_process() as process:
        assert health(ready=True) == 0
        assert capsys.readouterr().out == f"healthy: server-1 (process {process.pid})\n"
        process.kill()
        assert process.wait(10.0) == -signal.SIGKILL
        assert health() == 5
        assert capsys.readouterr().out == f"unhealthy: server-1 (process {process.pid}) has ended without leaving\n"
        assert health() == 5
        assert "no role process" in capsys.readouterr().out


def test_a_server_that_hangs_is_unhealthy_until_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with server_process() as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # it does stand still
        assert health() == 5
        assert f"server-1 (process {process.pid}) does not answer: " in capsys.readouterr().out
        process.send_signal(signal.SIGCONT)
        assert health() == 0


def test_the_command_is_light() -> None:
    """Containers run it every few seconds."""
    code = (
        "import sys\n"
        "from paramserver.cli.look.health import health\n"
        "assert health(ready=True) == 0\n"
        "assert 'paramserver.transport.grpc' in sys.modules\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    with server_process():
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", code], env=environ, timeout=DEADLINE_S, check=True)


@pytest.mark.parametrize(
    ("listens", "called"),
    [
        ("0.0.0.0:8790", "127.0.0.1:8790"),
        ("[::]:8790", "[::1]:8790"),
        ("10.0.0.5:8790", "10.0.0.5:8790"),
        ("[fd00::1]:8790", "[fd00::1]:8790"),
    ],
)
def test_who_listens_everywhere_is_called_on_this_machine(listens: str, called: str) -> None:
    assert callable_address(listens) == called
