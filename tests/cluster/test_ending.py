"""A job without workers: its last step is complete, its last version is saved, and everything handed in has counted."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from paramserver.checkpoint import catalog
from paramserver.checkpoint.place import Place
from paramserver.coordinator.options import CheckpointOptions
from paramserver.v1 import coordinator_pb2
from paramserver.worker.client import RawClient
from paramserver.worker.context import Context
from tests.support.cluster.harness import CALL_S, Cluster, Died, at_once, until

MODES = pytest.mark.parametrize("mode", ["sync", "async"])


def settled(cluster: Cluster) -> coordinator_pb2.StatusResponse:
    """The status once nothing more is to be done."""
    until("the job has come to rest", lambda: not cluster.job.coordinator.job.ending.closing)
    return cluster.status()


def saved(place: Path) -> int:
    """The version of the newest complete checkpoint."""
    return catalog.complete(Place(str(place)))[0].version


def steps_of_ones(count: dict[int, int]) -> Any:
    """A script without a loader: each worker contributes a gradient of ones so many times, and just ends."""

    def script(ctx: Context) -> None:
        model = torch.nn.Linear(1, 1, bias=False)
        model.weight.data.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = ctx.prepare(model, optimizer)
        for _ in range(count[ctx.rank]):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()

    return script


@MODES
@pytest.mark.parametrize("every", [0, 1000])
def test_the_last_version_of_a_loop_without_epochs_is_saved(mode: str, every: int, tmp_path: Path) -> None:
    with Cluster(2, 2, mode, checkpoints=CheckpointOptions(str(tmp_path), every)) as cluster:
        outcome = cluster.train(steps_of_ones({0: 4, 1: 4}))
        status = settled(cluster)
        assert dict(status.broken_promises) == {}
        assert saved(tmp_path) == outcome.summary["steps"] > 0


@MODES
def test_the_last_version_of_clients_is_saved(mode: str, tmp_path: Path) -> None:
    with Cluster(1, 2, mode, checkpoints=CheckpointOptions(str(tmp_path), 1000)) as cluster:
        client = cluster.client(0)
        client.init({"w": np.zeros(300, np.float32)})
        for _ in range(3):
            client.push({"w": np.ones(300, np.float32)})
        client.close()
        status = settled(cluster)
        assert dict(status.broken_promises) == {}
        assert saved(tmp_path) == 3


@MODES
@pytest.mark.parametrize("planned", [True, False], ids=["ctx.epochs", "range"])
def test_a_script_that_leaves_its_last_epoch_has_promised_no_more(mode: str, planned: bool, tmp_path: Path) -> None:
    """Stopping early is the script's own wish: all that it handed in counts, and the last version is saved."""

    def script(ctx: Context) -> None:
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        data = TensorDataset(torch.ones(40, 1))
        model, optimizer, loader = ctx.prepare(model, optimizer, DataLoader(data, batch_size=4))
        for _ in ctx.epochs(1) if planned else range(1):
            for (x,) in itertools.islice(loader, 3):
                torch.autograd.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()

    with Cluster(1, 1, mode, checkpoints=CheckpointOptions(str(tmp_path))) as cluster:
        outcome = cluster.train(script)
        status = settled(cluster)
        assert dict(status.broken_promises) == {}
        assert saved(tmp_path) == outcome.summary["steps"] == 3


def test_what_comes_later_is_saved_too(tmp_path: Path) -> None:
    with Cluster(1, 1, checkpoints=CheckpointOptions(str(tmp_path))) as cluster:
        for version in (1, 2):
            client = cluster.client(0)
            client.init({"w": np.zeros(3, np.float32)})
            client.push({"w": np.ones(3, np.float32)})
            client.close()
            settled(cluster)
            assert saved(tmp_path) == version


def test_unequal_numbers_of_steps_all_count() -> None:
    """3 and 6 contributions to steps of 4: the last one is made of the one that is there."""
    with Cluster(2, 2, slices_per_step=4) as cluster:
        outcome = cluster.train(steps_of_ones({0: 3, 1: 6}))
        status = settled(cluster)
        outcome = cluster.outcome()
        assert dict(status.broken_promises) == {}
        assert [stats.applied for stats in cluster.stats()] == [9, 9]
        assert outcome.summary["steps"] == 3
        # The mean over the slices that there are: each step moves the weight by its gradient of one.
        assert outcome.tensor("weight").item() == -3.0
        tallies = cluster.call_in_loop(cluster.job.coordinator.job.ending.tallies)
        assert {one.name: (one.handed_in, one.counted) for one in tallies} == {"worker-0": (3, 3), "worker-1": (6, 6)}


@pytest.mark.parametrize("pushes", [(1, 2), (2, 5)])
def test_unequal_numbers_of_pushes_all_count(pushes: tuple[int, int]) -> None:
    with Cluster(2, 3, slices_per_step=2) as cluster:
        clients = [cluster.client(index) for index in range(2)]

        def use(client: RawClient, count: int) -> None:
            client.init({"w": np.zeros(1000, np.float32)})
            for _ in range(count):
                client.push({"w": np.full(1000, 2.0, np.float32)})
            client.close()

        at_once(cluster, *(lambda c=c, n=n: use(c, n) for c, n in zip(clients, pushes, strict=True)))
        status = settled(cluster)
        assert dict(status.broken_promises) == {}
        assert cluster.outcome().tensor("w").tolist() == [2.0 * sum(pushes)] * 1000


def test_a_step_whose_worker_was_lost_is_named() -> None:
    """Its other half may still come: nobody makes up the rest, and the job does not end well."""
    with Cluster(1, 1, slices_per_step=3, grace_s=0.1) as cluster:
        worker = cluster.start(dies_after(4))
        worker.end(CALL_S)
        until("it is missed", lambda: "worker-0" in cluster.status().lost)
        status = settled(cluster)
        assert [stats.applied for stats in cluster.stats()] == [3]
        assert list(status.broken_promises) == ["accounts"]
        assert "1 contributions are not counted" in status.broken_promises["accounts"]
        # Somebody comes in its place, and does the rest.
        cluster.workers.clear()
        cluster.start(steps_of_ones({0: 2}))
        cluster.join()
        status = settled(cluster)
        assert dict(status.broken_promises) == {}
        assert [stats.applied for stats in cluster.stats()] == [6]


def dies_after(count: int) -> Any:
    def script(ctx: Context) -> None:
        steps_of_ones({0: count})(ctx)
        raise Died

    return script


def test_an_answer_that_is_wrong_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that forgets a contribution it has acknowledged: the accounts do not balance."""
    with Cluster(1, 1, "async") as cluster:
        client = cluster.client(0)
        client.init({"w": np.zeros(3, np.float32)})
        client.push({"w": np.ones(3, np.float32)})
        client.push({"w": np.ones(3, np.float32)})

        def forget() -> None:
            shard = cluster.job.servers[0].service.first.host.shard
            assert shard is not None
            shard.state.counters.applied -= 1

        cluster.call_in_loop(forget)
        client.close()
        assert (
            "1 contributions were acknowledged to workers, but are in no version."
            in (settled(cluster).broken_promises["accounts"])
        )
