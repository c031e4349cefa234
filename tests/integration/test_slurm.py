"""Tasks with the variables of Slurm's srun, on one node; and scripts under the real torchrun."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.support.integration.harness import Place, Running, complaint, place_fixture, read_summary, until
from tests.support.integration.roles import END_S, TRAIN, Cluster, cluster_fixture, same_result

SERVERS, WORKERS = 2, 2
TASKS = 1 + SERVERS + WORKERS
SCRIPT = ("--optimizer", "adamw", "--epochs", "3")
FOUR_SLICES = ("--set", "training.slices_per_step=4")


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    yield from cluster_fixture()


def free_job() -> str:
    """The number of a job whose coordinator's port is free."""
    for job in count(os.getpid()):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", 20000 + 16 * job % 10000))
            except OSError:
                continue
            return str(job)
    raise AssertionError("unreachable")


def srun(place: Place, job: str, *flags: str | Path, script: tuple[str, ...] = SCRIPT) -> list[Running]:
    """Start all tasks of a step, the last one first, as srun does on one node."""
    step = {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "node07",
        "SLURM_STEP_NUM_TASKS": str(TASKS),
        "SLURMD_NODENAME": "node07",
        "OMP_NUM_THREADS": "1",
    }
    flags = ("--servers", str(SERVERS), *FOUR_SLICES, *flags)
    return [
        place.launch(
            *("start", "auto", TRAIN, *flags, "--", *script),
            environ={**step, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
        )
        for task in reversed(range(TASKS))
    ][::-1]


def ended(tasks: list[Running]) -> None:
    """All tasks have ended with 0, which is the exit code of srun."""
    try:
        for task in tasks:
            task.wait(END_S).check()
    except AssertionError as error:
        raise AssertionError(f"{error}\n" + "\n".join(f"=== {t.pid}\n{t.out}\n{t.err}" for t in tasks)) from None


def of_run(place: Place) -> dict[str, object]:
    """The summary of `paramserver run` with the same script."""
    summary = place.work / "run.json"
    sizes = ("--servers", str(SERVERS), "--workers", str(WORKERS), *FOUR_SLICES)
    place.paramserver("run", TRAIN, *sizes, "--summary", summary, "--", *SCRIPT).check()
    return read_summary(summary)


def test_the_tasks_of_srun_train_as_run_does(place: Place) -> None:
    summary = place.work / "srun.json"
    tasks = srun(place, free_job(), "--summary", summary)
    ended(tasks)
    same_result(read_summary(summary), of_run(place))
    assert "weights sha256" in tasks[0].out
    # Workers have the ranks that follow from their tasks.
    assert [task.out.partition(" of ")[0] for task in tasks[1 + SERVERS :]] == ["rank 0", "rank 1"]
    assert place.leftovers() == []


@pytest.mark.long
def test_a_requeued_job_goes_on_from_its_checkpoint(place: Place) -> None:
    """Slurm ends all tasks and starts them again later, with the number of the job as before."""
    job, summary, checkpoints = free_job(), place.work / "srun.json", place.work / "checkpoints"
    flags = ("--summary", summary, "--checkpoint-dir", checkpoints, "--checkpoint-every", "2")
    first = srun(place, job, *flags, script=(*SCRIPT, "--pace", "0.3"))
    until("a checkpoint is complete", lambda: any(checkpoints.glob("step-*[1-9]-t0/MANIFEST.json")), END_S)
    for task in first:
        task.send(signal.SIGKILL)
    for task in first:
        task.wait()
    second = srun(place, job, *flags)
    ended(second)
    assert "it goes on from its newest checkpoint" in second[0].err
    same_result(read_summary(summary), of_run(place))


@pytest.mark.long
def test_every_task_says_at_once_what_several_nodes_need(place: Place) -> None:
    environ = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[07-08]", "SLURM_LOCALID": "0"}
    for task, flags, text in [
        ("0", ("--checkpoint-dir", "none"), "--insecure"),
        ("1", ("--checkpoint-dir", "none"), "--insecure"),
        ("4", ("--insecure",), "--checkpoint-dir"),
    ]:
        numbers = {"SLURM_PROCID": task, "SLURM_STEP_NUM_TASKS": "5"}
        done = place.paramserver("start", "auto", TRAIN, *flags, environ={**environ, **numbers})
        assert text in complaint(done, 2)
        assert done.seconds < END_S


def torchrun(place: Place, *script: str, **environ: str) -> Running:
    """Start two processes by torch's own program."""
    how = ("--standalone", "--nproc-per-node", "2", "--tee", "3")
    return place.start(sys.executable, "-m", "torch.distributed.run", *how, TRAIN, *script, environ=environ)


@pytest.mark.long
def test_processes_of_torchrun_are_workers_of_a_job(cluster: Cluster) -> None:
    summary = cluster.place.work / "out.json"
    coordinator = cluster.coordinator("--workers", "2", *FOUR_SLICES, "--summary", summary)
    cluster.server()
    done = torchrun(cluster.place, *SCRIPT, PARAMSERVER_CLUSTER__COORDINATOR=cluster.join).wait().check()
    cluster.ended()
    assert all(f"[default{rank}]:rank {rank} of " in done.out for rank in (0, 1)), done.text
    assert f"weights sha256 {read_summary(summary)['weights_sha256']}" in coordinator.out
    same_result(read_summary(summary), of_run(cluster.place))


@pytest.mark.long
def test_torchrun_without_a_cluster_is_refused(place: Place) -> None:
    done = torchrun(place, *SCRIPT).wait().check(1)
    assert "torchrun has started 2 processes, and no cluster is configured" in done.err
    assert "trains with" not in done.out
