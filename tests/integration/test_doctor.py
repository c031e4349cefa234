"""`paramserver doctor` against coordinators, ports, stores and a torch that are not as they should be."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from paramserver.config import Settings, load_settings
from paramserver.config.private import ENV_RUNTIME_DIR
from paramserver.doctor import look_at_coordinator, storage, with_running_job
from paramserver.doctor.finding import Finding, Level
from paramserver.doctor.machine import check_meeting
from paramserver.doctor.software import check_import, try_imports
from paramserver.errors import ConfigError, NotLeaderError, ParamServerError
from paramserver.machine import hosts
from paramserver.machine.jobs import Job, publish_job
from paramserver.membership.joining import versions
from paramserver.pki import certs
from paramserver.pki.security import load_security
from paramserver.processes.alive import process_birth
from paramserver.transport import bulk as bulk_transport
from paramserver.transport import grpc as grpc_transport
from paramserver.transport.grpc import connector
from paramserver.transport.security.access import OPEN, Security
from paramserver.v1 import coordinator_pb2, shard_pb2
from paramserver.wire.messages import PROTOCOL
from tests.support.contract.channels import Offering, Stub
from tests.support.contract.redis_servers import RedisServer, programs, serving
from tests.support.integration.harness import Place, place_fixture

DEADLINE_S = 60.0

place = pytest.fixture(place_fixture)


class StubCoordinator:
    """Answers probes as a coordinator does: it calls back. `error` is raised instead; `blind`: it reaches nobody.

    ``walled``: the sockets of its server for weights and gradients cannot be reached.
    """

    def __init__(self, security: Security = OPEN, of_server: Security = OPEN) -> None:
        self.security, self.of_server = security, of_server
        self.error: ParamServerError | None = None
        self.blind = self.walled = False
        self.server = ""
        self.credulous = False
        self.offset_s = 0.0
        self.versions = versions()
        self.called_back: list[str] = []

    async def probe(self, request: coordinator_pb2.ProbeRequest) -> coordinator_pb2.ProbeResponse:
        if self.error is not None:
            raise self.error
        response = coordinator_pb2.ProbeResponse(
            wall_time_s=time.time() + self.offset_s, protocol=PROTOCOL, versions=self.versions
        )
        if request.address and self.credulous:
            response.reached = True
        elif request.address:
            self.called_back.append(request.address)
            channel = connector(self.security, "server")("127.0.0.1:1" if self.blind else request.address)
            try:
                await channel.call("Shard.Stats", shard_pb2.StatsRequest(job="digits"), timeout=5.0)
                response.reached = True
            except ParamServerError as error:
                response.reason = str(error)
            finally:
                await channel.close()
        return response

    async def status(self, _: coordinator_pb2.StatusRequest) -> coordinator_pb2.StatusResponse:
        server = coordinator_pb2.ProcessStatus(role="server", name="server-0", address=self.server)
        return coordinator_pb2.StatusResponse(processes=[server])

    @asynccontextmanager
    async def a_server(self) -> AsyncIterator[None]:
        """While the job has a server."""
        shard = Stub()
        bulk = await bulk_transport.serve([("Shard", shard)], security=self.of_server)
        main = await grpc_transport.serve([("Shard", Offering(shard, bulk))], security=self.of_server)
        self.server = main.address
        if self.walled:
            await bulk.stop()
        try:
            yield
        finally:
            await main.stop()
            await bulk.stop()

    def __getattr__(self, method: str) -> Callable[..., Awaitable[None]]:
        async def refuse(*_: object) -> None:
            raise ConfigError(f"the stub has no {method}")

        return refuse


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PARAMSERVER_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(ENV_RUNTIME_DIR, str(tmp_path / "runtime"))


def settings_for(address: str, **more: object) -> Settings:
    overrides = {key.replace("__", "."): value for key, value in more.items()}
    return load_settings(overrides={"cluster.coordinator": address, **overrides}, environ={})


def examine(stub: StubCoordinator, **more: object) -> dict[str, Finding]:
    """What doctor finds while the stub listens, by check."""

    async def body() -> list[Finding]:
        server = await grpc_transport.serve([("Coordinator", stub)], security=stub.security)
        try:
            async with asyncio.timeout(DEADLINE_S), stub.a_server():
                return await look_at_coordinator(settings_for(server.address, **more))
        finally:
            await server.stop()

    findings = asyncio.run(body())
    assert len({finding.check for finding in findings}) == len(findings)
    return {finding.check: finding for finding in findings}


def levels(findings: dict[str, Finding]) -> dict[str, Level]:
    return {check: finding.level for check, finding in findings.items()}


ALL_WELL = dict.fromkeys(["listen", "coordinator", "versions", "clock", "transport", "way back"], Level.OK)


def test_there_and_back() -> None:
    stub = StubCoordinator()
    found = examine(stub)
    assert levels(found) == ALL_WELL
    (here,) = stub.called_back
    assert here.startswith("127.0.0.1:")
    assert found["way back"].value == f"the coordinator reaches this machine at {here}"
    assert "in use by paramserver" in found["listen"].value


def test_no_way_back() -> None:
    stub = StubCoordinator()
    stub.blind = True
    found = examine(stub)
    assert levels(found) == {**ALL_WELL, "way back": Level.WARN}
    assert f"does not reach {stub.called_back[0]}" in found["way back"].value
    assert found["way back"].remedy.startswith("open this machine's ports")


def test_somebody_else_at_our_address() -> None:
    stub = StubCoordinator()
    stub.credulous = True
    found = examine(stub)["way back"]
    assert (found.level, "another process answered" in found.value) == (Level.WARN, True)
    assert "--advertise-host" in found.remedy


def test_the_advertised_host_is_the_one_that_is_called() -> None:
    stub = StubCoordinator()
    assert examine(stub, cluster__advertise_host="localhost")["way back"].level is Level.OK
    assert stub.called_back[0].startswith("localhost:")


def test_sockets_that_cannot_be_reached() -> None:
    stub = StubCoordinator()
    stub.walled = True
    found = examine(stub)
    assert levels(found) == {**ALL_WELL, "transport": Level.WARN}
    assert "no sockets beside gRPC to server-0: port" in found["transport"].value
    assert "cluster.bulk_port" in found["transport"].remedy


def test_other_versions_and_another_time() -> None:
    stub = StubCoordinator()
    stub.versions = {**versions(), "torch": "1.0.0"}
    stub.offset_s = 100.0
    found = examine(stub)
    assert levels(found) == {**ALL_WELL, "versions": Level.WARN, "clock": Level.WARN}
    assert "1.0.0" in found["versions"].value.splitlines()[-1]
    assert re.search(r"the coordinator's is \+(99|100)\.", found["clock"].value)


def test_a_coordinator_that_stands_by_is_not_asked_more() -> None:
    stub = StubCoordinator()
    stub.error = NotLeaderError("ask the other one")
    found = examine(stub)
    assert levels(found) == {"listen": Level.OK, "coordinator": Level.WARN}
    assert "stands by" in found["coordinator"].value


def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens, and nobody else can
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        findings = asyncio.run(look_at_coordinator(settings_for(address)))
    listen, coordinator = findings
    assert coordinator.level is Level.FAIL
    assert address in coordinator.value
    assert coordinator.remedy.startswith("start it there (paramserver start coordinator)")
    assert (listen.check, listen.level) == ("listen", Level.NOTE)
    assert listen.value.endswith("in use, but not by a coordinator that answers us")


def test_a_port_to_listen_on_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        listen, _ = asyncio.run(look_at_coordinator(settings_for("", cluster__listen=f"127.0.0.1:{port}")))
    assert (listen.level, listen.value) == (Level.FAIL, f"port {port} on 127.0.0.1 is in use")
    assert listen.remedy == "stop the process that has it, or choose another port"


def test_none_configured_and_the_usual_port_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(hosts, "DEFAULT_PORT", port)
        listen, coordinator = asyncio.run(look_at_coordinator(settings_for("")))
    assert (listen.level, coordinator.level) == (Level.NOTE, Level.NOTE)
    assert listen.value == f"the usual port of a coordinator, {port}, is taken"
    assert "--listen" in listen.remedy
    assert "--coordinator" in coordinator.value


def test_an_address_that_is_not_of_this_machine() -> None:
    settings = settings_for("", cluster__listen="192.0.2.7:8790")
    listen, _ = asyncio.run(look_at_coordinator(settings))
    assert listen.level is Level.FAIL
    assert "192.0.2.7" in listen.value
    assert listen.remedy


def test_the_job_that_runs_here_is_the_one_to_ask() -> None:
    pid = os.getpid()
    assert with_running_job(settings_for("")) == settings_for("")
    publish_job(Job("digits", "127.0.0.1:8790", pid, 0.0, process_birth(pid), certs="/certs"))
    found = with_running_job(settings_for(""))
    assert (found.cluster.coordinator, found.security.certs) == ("127.0.0.1:8790", "/certs")
    assert with_running_job(settings_for("h:1")) == settings_for("h:1")
    publish_job(Job("letters", "127.0.0.1:8791", pid, 0.0, process_birth(pid)))
    assert with_running_job(settings_for("")).cluster.coordinator == ""


# ---- with TLS


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    certs.init(tmp_path / "certs")
    return tmp_path / "certs"


def secure_stub(directory: Path) -> StubCoordinator:
    settings = settings_for("", security__certs=str(directory))
    return StubCoordinator(load_security(settings, "coordinator"), load_security(settings, "server"))


def copy_of(directory: Path, *names: str) -> str:
    """What another machine has got of the certificates."""
    other = directory.parent / "other"
    other.mkdir(mode=0o700)
    for name in names:
        shutil.copy2(directory / name, other / name)
    return str(other)


def test_there_and_back_with_a_servers_certificate(directory: Path) -> None:
    here = copy_of(directory, "ca.crt", "server.crt", "server.key", "join.token")
    assert levels(examine(secure_stub(directory), security__certs=here)) == ALL_WELL


def test_a_worker_is_not_called_back(directory: Path) -> None:
    here = copy_of(directory, "ca.crt", "worker.crt", "worker.key", "join.token")
    stub = secure_stub(directory)
    found = examine(stub, security__certs=here)
    assert levels(found) == {**ALL_WELL, "way back": Level.NOTE}
    assert stub.called_back == []


def test_a_wrong_token_is_a_failure_that_says_what_to_look_at(directory: Path) -> None:
    here = copy_of(directory, "ca.crt", "worker.crt", "worker.key")
    (Path(here) / "join.token").write_text("hunter2-hunter2-hunter2")
    (Path(here) / "join.token").chmod(0o600)
    found = examine(secure_stub(directory), security__certs=here)
    assert list(levels(found).values()) == [Level.OK, Level.FAIL]
    assert "permission denied" in found["coordinator"].value
    assert "security.token_file" in found["coordinator"].remedy
    assert "hunter2" not in str(found)


def test_certificates_of_another_authority(directory: Path, tmp_path: Path) -> None:
    certs.init(tmp_path / "foreign")
    found = examine(secure_stub(directory), security__certs=str(tmp_path / "foreign"))
    assert found["coordinator"].level is Level.FAIL
    assert found["coordinator"].remedy


def test_no_tls_to_a_coordinator_with_tls(directory: Path) -> None:
    found = examine(secure_stub(directory))
    assert found["coordinator"].level is Level.FAIL
    assert "TLS" in found["coordinator"].remedy


def test_certificates_that_cannot_be_used(directory: Path) -> None:
    (directory / "server.key").chmod(0o644)
    listen, coordinator = asyncio.run(look_at_coordinator(settings_for("127.0.0.1:1", security__certs=str(directory))))
    assert coordinator.level is Level.FAIL
    assert "can be read by others" in coordinator.value
    assert listen.check == "listen"


# ---- the store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with serving(next(iter(programs().values())), tmp_path_factory.mktemp("store")) as running:
        yield running


def store_findings(url: str) -> list[Finding]:
    settings = load_settings(overrides={"cluster.store": url}, environ={})
    return asyncio.run(storage.look_at_store(settings))


def test_a_store_and_its_policy(store: RedisServer) -> None:
    found = store_findings(store.url)[0]
    assert (found.check, found.level) == ("store", Level.OK)
    assert "writes every change to disk" in found.value
    with store.restored():
        store.command("CONFIG", "SET", "maxmemory", "100mb")
        store.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        refused = store_findings(store.url)[0]
    assert refused.level is Level.FAIL
    assert "allkeys-lru" in refused.value
    assert refused.remedy == "set maxmemory-policy noeviction"


def test_a_wrong_password_and_a_store_that_is_away(store: RedisServer, tmp_path: Path) -> None:
    (found,) = store_findings(f"unix://paramserver:hunter2@{store.socket}")
    assert found.level is Level.FAIL
    assert found.remedy
    assert "hunter2" not in str(found)
    (found,) = store_findings(f"unix://{tmp_path}/nothing")
    assert (found.level, bool(found.remedy)) == (Level.FAIL, True)


# ---- torch, in a process of its own


def test_a_torch_that_crashes_does_not_take_doctor_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(f"import os\nos.kill(os.getpid(), {int(signal.SIGSEGV)})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = check_import("torch", try_imports()["torch"])
    assert found.level is Level.FAIL
    assert "SIGSEGV" in found.value


def test_a_torch_that_fails_to_load_is_told_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("print('noise')\nraise OSError('libcudart.so.13 is missing')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = try_imports()
    assert check_import("torch", found["torch"]).value == "OSError: libcudart.so.13 is missing"
    assert check_import("paramserver", found["paramserver"]).level is Level.OK


def test_a_torch_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import signal\nwhile True:\n    signal.pause()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = check_import("torch", try_imports(timeout_s=2.0)["torch"])
    assert (found.level, found.value) == (Level.FAIL, "not done after 2 s")


# ---- the whole command


def test_the_whole_report(place: Place, tmp_path: Path) -> None:
    canary = "canary-hunter2-canary"
    environ = {
        "http_proxy": f"http://me:{canary}@proxy.example:3128",
        "PARAMSERVER_CLUSTER__STORE": f"unix://me:{canary}@{tmp_path}/nothing",
        "PARAMSERVER_SECURITY__TOKEN": canary,
        "PARAMSERVER_CONSISTENCI__MODE": canary,
    }
    done = place.paramserver("doctor", "--json", "--coordinator", "127.0.0.1:1", environ=environ)
    findings = json.loads(done.check(1).out)
    assert canary not in done.said
    assert "Traceback" not in done.said
    by_check = {finding["check"]: finding for finding in findings}
    for check, level in {
        "python": "ok",
        "packages": "ok",
        "import paramserver": "ok",
        "import torch": "ok",
        "variables": "fail",
        "configuration": "ok",
        "proxies": "note",
        "join token": "ok",
        "coordinator": "fail",
        "store": "fail",
    }.items():
        assert by_check[check]["level"] == level, by_check[check]
    assert "not looked at" not in by_check["kernels"]["value"], by_check["kernels"]
    for finding in findings:
        assert list(finding) == ["check", "level", "value", "remedy"]
        assert finding["value"]
        assert finding["remedy"] or finding["level"] in ("ok", "note"), finding
    plain = place.paramserver("doctor", "--coordinator", "127.0.0.1:1", environ=environ).check(1)
    assert len(plain.out.splitlines()) == len(findings) + 1
    assert canary not in plain.said


def test_exit_code_0_only_when_all_is_well(place: Place) -> None:
    done = place.paramserver("doctor", "--json")
    findings = json.loads(done.out)
    bad = [finding for finding in findings if finding["level"] in ("warn", "fail")]
    assert done.code == (1 if bad else 0)
    # What this machine may lack is no matter of the program; the rest has to be well.
    assert {finding["check"] for finding in bad} <= {"cpu", "limits", "gpu", "open files", "/dev/shm"}, bad


def test_doctor_itself_loads_no_torch(place: Place) -> None:
    code = (
        "import sys\n"
        "from paramserver.cli.prepare.doctor import doctor\n"
        "doctor(json_=True)\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
    )
    place.start(sys.executable, "-c", code).wait().check()


def test_the_place_to_meet() -> None:
    assert "workers here pull once" in check_meeting(Path("/dev/shm"), True).value
    assert "each worker here pulls by itself" in check_meeting(Path("/dev/shm"), False).value
    missing = check_meeting(Path("/nowhere/missing"), True)  # short, as the path of a socket must be
    assert missing.level is Level.WARN
    assert missing.value == "/nowhere/missing cannot be used (cluster.meeting_dir): No such file or directory"
    assert "volume" in missing.remedy
