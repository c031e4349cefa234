"""A whole job over TLS with tokens and a store with a password: it trains, and no secret shows anywhere."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.integration.harness import complaint, read_summary
from tests.support.integration.roles import Cluster, cluster_fixture, reference, same_result

SCRIPT = ("--epochs", "3")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    yield from cluster_fixture()


def make_certs(cluster: Cluster) -> Path:
    certs = cluster.place.work / "certs"
    cluster.place.paramserver("certs", "init", certs).check()
    return certs


def secrets_in(certs: Path) -> list[str]:
    """What must never be seen: the tokens, and a line from the middle of each key."""
    found = []
    for path in sorted(certs.iterdir()):
        lines = path.read_text().splitlines()
        if path.suffix == ".token":
            found += lines
        elif path.suffix == ".key":
            found.append(lines[len(lines) // 2])
    assert len(found) >= 6
    return found


def command_lines(cluster: Cluster) -> str:
    return "\n".join(cluster.place.processes().values())


@pytest.mark.long
def test_a_job_over_tls_shows_no_secret(cluster: Cluster) -> None:
    wanted = reference(cluster.place, *SCRIPT)
    certs = make_certs(cluster)
    canaries = secrets_in(certs)
    summary, weights = cluster.place.work / "out.json", cluster.place.work / "w.safetensors"
    tls = ("--certs", certs)
    cluster.environ["PARAMSERVER_LOG__LEVEL"] = "debug"
    cluster.coordinator(
        *("--workers", "2", "--set", "training.slices_per_step=4", *tls), *("--summary", summary, "--save", weights)
    )
    # Without a certificate, and with those of another authority, nobody gets in; nor does a server's as a worker.
    cluster.environ["PARAMSERVER_CLUSTER__JOIN_TIMEOUT_S"] = "3"
    plain = cluster.worker(*SCRIPT)
    assert "no coordinator answered" in complaint(plain.wait(), 3)
    cluster.workers.clear()
    del cluster.environ["PARAMSERVER_CLUSTER__JOIN_TIMEOUT_S"]
    for _ in range(2):
        cluster.worker(*SCRIPT, "--pace", "0.02", flags=tls)
    cluster.server(*tls)
    cluster.server(*tls)  # one too many: refused, and it says so
    status = cluster.place.paramserver("status", "--json", "--job", cluster.job).check()
    assert json.loads(status.out)["security"] == "tls"
    told = [status.said, command_lines(cluster)]
    told.append(cluster.place.paramserver("doctor", "--coordinator", cluster.join, *tls).said)
    told.append(cluster.place.paramserver("config", "show", environ={"PARAMSERVER_SECURITY__TOKEN": canaries[0]}).said)
    told.append(cluster.place.paramserver("certs", "show", certs).said)
    codes = sorted(server.wait().code for server in cluster.servers)
    assert codes == [0, 2]
    for one in (*cluster.workers, *cluster.coordinators):
        one.wait().check()
    same_result(read_summary(summary), wanted)
    told += [running.out + running.err for running in (*cluster.coordinators, *cluster.servers, *cluster.workers)]
    told += [summary.read_text(), weights.read_bytes().decode("latin-1"), cluster.store_text()]
    for canary in canaries:
        assert not [text for text in told if canary in text]


def test_operators_need_the_admin_token(cluster: Cluster) -> None:
    certs = make_certs(cluster)
    cluster.coordinator("--workers", "1", "--certs", certs)
    others = cluster.place.work / "others"
    others.mkdir(mode=0o700)
    for name in ("ca.crt", "worker.crt", "worker.key", "join.token"):
        (others / name).write_bytes((certs / name).read_bytes())
        (others / name).chmod(stat.S_IMODE((certs / name).stat().st_mode))
    at = ("--coordinator", cluster.join)
    cluster.place.paramserver("status", *at, "--certs", others).check()
    for command in (("drain", "worker-0"), ("stop",), ("set", "consistency.mode=async")):
        text = complaint(cluster.place.paramserver(*command, *at, "--certs", others), 2)
        assert "permission denied; the call takes the certificate of the role admin, and that of" in text
        assert "copy admin.crt and admin.key into the directory" in text
    assert "admin" in cluster.coordinators[0].err
    cluster.place.paramserver("stop", *at, "--certs", certs).check()
    cluster.coordinators[0].wait().check()


def test_without_a_token_of_its_own_a_job_has_one_that_only_this_user_can_read(cluster: Cluster) -> None:
    cluster.coordinator("--workers", "1")
    (file,) = cluster.place.runtime.glob("*.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    token = json.loads(file.read_text())["admin_token"]
    assert len(token) >= 32
    assert token not in command_lines(cluster)
    # The address alone is not enough.
    text = complaint(cluster.place.paramserver("stop", "--coordinator", cluster.join), 2)
    assert "permission denied; the call takes the operators' token, and none is known here" in text
    cluster.place.paramserver("stop", "--job", cluster.job).check()
    done = cluster.coordinators[0].wait().check()
    assert "commands (stop, scale, set, drain): from this user on this machine only" in done.said
    assert token not in done.said
    assert not file.exists()
