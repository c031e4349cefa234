"""Jobs on a real Ray cluster of two nodes on this machine: ``make test-frameworks`` installs Ray."""

from __future__ import annotations

import doctest
import inspect
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.cluster_utils import Cluster

import paramserver.ray as psr
from paramserver import errors
from tests.support.frameworks.on_ray import processes, train, train_function, wait_until
from tests.support.integration.harness import ROOT
from tests.support.public import OF_RAY

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]
SETTINGS = {"training.slices_per_step": 4}


# Of a node. The dashboard would take more memory than the job.
SMALL = {"num_cpus": 4, "object_store_memory": 100 << 20, "include_dashboard": False}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args=SMALL)
    cluster.add_node(**SMALL)
    ray.init(address=cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def address(cluster: Cluster) -> str:
    found: str = cluster.address
    return found


@pytest.fixture(scope="module")
def quiet(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a job in which nobody dies, with one server and one worker."""
    place = tmp_path_factory.mktemp("quiet")
    place.joinpath("enough").touch()
    result = psr.run(train, [str(place / "said"), str(place / "enough")], servers=1, workers=1, settings=SETTINGS)
    assert result.summary["losses"] == 0
    return result.digest


def pids(said: Path) -> set[int]:
    """Workers that have trained."""
    return {int(line) for line in said.read_text().split()} if said.exists() else set()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_worker_and_a_server_are_killed_and_another_worker_comes(
    quiet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said, enough = tmp_path / "said", tmp_path / "enough"
    settings = {**SETTINGS, "cluster.job": "killed"}
    with (
        psr.start(train, [str(said), str(enough)], servers=2, workers=2, settings=settings) as job,
        ThreadPoolExecutor(1) as pool,
    ):
        result = pool.submit(job.wait)
        wait_until(lambda: len(pids(said)) == 2 or result.done(), "two workers train")
        before = processes("killed")
        assert sorted(before.values()) == ["coordinator", "server", "server", "worker", "worker"]
        token = next(tmp_path.glob("paramserver-ray-*/certs/join.token")).read_text().strip().encode()
        for pid in before:
            proc = Path(f"/proc/{pid}")
            assert token not in proc.joinpath("cmdline").read_bytes() + proc.joinpath("environ").read_bytes()
        worker, server = (next(pid for pid in before if before[pid] == role) for role in ("worker", "server"))
        # The process of the one, and the actor of the other.
        os.kill(worker, signal.SIGKILL)
        os.kill(parent(server), signal.SIGKILL)
        wait_until(lambda: len(pids(said)) == 3 or result.done(), "Ray has started the worker again")
        again = [pid for pid, role in processes("killed").items() if role == "server" and pid not in before]
        assert len(again) == 1
        assert server not in processes("killed"), "the process has ended with its actor"
        job.scale(workers=3, servers=3)
        wait_until(lambda: len(pids(said)) == 4 or result.done(), "a third worker trains")
        enough.touch()
        summary = result.result(120).summary
    assert (summary["losses"], summary["takeovers"], summary["epochs"]) == (2, 1, 60)
    wait_until(lambda: not processes("killed"), "all processes have ended")
    assert summary["weights_sha256"] == quiet


def demands(address: str) -> list[dict[str, float]]:
    """What Ray's autoscaler sees: the resources of each actor that has no place."""
    waiting = get_cluster_status(address).resource_demands.ray_task_actor_demand
    return [
        {name: amount for name, amount in one.bundle.items() if not name.startswith("node:")}
        for demand in waiting
        for one in demand.bundles_by_count
        for _ in range(one.count)
    ]


def of_node(node: Any, job: str) -> dict[int, str]:
    """Roles of the job's processes on a node, by pid."""
    raylet = node.all_processes["raylet"][0].process.pid
    return {pid: role for pid, role in processes(job).items() if raylet in ancestors(pid)}


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        try:
            pid = parent(pid)
        except OSError:  # it has ended meanwhile
            return
        yield pid


def test_a_job_waits_for_a_node_and_outlives_the_death_of_another_one(
    quiet: str, cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of these nodes has room for one server and one worker. Nodes are added here, as an autoscaler adds them."""
    said, enough, room = tmp_path / "said", tmp_path / "enough", {"to_serve": 1, "to_work": 1}
    resources: Any = {"resources_per_server": {"to_serve": 1}, "resources_per_worker": {"to_work": 1}}
    nodes = [cluster.add_node(**SMALL, resources=room)]
    with (
        psr.start(
            train,
            [str(said), str(enough)],
            servers=2,
            workers=2,
            settings={**SETTINGS, "cluster.job": "nodes"},
            timeout_s=300.0,
            **resources,
        ) as job,
        ThreadPoolExecutor(1) as pool,
    ):
        result = pool.submit(job.wait)
        wait_until(lambda: len(demands(cluster.address)) == 2, "two actors have no place")
        assert sorted(demands(cluster.address), key=str) == [{"to_serve": 1.0}, {"to_work": 1.0}]
        wait_until(lambda: "waiting for Ray to place server-" in "".join(capfd.readouterr()), "the driver says so")
        assert not pids(said), "the job begins when all have a place"
        nodes.append(cluster.add_node(**SMALL, resources=room))
        wait_until(lambda: len(pids(said)) == 2 or result.done(), "two workers train")
        lost = of_node(nodes[1], "nodes")
        assert sorted(lost.values()) == ["server", "worker"]
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        wait_until(lambda: not lost.keys() & processes("nodes").keys(), "its processes have ended with the node")
        size = said.stat().st_size
        wait_until(lambda: said.stat().st_size > size or result.done(), "the other worker trains on")
        nodes.append(cluster.add_node(**SMALL, resources=room))
        wait_until(lambda: sorted(of_node(nodes[1], "nodes").values()) == ["server", "worker"], "they are there again")
        wait_until(lambda: len(pids(said)) == 3 or result.done(), "the new worker trains")
        assert not result.done()
        enough.touch()
        summary = result.result(300).summary
    for node in nodes:
        cluster.remove_node(node)
    assert (summary["losses"], summary["takeovers"], summary["epochs"]) == (2, 1, 60)
    assert summary["weights_sha256"] == quiet


def test_all_ends_with_the_driver(address: str, tmp_path: Path) -> None:
    said = tmp_path / "said"
    driver = (
        "import ray, sys, paramserver.ray as psr; from tests.support.frameworks.on_ray import train; "
        "ray.init(address=sys.argv[1], log_to_driver=False); "
        "psr.run(train, [sys.argv[2], 'never'], workers=1, insecure=True, settings={'cluster.job': 'orphan'})"
    )
    process = subprocess.Popen([sys.executable, "-c", driver, address, str(said)], cwd=ROOT)
    wait_until(lambda: pids(said) or process.poll() is not None, "the worker trains")
    assert len(processes("orphan")) == 3
    process.kill()
    process.wait()
    wait_until(lambda: not processes("orphan"), "all processes have ended")


def test_too_few_resources_are_refused_with_their_numbers(address: str) -> None:
    with pytest.raises(
        errors.DeadlineError, match=r"no place for server-0 within 30 s: the cluster has 8 CPU \([78] free"
    ):
        psr.run(train, ["never", "never"], workers=1, timeout_s=30.0, resources_per_server={"CPU": 8})


def test_a_script_that_fails_ends_the_job(address: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(errors.JobFailedError, match="worker-0 has ended with exit code 3: its lines above say why"):
        psr.run(str(script), workers=1)


class Checker(doctest.OutputChecker):
    """Leaves out what Ray says of killed actors, and what a driver says while its processes have no place."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        kept = [line for line in got.splitlines(True) if not re.search(r"\(raylet\)|^waiting for Ray to place ", line)]
        return super().check_output(want, "".join(kept), optionflags)


def test_examples_of_docstrings(cluster: Cluster) -> None:
    names: dict[str, Any] = {"psr": psr, "train_function": train_function, "Result": psr.Result}
    said: list[str] = []
    runner = doctest.DocTestRunner(checker=Checker())
    for name in ("Result", "Result.digest", "run", "start", "Job.scale", "Job.wait", "Job.close", "Job"):
        if name == "Job.scale":  # the methods' examples are about one job, in this order
            names["job"] = psr.start(train_function, [2], workers=1)
        test = doctest.DocTestParser().get_doctest(inspect.getdoc(OF_RAY[name]) or "", names, name, None, None)
        assert test.examples
        test.globs = names
        runner.run(test, out=said.append, clear_globs=False)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)
    assert OF_RAY.keys() == {"run", "start", "Job", "Job.wait", "Job.scale", "Job.close", "Result", "Result.digest"}
