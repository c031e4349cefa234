"""Who waits for whom and how long, and who is not let in."""

from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from paramserver.pki import certs
from tests.support.integration.harness import DIGITS, complaint
from tests.support.machines.cluster import PATIENCE_S, SERVERS, TEST_S, WORKERS, Cluster, Site, trust
from tests.support.machines.network import BLACK_HOLE, NOBODY
from tests.support.machines.stranger import ask

pytestmark = pytest.mark.timeout(TEST_S)

JOIN_S = 14  # time to say twice for whom one waits
SOON_S = 10.0


def test_each_says_every_five_seconds_for_whom_it_waits_and_gives_up(site: Site) -> None:
    with Cluster(site, {"cluster.join_timeout_s": JOIN_S}) as cluster:
        coordinator = cluster.coordinator()
        for machine, host in ((SERVERS[0], BLACK_HOLE), (WORKERS[0], NOBODY), (WORKERS[1], BLACK_HOLE)):
            script = ("--", DIGITS) if machine in WORKERS else ()
            cluster.start(
                machine.partition("-")[0],
                machine,
                "--join",
                f"{host}:8790",
                "--set",
                f"cluster.join_timeout_s={JOIN_S}",
                *script,
            )
        for machine, host in ((SERVERS[0], BLACK_HOLE), (WORKERS[0], NOBODY), (WORKERS[1], BLACK_HOLE)):
            done = cluster.processes[machine].wait()
            said = re.findall(rf"waiting for the coordinator at {host}:8790 \((\d+) s\)", done.err)
            assert len(said) >= 2
            assert 5 <= int(said[0]) <= 8
            assert 10 <= int(said[1]) <= 14
            assert f"no coordinator answered at {host}:8790 within {JOIN_S} s" in complaint(done, 3)
        done = coordinator.wait()
        missing = "0/2 servers; missing: server-0, server-1; 0/3 workers; missing: worker-0, worker-1, worker-2"
        assert done.err.count(f"waiting for {missing}") == 2
        assert f"waited {JOIN_S} s (cluster.join_timeout_s): {missing}" in complaint(done, 6)


def test_an_address_at_which_nobody_can_be_reached_is_refused_at_once(site: Site) -> None:
    """One that nobody has, one behind a firewall, one of another machine, and one of this machine only."""
    with Cluster(site) as cluster:
        cluster.coordinator().wait_for("coordinator of job")
        hosts = [NOBODY, BLACK_HOLE, site.network.addresses[WORKERS[0]], "127.0.0.1"]
        for number, host in enumerate(hosts):
            words = ("--join", cluster.join, "--advertise-host", host, "--listen", "0.0.0.0")
            cluster.start("server", SERVERS[number % 2], *words, name=host)
        for host in hosts:
            done = cluster.processes[host].wait()
            text = complaint(done, 2)
            assert f"the coordinator cannot reach the server at {host}:" in text
            assert text.endswith("give another one with --advertise-host")
            assert done.seconds < PATIENCE_S / 2


def test_who_may_not_join_hears_permission_denied_and_the_log_hears_why(site: Site, tmp_path: Path) -> None:
    """Through our own client, which shows what it has."""
    foreign = tmp_path / "foreign"
    certs.init(foreign)
    wrong = trust(tmp_path / "wrong", site.certs, "worker")
    shutil.copy2(foreign / "join.token", wrong / "join.token")
    none = trust(tmp_path / "none", site.certs, "worker")
    (none / "join.token").unlink()
    with Cluster(site) as cluster:
        coordinator = cluster.coordinator()
        coordinator.wait_for("coordinator of job")
        # Without a token our client calls nobody unless it is told to.
        for machine, directory, more in ((WORKERS[0], wrong, ()), (WORKERS[1], none, ("--insecure",))):
            words = ("start", "worker", "--join", cluster.join, "--certs", directory, *more, "--", DIGITS)
            cluster.processes[machine] = site.command(machine, *words)
        for machine in WORKERS[:2]:
            text = complaint(cluster.processes[machine].wait(), 2)
            assert "permission denied" in text
            assert "token" not in text.replace("mend the token or certificate used here", "")
        for reason in ("wrong token", "no token"):
            coordinator.wait_for_err(f"reason='{reason}'", SOON_S)
        status = cluster.status_when("a status", lambda facts: True)
        assert [p["role"] for p in status["processes"]] == ["coordinator"]


def test_a_stranger_is_refused_and_the_log_says_why(site: Site, tmp_path: Path) -> None:
    """Stock gRPC, which checks nothing of its own before it calls."""
    expired = tmp_path / "expired"
    shutil.copytree(site.certs, expired)
    certs.renew(expired, days=1, now=datetime.now(UTC) - timedelta(days=3))
    foreign = tmp_path / "foreign"
    certs.init(foreign)
    right = {"trust": "own", "identity": "own", "token": "right"}
    cases = {
        "no token": {**right, "token": ""},
        "wrong token": {**right, "token": "another-token-0123456789"},
        "a server may not join as a worker": {**right, "identity": str(site.certs), "role": "server"},
        "PEER_DID_NOT_RETURN_A_CERTIFICATE": {**right, "identity": ""},
        "certificate has expired": {**right, "identity": str(expired)},
        "unable to get local issuer certificate": {**right, "identity": str(foreign)},
        "": right,
    }
    with Cluster(site) as cluster:
        coordinator = cluster.coordinator()
        coordinator.wait_for("coordinator of job")
        answers = dict(zip(cases, ask(cluster, WORKERS[0], list(cases.values())), strict=True))
        codes = {reason: answer["code"] for reason, answer in answers.items()}
        in_handshake = ["UNAVAILABLE"] * 3
        assert list(codes.values()) == ["UNAUTHENTICATED", "UNAUTHENTICATED", "PERMISSION_DENIED", *in_handshake, "OK"]
        assert {answers[reason]["details"] for reason in list(cases)[:3]} == {"permission denied"}
        for reason in list(cases)[3:6]:
            assert "certificate" not in answers[reason]["details"].lower()
        for reason in cases:
            coordinator.wait_for_err(reason, SOON_S)
