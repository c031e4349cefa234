"""A model on an imagined device: its copies go on beside everything else, and nobody is too early."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paramserver.worker.context import Context
from paramserver.worker.gradients import early
from tests.support.cluster.early import OPTIONS, counted, script
from tests.support.cluster.harness import Cluster, train, train_without
from tests.support.cluster.programs import Program, adamw, dataset, model_of, network
from tests.support.contract.movers import imagine

DATA = dataset(48)
CASES: dict[str, dict[str, Any]] = {
    "sync": {"workers": 2},
    "several slices": {"workers": 2, "servers": 2, "slices_per_step": 4},
}


@pytest.mark.parametrize("transport", ["grpc", "shm"])
@pytest.mark.parametrize("case", CASES)
def test_same_bits(case: str, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Program(DATA, 4, model=network, optimizer=adamw)
    settings = {"training.chunk_bytes": 832}
    wanted = train(script, settings=settings, **CASES[case]).digests
    movers = imagine(monkeypatch)
    with Cluster(transport=transport, **CASES[case]) as cluster:
        assert cluster.train(script, settings).digests == wanted
    assert len(movers) == 2
    for mover in movers:
        assert mover.mistakes == []
        assert mover.fetched > 0
        assert mover.brought > 1
        # Nobody asks for another version after the last one.
        assert mover.waited >= mover.fetched + mover.brought - 1


def test_gradients_leave_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk is copied when its last gradient is there; the script changes some that have left."""
    wanted = train_without(early, script(clipped), monkeypatch, **OPTIONS)
    count, movers = counted(monkeypatch), imagine(monkeypatch)
    assert train(script(clipped), **OPTIONS).digests == wanted
    assert 0 < count["sealed"] < count["begun"]
    assert [mover.mistakes for mover in movers] == [[], []]
    steps = 6
    assert all(mover.fetched > 3 * steps for mover in movers)


def clipped(ctx: Context, number: int) -> None:
    """The script itself clips one of its gradients."""
    if ctx.version == 3:
        torch.nn.utils.clip_grad_norm_(model_of(ctx).parameters(), 0.01)
