"""What scripts that are moved here do beside training: they leave batches out, look at options, and change groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from structlog.testing import capture_logs
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.tensors.dtypes import in_model_type, real_of
from paramserver.worker.context import Context
from tests.support.cluster.harness import Outcome, inside, train
from tests.support.cluster.programs import FEATURES, Aligned, adamw, dataset, sgd
from tests.support.cluster.reference import slice_by_slice, slices_of_steps

SAMPLES, BATCH, EPOCHS = 48, 8, 2
DATA = dataset(SAMPLES)
cross_entropy: Any = F.cross_entropy


# ---- batches that are left out


def leaves_out(ctx: Context) -> None:
    """Clears gradients before the backward pass only, so those of the batch before are still there."""
    model: Any = Aligned()
    optimizer: Any = adamw(model.parameters())
    loader: Any = DataLoader(DATA, batch_size=BATCH)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    for _ in ctx.epochs(EPOCHS):
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            if left_out(x):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def left_out(x: Tensor) -> bool:
    return any(torch.equal(x[0], DATA[at][0]) for at in (8, 40))


@pytest.mark.parametrize("slices", [1, 2])
def test_a_batch_may_be_left_out_while_gradients_of_the_one_before_are_there(slices: int) -> None:
    with capture_logs() as logs:
        outcomes = [train(leaves_out, w, s, slices_per_step=slices) for w, s in ((1, 1), (2, 2))]
    assert outcomes[0].digests == outcomes[1].digests
    assert sum("its slice counts without samples" in entry["event"] for entry in logs) >= 1
    if slices == 1:
        model = Aligned()
        batches = [(x, y) for _ in range(EPOCHS) for x, y in DataLoader(DATA, batch_size=BATCH)]
        steps = [[(x, y)] for x, y in batches if not left_out(x)]
        slice_by_slice(model, adamw(model.parameters(), fused=True), steps, cross_entropy)
        for name, parameter in model.named_parameters():
            assert torch.equal(outcomes[1].tensor(name), parameter.detach()), name


@pytest.mark.parametrize("clears", [True, False])
def test_gradients_of_the_batch_that_is_left_out_are_refused(clears: bool) -> None:
    """Also where they lie in the memory of those that were cleared."""

    def script(ctx: Context) -> None:
        model: Any = Aligned()
        optimizer: Any = sgd(model.parameters())
        loader: Any = DataLoader(DATA, batch_size=BATCH)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        for number, (x, y) in enumerate(loader):
            if clears:
                optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            if number == 1:
                continue
            optimizer.step()

    with pytest.raises(errors.UserError, match="has gradients of the present one"):
        inside(script)
