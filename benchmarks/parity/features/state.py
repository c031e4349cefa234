"""Rows about saved state: it goes from here to plain torch, and back."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.parity.rows import PLAIN, Row, Tensors
from benchmarks.parity.sides import Plain, Side
from benchmarks.parity.training import Training, adamw
from tests.support.cluster.programs import Aligned

SLICES = 2
ONE = Training(epochs=1)


def goes_on(side: Side, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """An epoch of a script that loads model and optimizer before ``prepare``."""

    def model() -> Aligned:
        made = Aligned()
        made.load_state_dict(state["model"])
        return made

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = adamw(parameters)
        made.load_state_dict(state["optimizer"])
        return made

    return Training(model=model, optimizer=optimizer, epochs=1)(side)


def state_after_an_epoch(side: Side) -> dict[str, Any]:
    """The state that a side gives for saving."""
    ONE(side)
    return side.state()


def to_plain(side: Side) -> Tensors:
    """An epoch on the side, and another epoch in plain torch from the side's state."""
    return goes_on(Plain(SLICES), state_after_an_epoch(side))


def from_plain(side: Side) -> Tensors:
    """An epoch in plain torch, and another epoch on the side from torch's state."""
    return goes_on(side, state_after_an_epoch(Plain(SLICES)))


def loaded(side: Side) -> Tensors:
    """The same with ``ctx.load`` between ``prepare`` and the first epoch."""
    state = state_after_an_epoch(Plain(SLICES))
    return Training(epochs=1, each=lambda model, epoch: side.load(state))(side)


ROWS = [
    Row("`ctx.state_dict()` loaded into plain torch, which goes on", PLAIN, to_plain),
    Row("`load_state_dict` of model and optimizer before `prepare`", PLAIN, from_plain),
    Row("`ctx.load` after `prepare`", PLAIN, loaded),
]
