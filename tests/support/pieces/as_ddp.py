"""A script as people write it for DistributedDataParallel, and the comparison of its result with plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paramserver.worker.context import Context
from tests.support.cluster.harness import Outcome, train
from tests.support.cluster.programs import Aligned, adamw, dataset
from tests.support.cluster.reference import slice_by_slice, slices_of_steps

SAMPLES, BATCH, SLICES, EPOCHS = 48, 8, 2, 2
DATA = dataset(SAMPLES)
Build = Callable[[], nn.Module]
Backward = Callable[[Any, Tensor, Tensor], object]
cross_entropy: Any = F.cross_entropy


def of_the_loss(model: Any, x: Tensor, y: Tensor) -> None:
    cross_entropy(model(x), y).backward()


class Script:
    """Trains, with the gradients that ``backward`` makes. ``prepared`` and ``epoch`` are called with each model."""

    def __init__(
        self,
        build: Build = Aligned,
        backward: Backward = of_the_loss,
        prepared: Callable[[Any], object] = lambda model: None,
        epoch: Callable[[Context, Any], object] = lambda ctx, model: None,
    ) -> None:
        self.build, self.backward, self.prepared, self.epoch = build, backward, prepared, epoch

    def __call__(self, ctx: Context) -> None:
        model: Any = self.build()
        optimizer: Any = adamw(model.parameters())
        loader: Any = DataLoader(DATA, batch_size=BATCH, shuffle=True)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        self.prepared(model)
        for _ in ctx.epochs(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                self.backward(model, x, y)
                optimizer.step()
            self.epoch(ctx, model)


def compare(script: Script, exact: bool = True) -> Outcome:
    """Two workers and two servers have the bits of plain torch (``exact``), or are close to it."""
    outcome = train(script, 2, 2, slices_per_step=SLICES)
    model = script.build()
    script.prepared(model)
    optimizer = adamw(model.parameters(), fused=True)
    steps = slices_of_steps(DATA, BATCH, SLICES, EPOCHS)
    slice_by_slice(model, optimizer, steps, cross_entropy, backward=script.backward)
    for name, parameter in model.named_parameters():
        found, expected = outcome.tensor(name), parameter.detach()
        if exact:
            assert torch.equal(found, expected), name
        else:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=name)
    return outcome
