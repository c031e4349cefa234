"""The table of roles and methods, and what a caller shows, without a network."""

from __future__ import annotations

import ast
import asyncio
import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from paramserver import config, errors
from paramserver.transport.addresses import host_of, loopback, resolves_to_loopback
from paramserver.transport.base import METHODS, Caller
from paramserver.transport.failures import connection_hint
from paramserver.transport.security import files, policy, tokens
from paramserver.transport.security.access import Refusal, RefusalLog, Security
from paramserver.transport.security.policy import ADMIN_METHODS, ANYBODY, CALLERS, ROLES
from paramserver.transport.security.tls import role_of, role_uri
from paramserver.transport.security.tokens import Tokens

JOIN = "a-join-token-for-tests-0123456789"


def test_every_method_of_every_service_is_in_the_table_and_nothing_else() -> None:
    assert set(CALLERS) == set(METHODS)
    for method, callers in CALLERS.items():
        assert callers, f"nobody may call {method}"
        assert callers <= ROLES


def test_what_changes_a_job_is_for_admins_alone() -> None:
    names = ("SetConsistency", "Drain", "Scale", "Stop", "Checkpoint", "Trace")
    assert {f"Coordinator.{name}" for name in names} == ADMIN_METHODS


def test_workers_and_servers_may_not_do_what_the_coordinator_does() -> None:
    for method in ("Configure", "Activate", "SetMembers", "SetConsistency", "Counted"):
        assert CALLERS[f"Shard.{method}"] == {policy.COORDINATOR}


def test_the_table_takes_the_standard_library_only() -> None:
    assert policy.__file__ is not None
    for node in ast.walk(ast.parse(Path(policy.__file__).read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.module in ("__future__", "collections.abc")
        assert not isinstance(node, ast.Import)


@pytest.mark.parametrize(
    ("uris", "role"),
    [
        ([role_uri("worker")], "worker"),
        (["https://example.org", role_uri("admin")], "admin"),
        ([role_uri("worker"), role_uri("admin")], ""),
        ([role_uri("root")], ""),
        (["paramserver://role/"], ""),
        (["spiffe://cluster/worker"], ""),
        (["x" + role_uri("worker")], ""),
        ([], ""),
    ],
)
def test_a_certificate_has_the_one_role_that_it_names(uris: list[str], role: str) -> None:
    assert role_of({"peer_uri": [uri.encode() for uri in uris], "x509_common_name": [b"admin"]}) == role
    assert role_of({}) == ""


def test_without_certificates_everybody_is_taken_for_any_role_but_admin() -> None:
    def nothing() -> Mapping[str, list[bytes]]:
        raise AssertionError("there is no certificate to look at")

    open_ = Security.open()
    for method in METHODS:
        if method in ADMIN_METHODS:
            assert isinstance(open_.admit(method, ()), Refusal)
        else:
            assert open_.admit(method, ()) is None
            assert open_.identify(method, nothing) == Caller(ANYBODY, False, b"")


def test_a_key_that_comes_twice_counts_for_nothing() -> None:
    mine = Security(join=Tokens([JOIN]))
    good = ("authorization", f"Bearer {JOIN}")
    assert mine.admit("Coordinator.Join", [good]) is None
    assert mine.admit("Coordinator.Join", [good, good]) == Refusal("no token", unknown=True)
    assert mine.admit("Coordinator.Join", [("authorization", b"Bearer \xff")]) == Refusal("wrong token", unknown=True)


# ---- tokens


def test_the_shortest_token_is_the_same_for_settings_and_files() -> None:
    assert tokens.MIN_TOKEN_CHARS == config.MIN_TOKEN_CHARS


@pytest.mark.parametrize(
    "token", ["", "short", "with a space in the middle", "tabs\tare-no-better-than", "größer-als-16-zeichen"]
)
def test_what_is_no_token_is_refused_without_showing_it(token: str, tmp_path: Path) -> None:
    path = tmp_path / "join.token"
    path.write_text(f"{JOIN}\n{token}x\n")
    path.chmod(0o600)
    with pytest.raises(errors.ConfigError, match=f'line 2 of token file "{path}" is no token') as caught:
        Tokens(path=path)
    assert not token or token not in str(caught.value)


def test_a_file_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "join.token"
    with pytest.raises(errors.ConfigError, match="cannot be read: no such file"):
        Tokens(path=path)
    path.write_text("\n \n")
    path.chmod(0o600)
    with pytest.raises(errors.ConfigError, match="is empty; write a token into it"):
        Tokens(path=path)
    path.write_bytes(b"x" * (files.MAX_FILE_BYTES + 1))
    with pytest.raises(errors.ConfigError, match="it has more than"):
        Tokens(path=path)
    path.write_text(f"  {JOIN}\r\n\nanother-token-0123456789")
    found = Tokens(path=path)
    assert found.first() == JOIN
    assert [found.accept(token) for token in (JOIN, "another-token-0123456789", JOIN + "x", "")] == [
        True,
        True,
        False,
        False,
    ]
    assert not Tokens()
    assert Tokens().first() == ""
    assert not Tokens().accept("")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o620])
