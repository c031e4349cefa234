"""Who may call what, over real gRPC with real certificates; who is refused hears nothing, the log hears why."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from paramserver import errors
from paramserver.pki import certs
from paramserver.transport.base import METHODS, Caller, MethodKind, caller
from paramserver.transport.grpc import connect, serve
from paramserver.transport.grpcio import grpc
from paramserver.transport.security import access as security_module
from paramserver.transport.security import tls, tokens
from paramserver.transport.security.access import DENIED, LOG_BURST, OPEN, RefusalLog, Security, proof_of
from paramserver.transport.security.policy import ADMIN_METHODS, ANYBODY, CALLERS, ROLES
from paramserver.v1 import coordinator_pb2, shard_pb2
from tests.support.contract.channels import DEADLINE_S, GrpcWires, MemoryWires, Stub, echo, run
from tests.support.contract.requests import ASK, PULL, PUSH, SESSION, STATUS, WANT, T, one_of_each
from tests.support.contract.trust import ADMIN_TOKEN, JOIN, bearer, knock, member, plain, replace_files, stock

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `certs init` makes. Not to be changed."""
    directory = tmp_path_factory.mktemp("trust") / "certs"
    certs.init(directory)
    return directory


@pytest.fixture
def own(home: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(home, tmp_path / "own"))


