"""Jobs on a real Ray cluster of two nodes on this machine: ``make test-frameworks`` installs Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

import paramserver.ray as psr
from paramserver import errors
from tests.support.frameworks.on_ray import processes, train, wait_until
from tests.support.integration.harness import ROOT

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]
SETTINGS = {"training.slices_per_step": 4}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    small = {"num_cpus": 4, "object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=small)
    cluster.add_node(**small)
    ray.init(address=cluster.address)
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


def pids(said: Path) -> set[int]:
    """Workers that have trained."""
    return {int(line) for line in said.read_text().split()} if said.exists() else set()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_worker_and_a_server_are_killed_and_another_worker_comes(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    quiet = psr.run(train, [str(tmp_path / "other"), str(enough)], servers=1, workers=1, settings=SETTINGS)
    assert quiet.summary["losses"] == 0
    assert quiet.digest == summary["weights_sha256"]


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
