"""The token of a job on this machine: made for coordinators that only this machine reaches, found by the address."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from paramserver.config import load_settings
from paramserver.config.private import ENV_RUNTIME_DIR
from paramserver.machine.jobs import list_jobs
from paramserver.pki.nearby import point_at_token, share_token, show_token, token_path, token_paths
from paramserver.pki.security import load_security
from paramserver.transport.security.access import Refusal, Security
from paramserver.transport.security.tokens import Tokens

HERE, STANDBY = "127.0.0.1:8790", "localhost:8791"
TOKEN = "a-token-that-the-user-has-named"


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runtime directory of this test; it does not exist yet."""
    monkeypatch.setenv(ENV_RUNTIME_DIR, str(tmp_path / "runtime"))
    return tmp_path / "runtime"


def member(coordinator: str = HERE, **more: object) -> Security:
    """What a worker of this user shows and demands."""
    given = {f"security.{key}": value for key, value in more.items()}
    return load_security(load_settings(overrides={"cluster.coordinator": coordinator, **given}, environ={}), "worker")


def begun(coordinator: Security, job: str, addresses: list[str]) -> str:
    """A coordinator has a token, and listens at these addresses (0: any port, which no member knows)."""
    token = share_token(coordinator, job, addresses)
    show_token(token, [address for address in addresses if not address.endswith(":0")])
    return token


def test_members_find_the_token_of_their_coordinator_by_its_address(directory: Path) -> None:
    coordinator = Security("coordinator")
    token = begun(coordinator, "digits", [HERE])
    assert coordinator.join.accept(token)
    assert isinstance(coordinator.admit("Shard.Release", ()), Refusal)
    for address in (HERE, "localhost:8790", "[::1]:8790"):
        worker = member(address)
        assert coordinator.admit("Shard.Release", worker.metadata("Shard.Release")) is None
    assert not member("127.0.0.1:8799").join
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}


def test_a_member_may_be_there_before_its_coordinator() -> None:
    worker = member()
    assert "authorization" not in dict(worker.metadata("Coordinator.Join"))
    token = begun(Security("coordinator"), "digits", [HERE])
    assert dict(worker.metadata("Coordinator.Join"))["authorization"] == f"Bearer {token}"


def test_a_token_that_is_gone_still_counts_for_who_knows_it() -> None:
    """A server whose coordinator's file was removed would else let everybody in."""
    begun(Security("coordinator"), "digits", [HERE])
    worker = member()
    path = token_path(HERE)
    assert path is not None
    path.unlink()
    worker.join.look()
    assert worker.join
    assert isinstance(worker.admit("Shard.Pull", ()), Refusal)


def test_all_coordinators_of_a_job_have_one_token_also_after_a_restart() -> None:
    first, second, again = Security("coordinator"), Security("coordinator"), Security("coordinator")
    tokens = {begun(first, "digits", [HERE]), begun(second, "digits", ["127.0.0.1:0", STANDBY])}
    assert len(tokens | {begun(again, "digits", [HERE])}) == 1
    assert begun(Security("coordinator"), "another", ["127.0.0.1:8792"]) not in tokens
    assert member(f"{STANDBY}, {HERE}").join.first() in tokens


@pytest.mark.parametrize("address", ["10.0.0.7:8790", "coordinator.example:8790"])
def test_an_address_that_others_reach_takes_a_token_that_its_user_names(address: str) -> None:
    assert token_paths([HERE, address]) == []
    coordinator = Security("coordinator")
    assert begun(coordinator, "digits", [HERE, address]) == ""
    assert not coordinator.join
    assert not member(address).join


def test_whoever_has_named_a_token_or_wants_none_gets_none(tmp_path: Path) -> None:
    begun(Security("coordinator"), "digits", [HERE])
    for coordinator in (Security("coordinator", insecure=True), Security("coordinator", join=Tokens([TOKEN]))):
        assert begun(coordinator, "digits", [HERE]) == ""
        assert not member().join  # its members would show, and demand, the token of an earlier job
    named = tmp_path / "join.token"
    named.touch(mode=0o600)
    named.write_text(TOKEN)
    begun(Security("coordinator"), "digits", [HERE])
    assert member(token_file=str(named)).join.first() == TOKEN


def test_the_link_to_the_token_of_a_run_that_was_killed_is_removed(directory: Path, tmp_path: Path) -> None:
    own = tmp_path / "of-the-run"
    own.touch(mode=0o600)
    own.write_text(TOKEN)
    path = point_at_token(HERE, own)
    assert member().join.first() == TOKEN
    own.unlink()
    assert not member().join
    assert list_jobs() == []
    assert not path.is_symlink()


def test_a_coordinator_whose_port_is_taken_leaves_the_token_of_the_other_job_alone() -> None:
    token = begun(Security("coordinator"), "digits", [HERE])
    late = share_token(Security("coordinator"), "late", [HERE])  # it listens nowhere
    assert late != token
    assert member().join.first() == token
