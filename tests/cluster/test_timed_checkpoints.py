"""checkpoint.every_s: a checkpoint every so many seconds, at a version that nobody knew beforehand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paramserver import errors
from paramserver.checkpoint import catalog
from paramserver.checkpoint.place import Place
from paramserver.coordinator.options import CheckpointOptions
from paramserver.v1 import coordinator_pb2
from paramserver.worker.context import Context
from tests.support.cluster.harness import JOB_S, Cluster, until
from tests.support.cluster.programs import Program, cosine, dataset, sgd
from tests.support.failover.rollback import Rig, same, twin

EVERY_S = 0.1
WANTED = 3


def saved(place: Path) -> list[int]:
    return sorted(manifest.version for manifest in catalog.complete(Place(str(place))))


def train_until(enough: Callable[[], bool]) -> Callable[[Context], None]:
    """A script that makes steps until ``enough``, and some more."""

    def script(ctx: Context) -> None:
        model = torch.nn.Linear(64, 1)
        model, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
        deadline, left = time.monotonic() + JOB_S / 2, 5
        while left and time.monotonic() < deadline:
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            left -= enough()

    return script


@pytest.mark.parametrize(("mode", "multiple"), [("sync", 1), ("sync", 8), ("async", 1)])
def test_checkpoints_come_by_time(mode: str, multiple: int, tmp_path: Path) -> None:
    options = CheckpointOptions(str(tmp_path), keep=1000, every_s=EVERY_S, multiple=multiple)
    with Cluster(1, 2, mode, checkpoints=options) as cluster:
        begun = time.monotonic()
        cluster.train(train_until(lambda: len(saved(tmp_path)) > WANTED))
        seconds = time.monotonic() - begun
        until("the job has come to rest", lambda: not cluster.job.coordinator.job.ending.closing)
        last = cluster.stats()[0].version
    first, *timed, end = saved(tmp_path)
    assert (first, end) == (0, last)
    assert WANTED <= len(timed) <= seconds / EVERY_S + 1
    if mode == "sync":
        assert not [version for version in timed if version % multiple]


def test_a_job_goes_back_to_a_checkpoint_that_came_by_time(tmp_path: Path) -> None:
    """Bit for bit. Workers take their time until there is one; then a server dies."""
    found, lock = list[int](), threading.Lock()

    def each(ctx: Context, slices: int) -> None:
        deadline = time.monotonic() + 1.0
        while not found and time.monotonic() < deadline:
            with lock:
                if not found and len(versions := saved(rig.checkpoints)) > 1:
                    found.extend(versions)
                    rig.kill_now("server-1")
            time.sleep(0.01)

    def program(each: Callable[[Context, int], None] | None = None) -> Program:
        return Program(dataset(120), 8, 4, optimizer=sgd, schedule=cosine, each=each)

    wanted = twin("timed", program(), slices_per_step=4)
    with Rig(tmp_path, 0, checkpoint__every_s=0.01) as rig:
        rig.begin(program(each))
        summary = rig.finish()
        assert summary["rollbacks"] == 1
        assert min(version for *_, version in rig.orders.timelines) >= found[1] > 0
    same(summary, wanted)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_checkpoint_on_request_is_complete_when_the_call_is_answered(mode: str, tmp_path: Path) -> None:
    options = CheckpointOptions(str(tmp_path), keep=1000)
    answers: list[tuple[str, list[int]]] = []
    with Cluster(1, 2, mode, checkpoints=options) as cluster:

        def ask() -> None:
            until("training", lambda: cluster.stats()[0].version > 1)
            call = cluster.job.coordinator.checkpoint(coordinator_pb2.CheckpointRequest(wait_s=JOB_S / 4))
            reply = cluster.job.background.run(call, JOB_S / 3)
            answers.append((reply.name, saved(tmp_path)))

        asking = threading.Thread(target=ask)
        asking.start()
        cluster.train(train_until(lambda: bool(answers)))
        asking.join(JOB_S)
    ((name, versions),) = answers
    assert versions[0] == 0
    assert versions[1:] == [int(name.split("-")[1])]


def test_a_job_without_checkpoints_refuses_to_make_one() -> None:
    with Cluster(1, 1) as cluster:
        call = cluster.job.coordinator.checkpoint(coordinator_pb2.CheckpointRequest(wait_s=1.0))
        with pytest.raises(errors.ConfigError, match="start it with --checkpoint-dir"):
            cluster.job.background.run(call, 5.0)
