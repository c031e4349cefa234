"""Rows about work that workers share: evaluations, their results, and agreements."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.parity.rows import DDP, PLAIN, Row, Tensors
from benchmarks.parity.sides import Data, Side
from benchmarks.parity.training import DATA, EPOCHS, flat
from tests.support.cluster.programs import Aligned, dataset

# 12 batches, the last one of two samples.
HELD_OUT = Data(dataset(46))
PATIENCE, AT_MOST = 1, 12


class Loop:
    """A model that trains, and is measured between epochs."""

    def __init__(self, side: Side) -> None:
        self.side = side
        model: Any = Aligned()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.5, momentum=0.9, fused=True)
        self.model, self.optimizer, self.loader = side.prepare(model, optimizer, DATA)

    def epoch(self) -> None:
        """Trains."""
        for x, y in self.loader:
            self.side.weighed(F.cross_entropy(self.model(x), y)).backward()  # type: ignore[no-untyped-call]
            if self.side.due:
                self.optimizer.step()
                self.optimizer.zero_grad()

    @torch.no_grad()
    def losses(self) -> list[Tensor]:
        """Of each batch that is held out."""
        return self.side.evaluate(HELD_OUT, lambda x, y: F.cross_entropy(self.model(x), y, reduction="sum"))


def measured(side: Side) -> Tensors:
    """The results of all batches after each epoch."""
    loop, found = Loop(side), list[Tensor]()
    for _ in side.epochs(EPOCHS):
        loop.epoch()
        found += loop.losses()
    return {**flat(side.state()), "losses": torch.stack(found)}


def stops_early(side: Side) -> Tensors:
    """Ends when the loss has not fallen for some epochs, and takes the best weights."""
    loop, best, waited, epochs = Loop(side), float("inf"), 0, 0
    state = side.state()
    for _ in side.epochs(AT_MOST):
        loop.epoch()
        epochs += 1
        loss = sum(one.item() for one in loop.losses()) / len(HELD_OUT.samples)
        waited = 0 if loss < best else waited + 1
        if not waited:
            best, state = loss, side.state()
        if waited > PATIENCE:
            break
    return {**flat(state), "epochs": torch.tensor(epochs), "best": torch.tensor(best)}


def stops_when_agreed(side: Side) -> Tensors:
    """Each process brings a number of its own, and all use the same one."""
    loop, epochs = Loop(side), 0
    for epoch in side.epochs(AT_MOST):
        loop.epoch()
        epochs += 1
        if side.agree(epoch) >= 2:
            break
    return {**flat(side.state()), "epochs": torch.tensor(epochs)}


ROWS = [
    Row(feature, reference, train)
    for feature, train in (
        ("`ctx.evaluate` and `ctx.gather`: the results of all batches, in order", measured),
        ("Early stopping by an evaluation, with the best weights", stops_early),
        ("`ctx.agree`: all workers stop after the same epoch", stops_when_agreed),
    )
    for reference in (PLAIN, DDP)
]