@pytest.fixture
def log_lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is logged in this test."""
    monkeypatch.setattr(security_module, "_OF_SERVICES", RefusalLog())
    with capture_logs() as lines:
        yield lines


class Everything:
    """Both services; every method notes that it was called, and by whom."""

    def __init__(self) -> None:
        self.called: dict[str, Caller | None] = {}

    def service(self, name: str) -> object:
        methods = {}
        for method in METHODS.values():
            if method.service == name:
                methods[method.handler] = self._streams(method) if self._yields(method.kind) else self._answers(method)
        return Stub(**methods)

    @staticmethod
    def _yields(kind: MethodKind) -> bool:
        return kind in (MethodKind.DOWNLOAD, MethodKind.SESSION)

    def _answers(self, method: Any) -> Any:
        async def answer(request: Any) -> Any:
            self.called[method.name] = caller()
            return method.response()

        return answer

    def _streams(self, method: Any) -> Any:
        async def answer(request: Any) -> AsyncIterator[Any]:
            self.called[method.name] = caller()
            yield b"frame" if method.kind is MethodKind.DOWNLOAD else method.response()

        return answer

    def both(self) -> list[tuple[str, object]]:
        return [("Coordinator", self.service("Coordinator")), ("Shard", self.service("Shard"))]


async def open_server(w: GrpcWires, services: Any, security: Security, **more: Any) -> str:
    server = await serve(services, security=security, **more)
    w.opened.append(server)
    return server.address


# ---- the table


@pytest.mark.parametrize("role", sorted(ROLES))
def test_every_method_is_open_to_the_roles_in_the_table_only(role: str, home: Path, log_lines: list[Any]) -> None:
    """Each role calls every method of both services and shows all tokens, which make nobody an admin."""

    async def test(w: GrpcWires) -> None:
        services = Everything()
        admin = member(home, "admin")
        answers: dict[str, tuple[str, str]] = {}
        names = list(METHODS)
        for first in range(0, len(names), LOG_BURST):  # no server logs more refusals at once
            address = await open_server(w, services.both(), member(home, "coordinator"))
            async with stock(address, home, (home, role)) as channel:
                for name in names[first : first + LOG_BURST]:
                    answers[name] = await knock(channel, name, admin.metadata(name))
        for name, callers in CALLERS.items():
            assert answers[name] == (("OK", "") if role in callers else ("PERMISSION_DENIED", DENIED)), name
        mine = {name for name in METHODS if role in CALLERS[name]}
        assert services.called == {
            name: Caller(frozenset({role}), name in ADMIN_METHODS, proof_of(admin.secret)) for name in mine
        }
        said = {line["call"]: line["reason"] for line in log_lines}
        assert set(said) == set(METHODS) - mine
        assert all(f"a {role} may not call this" in reason for reason in said.values())

    run(GrpcWires, test)


def test_a_certificate_without_a_role_may_call_nothing(own: Path, log_lines: list[Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(certs, "role_uri", lambda role: f"spiffe://elsewhere/{role}")
    certs.renew(own)
    monkeypatch.undo()
    services = Everything()

    async def test(w: GrpcWires) -> None:
        certs.renew(own.parent / "true")
        address = await open_server(w, services.both(), member(own.parent / "true", "coordinator"))
        async with stock(address, own, (own, "worker")) as channel:
            for name in METHODS:
                headers = member(own.parent / "true", "admin").metadata(name)
                assert await knock(channel, name, headers) == ("UNAUTHENTICATED", DENIED)

    shutil.copytree(own, own.parent / "true")
    run(GrpcWires, test)
    assert services.called == {}


@pytest.mark.parametrize("wires", [GrpcWires, MemoryWires], ids=lambda wires: wires.kind)
def test_a_service_knows_its_caller_in_calls_of_all_kinds(wires: Any) -> None:
    services = Everything()

    async def test(w: Any) -> None:
        assert caller() is None
        server = await w.serve(*services.both())
        for call in await one_of_each(w.connect(server.address)):
            await call()

    run(wires, test)
    expected = Caller(ANYBODY, False, proof_of(OPEN.secret)) if wires is GrpcWires else Caller(ROLES, True)
    assert services.called == dict.fromkeys((STATUS, PUSH, PULL, SESSION), expected)


def test_calls_of_all_kinds_are_refused_with_one_sentence(home: Path) -> None:
    async def test(w: GrpcWires) -> None:
        services = Everything()
        address = await open_server(w, services.both(), member(home, "coordinator"))
        nobody = Security("worker", tls.Certificates(home, "worker"))
        channel = connect(address, nobody)
        w.opened.append(channel)
        for call in await one_of_each(channel):
            with pytest.raises(
                errors.DeniedError,
                match=f"at {address}: permission denied; the other side may demand the token",
            ) as caught:
                await call()
            assert caught.value.exit_code == 2
        assert services.called == {}

    run(GrpcWires, test)


# ---- tokens


def test_a_missing_or_wrong_token_is_refused_before_anything_else(log_lines: list[Any]) -> None:
    cases: dict[str, tuple[tuple[str, str], ...]] = {
        "no token": (),
        "wrong token": bearer(JOIN[:-1] + "x"),
        "too short": bearer(JOIN[:-1]),
        "too long": bearer(JOIN + "9"),
        "empty": bearer(""),
        "no bearer": (("authorization", JOIN),),
        "another key": (("x-token", JOIN),),
        "twice": (*bearer(JOIN), *bearer(JOIN)),
        "the admin's": bearer(ADMIN_TOKEN),
    }

    async def test(w: GrpcWires) -> None:
        services = Everything()
        address = await open_server(w, services.both(), plain([JOIN], [ADMIN_TOKEN]))
        async with grpc.aio.insecure_channel(address) as channel:
            for case, headers in cases.items():
                assert await knock(channel, STATUS, headers) == ("UNAUTHENTICATED", DENIED), case
            assert services.called == {}
            assert await knock(channel, STATUS, bearer(JOIN)) == ("OK", "")

    run(GrpcWires, test)
    reasons = [line["reason"] for line in log_lines]
    assert reasons[0] == "no token"
    assert reasons[1:3] == ["wrong token", "wrong token"]
    assert len(reasons) == len(cases)


def test_an_admin_command_takes_the_admin_token_in_addition() -> None:
    async def test(w: GrpcWires) -> None:
        services = Everything()
        guarded = await open_server(w, services.both(), plain([JOIN], [ADMIN_TOKEN]))
        without = await open_server(w, services.both(), plain([JOIN]))
        both = (*bearer(JOIN), ("paramserver-admin", ADMIN_TOKEN))
        wrong = (*bearer(JOIN), ("paramserver-admin", JOIN))
        async with grpc.aio.insecure_channel(guarded) as channel, grpc.aio.insecure_channel(without) as other:
            for name in sorted(ADMIN_METHODS):
                for headers in (bearer(JOIN), wrong, both[1:]):
                    assert await knock(channel, name, headers) == ("UNAUTHENTICATED", DENIED)
                # Who has no admin token of its own can check none.
                assert await knock(other, name, both) == ("PERMISSION_DENIED", DENIED)
            assert services.called == {}
            for name in sorted(ADMIN_METHODS):
                assert await knock(channel, name, both) == ("OK", "")
            assert services.called == dict.fromkeys(ADMIN_METHODS, Caller(ROLES, admin=True, proof=b""))

    run(GrpcWires, test)


def test_our_channel_shows_each_token_where_it_belongs() -> None:
    mine = plain([JOIN, "an-older-token-0123456789"], [ADMIN_TOKEN])
    who = ("paramserver-member", mine.secret.hex())
    assert mine.metadata(STATUS) == (*bearer(JOIN), who)
    for name in ADMIN_METHODS:
        assert mine.metadata(name) == (*bearer(JOIN), ("paramserver-admin", ADMIN_TOKEN), who)
    assert [key for key, _ in Security.open().metadata("Coordinator.Stop")] == ["paramserver-member"]


def test_every_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(b)
        return a == b

    monkeypatch.setattr("hmac.compare_digest", compare)
    accepted = tokens.Tokens([JOIN, ADMIN_TOKEN])
    assert accepted.accept(JOIN)
    assert not accepted.accept("x")
    assert compared == [JOIN.encode(), ADMIN_TOKEN.encode()] * 2


# ---- certificates (J01, J03)

SERVER = """
import asyncio, sys
from pathlib import Path
from tests.support.contract.channels import Stub, echo
from tests.support.contract.trust import member
from paramserver.transport.grpc import serve

