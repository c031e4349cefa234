"""`docker-compose up` with nothing prepared: it trains; what stays is locked up and keeps its secrets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.compose.harness import Cluster, Container, digests, run, until

pytestmark = pytest.mark.timeout(1800)

SCRIPT = "workers/digits.py --epochs 5"
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close()"


@pytest.fixture(scope="module")
def cluster(image: str) -> Iterator[Cluster]:
    """A cluster whose job is done; servers and coordinator have stayed."""
    with Cluster(SCRIPT=SCRIPT) as cluster:
        cluster.up()
        cluster.result()
        yield cluster


def test_it_computes_what_a_local_run_computes(cluster: Cluster, local: Callable[[str], dict[str, Any]]) -> None:
    summary, expected = cluster.result(), local(SCRIPT)
    assert summary["mode"] == "sync"
    assert summary["steps"] == expected["steps"] == 55
    assert summary["metrics"]["test_accuracy"] > 0.9
    print(f"\ncompose {digests(summary)}\nlocal   {digests(expected)}")
    assert digests(summary) == digests(expected)


def test_workers_end_and_the_others_stay(cluster: Cluster) -> None:
    until("the workers have ended", lambda: not any(one.running for one in cluster.containers("worker")))
    for worker in cluster.containers("worker"):
        assert (worker.exit_code, worker.restarts) == (0, 0)
    assert cluster.one("certs").exit_code == 0
    staying = [*cluster.containers("server"), cluster.one("coordinator"), cluster.one("redis")]
    assert len(staying) == 4
    until("all are healthy", lambda: all(one.health == "healthy" for one in staying))
    assert [one.restarts for one in staying] == [0] * 4


def test_they_are_locked_up(cluster: Cluster) -> None:
    containers, page = cluster.containers(), cluster.one("coordinator").id
    assert len(containers) == 7
    for container in containers:
        facts = container.facts()
        host = facts["HostConfig"]
        assert facts["Config"]["User"] == "10001:10001"
        assert host["CapDrop"] == ["ALL"]
        assert (host["ReadonlyRootfs"], host["Init"], host["Privileged"]) == (True, True, False)
        assert "no-new-privileges:true" in host["SecurityOpt"]
        assert 0 < host["PidsLimit"] <= 1024
        here = {"8780/tcp": [{"HostIp": "127.0.0.1", "HostPort": "0"}]}
        assert (host["PortBindings"] or {}) == (here if container.id == page else {})
        if not container.running:
            continue
        status = container.exec("cat", "/proc/1/status").out
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert fields["Uid"].split() == ["10001"] * 4
        assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
        assert fields["NoNewPrivs"] == "1"
        assert container.exec("sh", "-c", "echo > /somewhere", check=False).code != 0


def test_each_role_sees_its_own_keys(cluster: Cluster) -> None:
    seen = {role: set(cluster.one(role).exec("ls", "-A", "/certs").out.split()) for role in ("coordinator", "server")}
    assert seen["server"] == {"ca.crt", "server.crt", "server.key", "join.token"}
    assert seen["coordinator"] == {
        *("ca.crt", "coordinator.crt", "coordinator.key", "admin.crt", "admin.key"),
        *("join.token", "admin.token", "redis.password"),
    }
    volumes = {mount["Name"]: mount["RW"] for mount in cluster.one("worker").facts()["Mounts"]}
    wanted = {"worker-keys": False, "dataset": False, "meeting": True}
    assert volumes == {f"{cluster.project}_{name}": writable for name, writable in wanted.items()}
    for role in ("coordinator", "server"):
        container = cluster.one(role)
        assert container.exec("sh", "-c", "echo > /certs/join.token", check=False).code != 0
        modes = container.exec("sh", "-c", "stat -c %a /certs /certs/*.key /certs/*.token").out.split()
        assert set(modes) == {"700", "600"}


def secrets_of(cluster: Cluster) -> list[str]:
    """All that must not show: tokens, the store's password, and a line of each private key."""
    found = []
    for role in ("coordinator", "server"):
        container = cluster.one(role)
        for name in container.exec("ls", "-A", "/certs").out.split():
            lines = container.exec("cat", f"/certs/{name}").out.strip().splitlines()
            if name.endswith((".token", ".password")):
                found.append(lines[0])
            elif name.endswith(".key"):
                found.append(lines[1])
    assert len(found) == 7
    assert min(len(secret) for secret in found) >= 32
    return sorted(set(found))


