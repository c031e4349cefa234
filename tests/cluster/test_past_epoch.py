"""A worker that the others do not need for the last steps of an epoch may get newer weights than those of its end."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from structlog.testing import capture_logs
from torch.utils.data import DataLoader

from paramserver.worker.context import Context
from tests.support.cluster.faults import FaultPlan
from tests.support.cluster.harness import Cluster
from tests.support.cluster.programs import dataset, network, sgd

SAMPLES, BATCH, EPOCHS = 24, 4, 3
STEPS = SAMPLES // BATCH


@pytest.mark.parametrize("late", [True, False])
def test_a_worker_whose_weights_are_past_the_end_of_its_epoch_is_told_so(late: bool) -> None:
    """A step has one slice, so worker 1 has none. It reaches the server again when epoch 1 is half way."""
    plan, ends = FaultPlan(), dict[tuple[int, int], tuple[int, int]]()

    def script(ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        if ctx.rank == 1 and late:
            ctx.engine.shards.links.channels[0] = plan.wrap(cluster.job.network.connect)("server-0")
            cluster.call_in_loop(plan.cut)
        ctx.barrier()
        for epoch in ctx.epochs(EPOCHS):
            for x, y in loader:
                if (epoch, ctx.version) == (1, STEPS + STEPS // 2):
                    cluster.call_in_loop(plan.heal)
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            ends[ctx.rank, epoch] = ctx.version, ctx.steps_past_epoch

    with capture_logs() as logs, Cluster(2, 1, slices_per_step=1) as cluster:
        cluster.train(script)
    assert [ends[0, epoch] for epoch in range(EPOCHS)] == [(STEPS * (epoch + 1), 0) for epoch in range(EPOCHS)]
    mine = {epoch: found for (rank, epoch), found in ends.items() if rank == 1}
    assert all(past == version - STEPS * (epoch + 1) for epoch, (version, past) in mine.items())
    said = [one["event"] for one in logs if "steps past the end of epoch" in one["event"]]
    assert len(said) == any(past for _, past in mine.values())
    if late:
        assert mine[0][1] >= STEPS // 2
