"""Jobs whose optimizer needs whole tensors: saved, gone back, resized and taken over by backups with the same bits.

All other optimizers do the same here, too, in the tests marked ``long``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paramserver.v1 import coordinator_pb2
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, train, until
from tests.support.cluster.programs import Program, dataset
from tests.support.failover.resizing import Between, resize
from tests.support.failover.rollback import Rig, Stop, Strike, same, twin
from tests.support.optimizers import OPTIMIZERS, model_for

SAMPLES, BATCH, EPOCHS, SLICES = 128, 8, 3, 4
# The largest tensor has twelve chunks.
CHUNK: dict[str, Any] = {"training__chunk_bytes": 128}
WHOLE = ("adafactor", "muon")
EVERY = [pytest.param(name, marks=() if name in WHOLE else pytest.mark.long) for name in OPTIMIZERS]


def program(name: str, each: Any = None) -> Program:
    return Program(dataset(SAMPLES), BATCH, EPOCHS, lambda: model_for(name), OPTIMIZERS[name], each=each)


def expected(name: str) -> Any:
    """Undisturbed, with one worker and one server."""
    return twin(f"optimizer {name}", program(name), 128, slices_per_step=SLICES)


@pytest.mark.parametrize("name", EVERY)
def test_workers_and_servers_do_not_show(name: str) -> None:
    outcome = train(program(name), 2, 2, {"training__chunk_bytes": 128}, slices_per_step=SLICES)
    same(outcome.summary, expected(name))


@pytest.mark.parametrize("name", EVERY)
def test_a_job_that_was_resumed_and_went_back_has_the_same_bits(name: str, tmp_path: Path) -> None:
    """It ends after version 5; with another number of servers it goes on from version 3, and back to version 6."""
    stop = Stop(5)
    with Rig(tmp_path, 3, servers=2, **CHUNK) as rig:
        rig.begin(program(name, stop))
        rig.end_at(stop, 3)
    strike = Strike("commit.before_log", "server-1", 8)
    with Rig(tmp_path, 3, [strike], servers=3, checkpoint__resume=str(tmp_path / "ckpt"), **CHUNK) as rig:
        rig.begin(program(name))
        summary = rig.finish()
        assert strike.fired
        assert rig.rollbacks == 1
    same(summary, expected(name))


@pytest.mark.parametrize("name", [WHOLE[0], pytest.param(WHOLE[1], marks=pytest.mark.long)])
def test_a_backup_goes_on_with_whole_tensors(name: str, tmp_path: Path) -> None:
    with Rig(tmp_path, 0, [Strike("apply.mid", "server-1", 5)], cluster__replicas=1, **CHUNK) as rig:
        rig.begin(program(name))
        summary = rig.finish()
        assert rig.rollbacks == 0
        assert rig.record().promotions >= 1
    same(summary, expected(name))


@pytest.mark.parametrize("name", [WHOLE[0], pytest.param(WHOLE[1], marks=pytest.mark.long)])
def test_another_number_of_servers_has_the_same_bits(name: str, tmp_path: Path) -> None:
    held = Between(2)
    with Rig(tmp_path, 0, servers=1, cluster__replicas=0, **CHUNK) as rig:
        rig.begin(program(name, held))
        resize(rig, held, (3, 2))
        summary = rig.finish()
        assert rig.rollbacks == 0
    same(summary, expected(name))


class Long(nn.Module):
    """One parameter that is larger than any message may be."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 2_200_000))

    def forward(self, x: torch.Tensor) -> Any:
        return (x[:, :1] * self.weight[::100_000]).sum(1)


def test_state_that_no_message_can_hold_comes_and_goes_in_parts() -> None:
    """With version 0, to the script that asks for it, and from a server to the one in its place when servers change."""
    x, y = dataset(16).tensors
    saved: list[Any] = []

    def steps(model: Any, optimizer: Any, count: int) -> None:
        for _ in range(count):
            loss: Any = torch.nn.functional.mse_loss(model(x), y.float())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def script(ctx: Context) -> None:
        model: Any = Long()
        optimizer: Any = torch.optim.Adafactor(model.parameters(), lr=0.05)
        steps(model, optimizer, 1)
        model, optimizer = ctx.prepare(model, optimizer)
        steps(model, optimizer, 1)
        coordinator = cluster.job.coordinator
        request = coordinator_pb2.ScaleRequest(servers=1, wait_s=20.0)
        asked.append(cluster.job.background.submit(coordinator.scale(request)))
        until("the change is prepared", lambda: coordinator.job.record().newest_plan == 1)
        made = 2
        while not asked[0].done():
            steps(model, optimizer, 1)
            made += 1
        saved.extend((optimizer.state_dict()["state"][0], made))

    asked: list[Any] = []
    with Cluster(1, 2, slices_per_step=1) as cluster:
        cluster.start(script)
        cluster.join()
        assert asked[0].result(30.0).servers == 1
        outcome = cluster.outcome()
    model = Long()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.05)
    steps(model, optimizer, saved[1])
    assert torch.equal(outcome.tensor("weight"), model.weight.detach())
    for key, value in optimizer.state[model.weight].items():
        assert torch.equal(saved[0][key], value), key
