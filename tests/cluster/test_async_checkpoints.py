"""Asynchronous mode: a checkpoint comes at most as many slices late as there are other workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paramserver.checkpoint import catalog
from paramserver.checkpoint.place import Place
from paramserver.coordinator.options import CheckpointOptions
from paramserver.server.saving import holding
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, until

EVERY, STEPS, WORKERS = 10, 40, 3


def steps(count: int) -> Callable[[Context], None]:
    def script(ctx: Context) -> None:
        model = torch.nn.Linear(64, 1)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for _ in range(count):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return script


@pytest.mark.parametrize("staleness", [3, "unbounded"])
def test_each_comes_in_time(staleness: int | str, tmp_path: Path) -> None:
    options = CheckpointOptions(str(tmp_path), EVERY, keep=1000)
    with Cluster(WORKERS, 2, "async", staleness, checkpoints=options) as cluster:
        cluster.train(steps(STEPS))
        until("the job has come to rest", lambda: not cluster.job.coordinator.job.ending.closing)
    found = sorted(manifest.version for manifest in catalog.complete(Place(str(tmp_path))))
    assert found[0] == 0
    assert found[-1] == WORKERS * STEPS
    due = {version // EVERY for version in found}
    assert due <= set(range(WORKERS * STEPS // EVERY + 1))
    assert 2 * len(due) > WORKERS * STEPS // EVERY, "a disk that is too slow for the pace leaves some out, not most"
    late = [version % EVERY for version in found]
    assert max(late) < WORKERS, found


def test_no_coordinator_comes_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for once, not at every version that is due."""
    monkeypatch.setattr(holding, "_ALONE_S", 0.3)
    alone: list[int] = []
    begin = holding.Holding.begin

    def begun(self: holding.Holding, limit_s: float, after: Callable[[], None] | None = None) -> None:
        def over() -> None:
            alone.append(1)
            assert after is not None
            after()

        begin(self, limit_s, None if after is None else over)

    monkeypatch.setattr(holding.Holding, "begin", begun)
    with Cluster(1, 1, "async", checkpoints=CheckpointOptions(str(tmp_path), EVERY)) as cluster:
        monkeypatch.setattr(cluster.job.coordinator.job.checkpoints, "look", lambda: None)
        cluster.train(steps(STEPS))
        assert alone == [1]
        assert cluster.stats()[0].version == STEPS