def test_nothing_secret_shows(cluster: Cluster) -> None:
    secrets = secrets_of(cluster)
    shown = {
        "config": cluster.compose("config").out,
        "status": cluster.admin("status", "--json").said,
        "settings": cluster.admin("config", "show").said,
        "health": cluster.admin("health", "--json").said,
        "image": run("docker", "image", "inspect", cluster.one("server").facts()["Image"]).out,
    }
    for container in cluster.containers():
        name = container.name
        shown[f"inspect {name}"] = json.dumps(container.facts())
        shown[f"logs {name}"] = container.logs()
        if container.running:
            shown[f"arguments {name}"] = run("docker", "top", container.id, "-eo", "pid,args").out
            environment = container.exec("sh", "-c", "cat /proc/[0-9]*/environ | tr '\\0' '\\n'", check=False).out
            shown[f"environment {name}"] = environment
    assert sum(len(text) for text in shown.values()) > 10_000
    for place, text in shown.items():
        assert not [secret for secret in secrets if secret in text], f"a secret shows in: {place}"


def test_the_store_is_out_of_reach_of_servers(cluster: Cluster) -> None:
    assert cluster.one("coordinator").exec("python", "-c", CONNECT, "redis", "6379").code == 0
    assert cluster.one("server").exec("python", "-c", CONNECT, "coordinator", "8790").code == 0
    assert cluster.one("server").exec("python", "-c", CONNECT, "redis", "6379", check=False).code != 0
    address = cluster.one("redis").facts()["NetworkSettings"]["Networks"][f"{cluster.project}_store"]["IPAddress"]
    assert cluster.one("server").exec("python", "-c", CONNECT, address, "6379", check=False).code != 0


def test_the_store_wants_the_password_and_allows_little(cluster: Cluster) -> None:
    def ask(*words: str) -> str:
        return cluster.one("redis").exec("valkey-cli", *words, check=False).said

    password = cluster.one("coordinator").exec("cat", "/certs/redis.password").out.strip()
    known = ("--user", "paramserver", "--pass", password, "--no-auth-warning")
    assert "NOAUTH" in ask("ping")
    assert "PONG" in ask(*known, "ping")
    for command in (["flushall"], ["config", "get", "*"], ["keys", "*"], ["get", "another:key"]):
        assert "NOPERM" in ask(*known, *command), command


def test_who_has_no_certificate_is_not_admitted(cluster: Cluster) -> None:
    """A container in the network of the cluster, with the image and without keys."""
    network = f"{cluster.project}_cluster"
    settings = ("-e", "PARAMSERVER_CLUSTER__COORDINATOR=coordinator:8790", "-e", "PARAMSERVER_SECURITY__INSECURE=true")
    done = run(
        *("docker", "run", "--rm", "--network", network, *settings, cluster.one("server").facts()["Image"]),
        *("status",),
        check=False,
    )
    assert done.code != 0
    assert "compose" not in done.out


def test_a_server_may_not_give_commands(cluster: Cluster) -> None:
    done = cluster.one("server").exec("paramserver", "set", "consistency.mode=async", check=False)
    assert done.code != 0
    assert cluster.status()["mode"] == "sync"


def hung(container: Container) -> bool:
    return container.exec("paramserver", "health", check=False).code == 5


def test_a_process_that_hangs_is_not_healthy(cluster: Cluster) -> None:
    server = cluster.containers("server")[0]
    assert not hung(server)
    stop = "import os, signal, sys; os.kill(int(sys.argv[1]), signal.Signals[sys.argv[2]])"
    pid = json.loads(server.exec("paramserver", "health", "--json").out)["processes"][0]["pid"]
    server.exec("python", "-c", stop, str(pid), "SIGSTOP")
    try:
        until("health has noticed", lambda: hung(server), 60.0)
    finally:
        server.exec("python", "-c", stop, str(pid), "SIGCONT")


def test_another_up_changes_nothing(cluster: Cluster) -> None:
    authority = cluster.one("coordinator").exec("sh", "-c", "cat /certs/*").out
    before = {container.id for container in cluster.containers()}
    cluster.up()
    assert {container.id for container in cluster.containers()} == before
    assert cluster.one("coordinator").exec("sh", "-c", "cat /certs/*").out == authority
    until("the workers have ended again", lambda: not any(one.running for one in cluster.containers("worker")))
    assert "nothing left to do" in cluster.one("worker").logs()