def test_a_file_that_others_can_read_is_refused_with_the_remedy(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "join.token"
    path.write_text(JOIN)
    path.chmod(mode)
    with pytest.raises(errors.ConfigError, match=f'run: chmod 600 "{path}"'):
        Tokens(path=path)


def test_a_file_of_root_may_be_readable_by_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How Kubernetes gives a secret to a process that is not root."""
    path = tmp_path / "join.token"
    path.write_text(JOIN)
    real = Path.stat

    def stat_of_root(self: Path, **kwargs: bool) -> object:
        found = real(self, **kwargs)
        return type("Stat", (), {**{k: getattr(found, k) for k in dir(found) if k.startswith("st_")}, "st_uid": 0})

    monkeypatch.setattr("os.geteuid", lambda: 10001)
    monkeypatch.setattr(Path, "stat", stat_of_root)
    path.chmod(0o440)
    assert files.read_secret(path, "file") == JOIN.encode()
    for mode in (0o460, 0o444):
        path.chmod(mode)
        with pytest.raises(errors.ConfigError, match="chmod 600"):
            files.read_secret(path, "file")


# ---- addresses


@pytest.mark.parametrize(
    ("address", "near"),
    [
        ("127.0.0.1:1", True),
        ("127.8.9.10:1", True),
        ("[::1]:1", True),
        ("[::ffff:127.0.0.1]:1", True),
        ("localhost:1", True),
        ("db.localhost:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("[fe80::1%eth0]:1", False),
        ("[::ffff:10.0.0.1]:1", False),
        (":1", False),
        ("coordinator:1", None),
        ("127.0.0.1%.evil:1", None),
    ],
)
def test_which_addresses_are_of_this_machine_alone(address: str, near: bool | None) -> None:
    assert loopback(host_of(address)) is near


@pytest.mark.parametrize(
    ("found", "near"),
    [(["127.0.0.1", "::1"], True), (["127.0.0.1", "10.0.0.1"], False), (["::1", "fe80::1%eth0"], False), ([], False)],
)
def test_a_name_is_near_if_all_its_addresses_are(found: list[str], near: bool) -> None:
    async def main() -> bool:
        async def resolve(*_: object, **__: object) -> list[object]:
            return [(0, 0, 0, "", (address, 0)) for address in found]

        loop = asyncio.get_running_loop()
        loop.getaddrinfo = resolve  # type: ignore[method-assign,assignment]
        return await resolves_to_loopback("machine.test")

    assert asyncio.run(main()) is near


# ---- what is said


def test_a_flood_becomes_a_few_lines_that_count_the_rest() -> None:
    """100 seconds, a thousand refused calls in each."""
    milliseconds = itertools.count()
    with capture_logs() as lines:
        refusals = RefusalLog(burst=5, every_s=10.0, clock=lambda: next(milliseconds) / 1000)
        for _ in range(100_000):
            refusals.say("Coordinator.Join", "ipv4:10.0.0.9:1", "no token")
    assert 5 + 9 <= len(lines) <= 5 + 10
    assert sum(1 + line.get("others", 0) for line in lines) > 85_000


@pytest.mark.parametrize(
    ("details", "tls", "ever", "part"),
    [
        ("Socket closed", True, True, "refuses this certificate"),
        ("Socket closed", False, False, "it expects TLS"),
        ("Socket closed", False, True, ""),
        ("Connection refused", True, False, ""),
        ("Connection refused", False, False, ""),
        (
            "SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: certificate has expired",
            True,
            False,
            "has expired",
        ),
    ],
)
def test_a_failed_connection_hints_at_its_cause(details: str, tls: bool, ever: bool, part: str) -> None:
    hint = connection_hint(details, tls, ever)
    assert part in hint
    assert bool(part) == bool(hint)
