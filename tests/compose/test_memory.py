"""Servers and workers in containers of one host share memory, or the status says why not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from paramserver.config import load_settings
from paramserver.render.request import Request
from paramserver.render.targets import TARGETS
from tests.support.compose.harness import ROOT, Cluster, Container, digests, run, until

pytestmark = pytest.mark.timeout(2400)

# It is stopped before it is through.
ENDLESS = "workers/digits.py --epochs 100000"
SHORT = "workers/digits.py --epochs 10"
Local = Callable[[str], dict[str, Any]]


def transports(cluster: Cluster) -> set[tuple[str, str]]:
    """How the workers talk to servers, and why they share no memory."""
    return {(one["transport"], one["transport_reason"]) for one in cluster.workers() if one["transport"]}


def shared_segments(server: Container) -> int:
    """How many memories of others a server has mapped, for reading only."""
    pid = json.loads(server.exec("paramserver", "health", "--json").out)["processes"][0]["pid"]
    return len(re.findall(r" r--s .*memfd:paramserver", server.exec("cat", f"/proc/{pid}/maps").out))


def test_servers_and_workers_share_memory(image: str) -> None:
    with Cluster(SCRIPT=ENDLESS) as cluster:
        cluster.up()
        cluster.wait_for_version(5)
        assert transports(cluster) == {("shm", "")}
        assert "transport of worker-0, worker-1: shm" in cluster.admin("status").out
        # Both workers' gradients, and what the other server's backup is made of.
        until(
            "servers read the memory of workers and servers", lambda: min(map(shared_segments, servers(cluster))) == 3
        )
        for process in (*servers(cluster), *cluster.containers("worker")):
            assert "kernels" not in process.logs()
            assert process.exec("stat", "-c", "%a %u %g", "/meeting").out.split() == ["1730", "0", "10001"]
            # Whoever does not know the name of a meeting does not find it.
            assert process.exec("ls", "/meeting", check=False).code != 0
        for service in ("coordinator", "redis"):
            mounted = {mount["Destination"] for mount in cluster.one(service).facts()["Mounts"]}
            assert "/meeting" not in mounted

        crashed = cluster.one("worker")
        crashed.crash()
        until("the worker was started again", lambda: crashed.restarts == 1)
        until("two workers share memory", lambda: len(cluster.workers()) == 2 and transports(cluster) == {("shm", "")})
        cluster.admin("stop", "--reason", "enough")
        cluster.result("stopped")


def servers(cluster: Cluster) -> list[Container]:
    return cluster.containers("server")


def test_containers_without_a_volume_in_common_use_sockets_and_say_why(
    image: str, local: Local, tmp_path: Path
) -> None:
    override = tmp_path / "override.yml"
    environment = {"PARAMSERVER_CLUSTER__MEETING_DIR": "/dev/shm"}
    override.write_text(yaml.safe_dump({"services": {"worker": {"environment": environment}}}))
    with Cluster(SCRIPT=SHORT, COMPOSE_FILE=f"{ROOT / 'docker-compose.yml'}:{override}") as cluster:
        cluster.up()
        summary = cluster.result()
        workers = [one for one in cluster.status()["processes"] if one["role"] == "worker"]
        ((transport, reason),) = {(one["transport"], one["transport_reason"]) for one in workers}
        assert transport == "bulk"
        assert reason == (
            "server-0, server-1: it is on this host, but in a container that has no directory in common with this one "
            "(cluster.meeting_dir, there /meeting)"
        )
    assert digests(summary) == digests(local(SHORT))


OPENS = """
import sys, time
from pathlib import Path
from paramserver.transport.shm.meeting import Meeting
from paramserver.transport.shm.segments import Segment
meeting, segment = Meeting(Path("/meeting")), Segment(4096)
segment.view[:5] = b"hello"
print(meeting.name, flush=True)
end = time.monotonic() + 100
while time.monotonic() < end:
    try:
        sys.exit(meeting.swap(segment.reading_fd) and 0)
    except BlockingIOError:
        time.sleep(0.05)
"""
VISITS = """
import select, sys
from pathlib import Path
from paramserver.transport.shm.meeting import Visit
from paramserver.transport.shm.segments import Foreign, Segment
segment = Segment(4096)
visit = Visit(sys.argv[1], segment.reading_fd, folder=Path("/meeting"))
assert select.select([visit._socket], [], [], 100)[0], "the other container hands nothing over"
print(bytes(Foreign(visit.take(), 4096).view[:5]).decode())
"""


def test_what_opens_the_nodes_directory_for_pods_lets_in_their_group_only(image: str, tmp_path: Path) -> None:
    """The container of root of `render k8s --share-memory`, with a directory as a kubelet makes it."""
    files = TARGETS["k8s"](Request(load_settings(ROOT / "configs/cluster.toml", environ={}), share_memory=True))
    (workers,) = yaml.safe_load_all(files["worker.yaml"])
    pod = workers["spec"]["template"]["spec"]
    (opener,) = pod["initContainers"]
    directory = tmp_path / "node"
    directory.mkdir(mode=0o755)

    def container(user: str, *command: str, detached: bool = False) -> list[str]:
        locked = ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--network", "none"]
        first, *rest = command
        return [
            *("docker", "run", *(["-d"] if detached else ["--rm"]), *locked, "--user", user),
            *("-v", f"{directory}:/meeting", "--entrypoint", first, image, *rest),
        ]

    root, ours = f"{opener['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}", "10001:10001"
    assert run(*container(ours, "touch", "/meeting/x"), check=False).code != 0
    for _ in range(2):  # each pod does it
        run(*container(root, *opener["command"]))
    opened = Container(run(*container(ours, "python", "-c", OPENS, detached=True)).out.strip())
    try:
        name = until("the meeting is open", lambda: opened.logs().strip())
        for stranger in ("10002:10002", "10002:10001"):
            assert "PermissionError" in run(*container(stranger, "python", "-c", VISITS, name), check=False).err
        assert run(*container(ours, "ls", "/meeting"), check=False).code != 0
        assert run(*container(ours, "python", "-c", VISITS, name)).out == "hello\n"
        until("the meeting is over", lambda: not opened.running)
        assert opened.exit_code == 0
    finally:
        run("docker", "rm", "-f", opened.id)