async def main():
    server = await serve([("Coordinator", Stub(status=echo))], security=member(Path(sys.argv[1]), sys.argv[2]))
    print(server.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()

asyncio.run(main())
"""


class Elsewhere:
    """A coordinator in a process of its own, whose standard error is its log."""

    def __init__(self, directory: Path, role: str = "coordinator") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(directory), role],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()

    def stop(self) -> str:
        """Its log."""
        _, log = self._process.communicate("", timeout=DEADLINE_S)
        assert self._process.returncode == 0, log
        return log


def test_a_client_without_a_valid_certificate_is_refused_and_the_log_says_why(
    home: Path, own: Path, tmp_path: Path
) -> None:
    """No certificate, one of another authority, one that has expired; then one that is right."""
    certs.init(tmp_path / "foreign")
    certs.renew(own, days=1, now=datetime.now(UTC) - timedelta(days=3))
    server = Elsewhere(home)
    cases = [
        (None, "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        ((tmp_path / "foreign", "worker"), "unable to get local issuer certificate"),
        ((own, "worker"), "certificate has expired"),
    ]
    headers = member(home, "worker").metadata(STATUS)

    async def main() -> None:
        for identity, _ in cases:
            async with stock(server.address, home, identity) as channel:
                code, details = await knock(channel, STATUS, headers)
                assert code == "UNAVAILABLE"
                assert "certificate" not in details
        async with stock(server.address, home, (home, "worker")) as channel:
            assert await knock(channel, STATUS, headers) == ("OK", "")

    asyncio.run(main())
    log = server.stop()
    assert [reason in log for _, reason in cases] == [True] * 3, log


def test_what_our_client_says_when_certificates_do_not_fit(home: Path, own: Path, tmp_path: Path) -> None:
    certs.init(tmp_path / "foreign")
    foreign = tmp_path / "foreign"
    mixed = Path(shutil.copytree(foreign, tmp_path / "mixed"))
    # Trusts both authorities, but is certified by the foreign one.
    (mixed / "ca.crt").write_bytes((foreign / "ca.crt").read_bytes() + (home / "ca.crt").read_bytes())

    async def test(w: GrpcWires) -> None:
        services = [("Coordinator", Stub(status=echo))]
        address = await open_server(w, services, member(home, "coordinator"))
        a_worker = await open_server(w, services, member(home, "worker"))
        bare = await open_server(w, services, Security.open())
        cases = [
            (address, member(mixed, "worker"), "or it refuses this certificate: its log says why"),
            (address, member(foreign, "worker"), "its certificate was not made with the ca.crt that is here"),
            (a_worker, member(home, "worker"), "who answers there has the certificate of another role"),
            (bare, member(home, "worker"), "who answers there speaks no TLS"),
            (address, Security.open(), "or it expects TLS: name the directory with certificates in security.certs"),
        ]
        for where, mine, text in cases:
            channel = connect(where, mine)
            w.opened.append(channel)
            with pytest.raises(errors.UnavailableError, match=text):
                await channel.call(STATUS, ASK, timeout=T)

    run(GrpcWires, test)


def test_a_certificate_out_of_date_is_said_before_anybody_is_called(own: Path) -> None:
    async def attempt(text: str) -> None:
        with pytest.raises(errors.DeniedError, match=text):
            await serve([("Coordinator", Stub())], security=member(own, "coordinator"))
        channel = connect("127.0.0.1:1", member(own, "worker"))
        try:
            with pytest.raises(errors.DeniedError, match=text):
                await channel.call(STATUS, ASK, timeout=T)
        finally:
            await channel.close()

    certs.renew(own, days=1, now=datetime.now(UTC) - timedelta(days=3))
    asyncio.run(attempt(r'/(worker|coordinator)\.crt" expired on .*paramserver certs renew'))
    certs.renew(own, days=9, now=datetime.now(UTC) + timedelta(days=3))
    asyncio.run(attempt(r'/(worker|coordinator)\.crt" is valid only from .* correct the clock'))


def test_a_lost_connection_names_a_certificate_that_has_expired_meanwhile(own: Path, monkeypatch: Any) -> None:
    async def test(w: GrpcWires) -> None:
        server = await serve([("Coordinator", Stub(status=echo))], security=member(own, "coordinator"))
        channel = connect(server.address, member(own, "worker"))
        w.opened.append(channel)
        assert await channel.call(STATUS, ASK, timeout=T)
        await server.stop()
        monkeypatch.setattr(tls.Certificates, "dates_complaint", lambda _: 'certificate "x" expired on monday')
        with pytest.raises(errors.UnavailableError, match='certificate "x" expired on monday'):
            await channel.call(STATUS, ASK, timeout=T)

    run(GrpcWires, test)


# ---- rotation (J20)


async def until(condition: Any) -> None:
    """Repeat an async question until its answer is yes; the test's deadline ends it otherwise."""
    while not await condition():
        await asyncio.sleep(0.05)


def test_certificates_of_a_new_authority_are_taken_up_without_a_restart(own: Path, home: Path, tmp_path: Path) -> None:
    """1. A client of the old authority has a session open. 2. The server's and the client's files are replaced.
    3. New calls work, and whoever has new certificates is let in, alone; the session goes on.
    4. The server starts again, with the new files from the first: the client had taken up its own.
    """
    certs.init(tmp_path / "new")
    mine = Path(shutil.copytree(own, tmp_path / "mine"))

    async def session(requests: AsyncIterator[Any]) -> AsyncIterator[coordinator_pb2.SessionResponse]:
        async for _ in requests:
            yield coordinator_pb2.SessionResponse()

    async def test(w: GrpcWires) -> None:
        both = [("Coordinator", Stub(status=echo, session=session))]
        server = await serve(both, security=member(own, "coordinator"))
        w.opened.append(server)
        address = server.address
        channel = connect(address, member(mine, "worker"))
        w.opened.append(channel)
        steps: asyncio.Queue[coordinator_pb2.SessionRequest] = asyncio.Queue()

        async def requests() -> AsyncIterator[coordinator_pb2.SessionRequest]:
            while True:
                yield await steps.get()

        talk = channel.session(SESSION, requests())
        steps.put_nowait(coordinator_pb2.SessionRequest())
        await anext(talk)
        names = ("ca.crt", "worker.key", "worker.crt", "coordinator.key", "coordinator.crt", "join.token")
        replace_files(own, tmp_path / "new", *names)
        replace_files(mine, tmp_path / "new", *names)

        async def works() -> bool:
            try:
                return bool(await channel.call(STATUS, ASK, timeout=T))
            except (errors.UnavailableError, errors.DeniedError):
                return False

        async def newcomer(directory: Path) -> bool:
            async with stock(address, directory, (directory, "worker")) as other:
                return await knock(other, STATUS, member(directory, "worker").metadata(STATUS)) == ("OK", "")

        await until(lambda: newcomer(tmp_path / "new"))
        await until(works)
        assert not await newcomer(home)
        steps.put_nowait(coordinator_pb2.SessionRequest())
        await anext(talk)
        await talk.aclose()
        assert await works()
        await server.stop()
        await open_server(w, both, member(own, "coordinator"), port=server.port)
        await until(works)

    run(GrpcWires, test)


def test_files_that_do_not_fit_leave_what_was_read_before(own: Path, home: Path, tmp_path: Path) -> None:
    certs.init(tmp_path / "new")
    with capture_logs() as lines:
        used = tls.Certificates(own, "worker")
        before = used.current()
        replace_files(own, tmp_path / "new", "worker.crt")
        used.look()
        assert used.current() is before
        used.look()
        assert used.current() is before
        replace_files(own, tmp_path / "new", "worker.key", "ca.crt")
        used.look()
        assert used.current().key == (tmp_path / "new" / "worker.key").read_bytes()
    said = [line for line in lines if line["log_level"] == "warning"]
    assert [line["event"] for line in said] == ["the certificates stay as they were"]
    assert "is not the key of" in said[0]["reason"]


def test_tokens_are_replaced_without_a_restart(own: Path) -> None:
    """Old; old and new; new alone: as an operator does it, one line at a time."""
    old, new = (own / "join.token").read_text().strip(), "a-new-join-token-0123456789"

    async def test(w: GrpcWires) -> None:
        mine = member(own, "coordinator")
        address = await open_server(w, [("Coordinator", Stub(status=echo))], mine)
        async with stock(address, own, (own, "worker")) as channel:

            async def answers(*accepted: bool) -> None:
                mine.join.look()
                for token, right in zip((old, new), accepted, strict=True):
                    code, _ = await knock(channel, STATUS, bearer(token))
                    assert code == ("OK" if right else "UNAUTHENTICATED")

            await answers(True, False)
            (own / "join.token").write_text(f"{old}\n{new}\n")
            await answers(True, True)
            assert mine.join.first() == old
            (own / "join.token").write_text(f"\n{new}\n")
            await answers(False, True)
            assert mine.join.first() == new
            (own / "join.token").chmod(0o644)
            (own / "join.token").write_text("short\n")
            await answers(False, True)

    with capture_logs() as lines:
        run(GrpcWires, test)
    said = [line["reason"] for line in lines if line["event"] == "the tokens stay as they were"]
    assert len(said) == 1
    assert "chmod 600" in said[0]


# ---- other machines (J05)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_listening_for_other_machines_takes_tls_and_a_token(host: str, home: Path) -> None:
    services = [("Coordinator", Stub(status=echo))]
    tls_alone = Security("coordinator", tls.Certificates(home, "coordinator"))

    async def main() -> None:
        for mine, missing in ((Security.open(), "TLS and a token"), (plain([JOIN]), "TLS"), (tls_alone, "a token")):
            text = f"{missing} (is|are) not configured: .*paramserver certs init.*--insecure"
            with pytest.raises(errors.ConfigError, match=text):
                await serve(services, host, security=mine)
        server = await serve(services, host, security=member(home, "coordinator"))
        await server.stop()

    asyncio.run(main())


def test_insecure_is_said_loudly_and_once() -> None:
    async def main() -> None:
        mine = Security.open(insecure=True)
        first = await serve([("Coordinator", Stub(status=echo))], "0.0.0.0", security=mine)
        second = await serve([("Coordinator", Stub(status=echo))], "0.0.0.0", security=mine)
        await first.stop()
        await second.stop()
        near = await serve([("Coordinator", Stub(status=echo))], security=Security.open(insecure=True))
        await near.stop()

    with capture_logs() as lines:
        asyncio.run(main())
    assert [line["log_level"] for line in lines] == ["warning"]
    assert lines[0]["event"].startswith("INSECURE: listening on 0.0.0.0 without TLS and a token")


def test_connecting_to_other_machines_takes_tls_and_a_token(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number is refused at once, a name at the first call; names of this machine alone are no other machine."""
    found = {"near.test": ["127.0.0.1", "::1"], "far.test": ["127.0.0.1", "192.0.2.7"]}

    async def resolve(_: Any, host: str, *__: Any, **___: Any) -> list[Any]:
        return [(0, 0, 0, "", (address, 0)) for address in found[host]]

    async def test(w: GrpcWires) -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(type(loop), "getaddrinfo", resolve)
        for address in ("192.0.2.7:1", "[2001:db8::1]:1", "[::ffff:192.0.2.7]:1"):
            with pytest.raises(errors.ConfigError, match=r"connecting to .*paramserver certs init.*--insecure"):
                connect(address)
            connect(address, member(home, "worker"))
            connect(address, Security.open(insecure=True))
        far, near = connect("far.test:1"), connect("near.test:1")
        w.opened += [far, near]
        with pytest.raises(errors.ConfigError, match="connecting to far"):
            await far.call(STATUS, ASK, timeout=T)
        with pytest.raises(errors.UnavailableError, match="nobody answers"):
            await near.call(STATUS, ASK, timeout=T)

    run(GrpcWires, test)


def test_a_dead_proxy_in_the_environment_does_not_matter(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)

    async def test(w: GrpcWires) -> None:
        address = await open_server(w, [("Coordinator", Stub(status=echo))], member(home, "coordinator"))
        for where in (address, address.replace("127.0.0.1", "localhost")):
            channel = connect(where, member(home, "worker"))
            w.opened.append(channel)
            assert await channel.call(STATUS, ASK, timeout=T)

    run(GrpcWires, test)


# ---- the log


def test_a_flood_of_refused_calls_is_a_few_lines() -> None:
    async def test(w: GrpcWires) -> None:
        address = await open_server(w, [("Coordinator", Stub())], plain([JOIN]))
        async with grpc.aio.insecure_channel(address) as channel:
            for _ in range(10):
                answers = await asyncio.gather(*(knock(channel, STATUS) for _ in range(50)))
                assert set(answers) == {("UNAUTHENTICATED", DENIED)}

    with capture_logs() as lines:
        run(GrpcWires, test)
    assert 0 < len([line for line in lines if line["event"] == "refused a call"]) <= security_module.LOG_BURST + 3


def test_nothing_secret_is_said(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Canary: tokens and keys, shown rightly, wrongly and damaged, in no log, error or representation."""
    canary = "CANARY-token-0123456789"
    (own / "join.token").write_text(f"{canary}-join\n")
    (own / "admin.token").write_text(f"{canary}-admin\n")
    key = (own / "worker.key").read_text().splitlines()[1]
    said: list[str] = []

    async def test(w: GrpcWires) -> None:
        mine = member(own, "coordinator")
        address = await open_server(w, [("Coordinator", Stub(status=echo))], mine)
        worker = member(own, "worker")
        said.extend([repr(mine), repr(worker), str(vars(mine)), str(worker.join), repr(worker.certificates)])
        assert worker.certificates is not None
        said.append(repr(worker.certificates.current()))
        for shown in (worker, Security("worker", worker.certificates, tokens.Tokens([canary + "-wrong"]))):
            channel = connect(address, shown)
            w.opened.append(channel)
            for method, request in ((STATUS, ASK), ("Coordinator.Drain", coordinator_pb2.DrainRequest())):
                try:
                    await channel.call(method, request, timeout=T)
                except errors.ParamServerError as error:
                    said.append(f"{error!r} {error.__cause__!r} {error.__context__!r}")
        for damage in (lambda text: text + "\n" + canary + " x", lambda text: canary[:10]):
            (own / "join.token").write_text(damage((own / "join.token").read_text()))
            mine.join.look()
            mine.join.first()
            with pytest.raises(errors.ConfigError) as caught:
                member(own, "worker")
            said.append(repr(caught.value))
        text = (own / "worker.key").read_text()
        (own / "worker.key").write_text(text.replace(key, key[:-5] + "@@@@@"))
        with pytest.raises(errors.ConfigError, match="no private key") as caught:
            tls.Certificates(own, "worker")
        said.append(f"{caught.value!r} {caught.value.__cause__!r}")

    with capture_logs() as lines:
        run(GrpcWires, test)
    out, err = capfd.readouterr()
    everything = "\n".join([*said, repr(lines), out, err])
    assert "permission denied" in everything
    assert "refused a call" in everything
    assert "is no token" in everything
    assert canary[:10] not in everything
    assert key[:20] not in everything


# ---- many of them


def test_sixty_four_workers_keep_sessions_and_parked_pulls_open(home: Path) -> None:
    """Far from every limit: each has a session, four parked pulls, and still makes calls."""
    many = 64

    async def test(w: GrpcWires) -> None:
        parked = 0
        everybody = asyncio.Event()

        async def pull(_: Any) -> AsyncIterator[bytes]:
            nonlocal parked
            parked += 1
            await everybody.wait()
            yield b"frame"

        async def session(requests: AsyncIterator[Any]) -> AsyncIterator[coordinator_pb2.SessionResponse]:
            async for _ in requests:
                yield coordinator_pb2.SessionResponse()

        services = [("Coordinator", Stub(status=echo, session=session)), ("Shard", Stub(pull=pull))]
        address = await open_server(w, services, member(home, "coordinator"))
        worker = member(home, "worker")

        async def one() -> None:
            channel = connect(address, worker)
            w.opened.append(channel)

            async def requests() -> AsyncIterator[coordinator_pb2.SessionRequest]:
                yield coordinator_pb2.SessionRequest()
                await everybody.wait()

            async def take() -> None:
                assert [frame async for frame in channel.download(PULL, WANT, timeout=T)] == [b"frame"]

            talk = channel.session(SESSION, requests())
            await anext(talk)
            pulls = [asyncio.ensure_future(take()) for _ in range(4)]
            assert await channel.call(STATUS, ASK, timeout=T)
            await asyncio.gather(*pulls)
            assert [_ async for _ in talk] == []

        workers = [asyncio.ensure_future(one()) for _ in range(many)]
        while parked < 4 * many:
            assert not [task.result() for task in workers if task.done()]
            await asyncio.sleep(0.01)
        everybody.set()
        await asyncio.gather(*workers)

    run(GrpcWires, test)


def test_a_service_that_refuses_a_caller_itself_says_why_in_the_log_only(log_lines: list[Any]) -> None:
    async def push(_: Any) -> shard_pb2.PushResponse:
        raise security_module.deny(PUSH, "a server cannot push")

    async def test(w: GrpcWires) -> None:
        address = await open_server(w, [("Shard", Stub(push=push))], Security.open())
        async with grpc.aio.insecure_channel(address) as channel:
            assert await knock(channel, PUSH) == ("PERMISSION_DENIED", DENIED)

    run(GrpcWires, test)
    assert [(line["call"], line["reason"]) for line in log_lines] == [(PUSH, "a server cannot push")]
