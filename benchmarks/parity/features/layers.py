"""Rows about layers and parameters of models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.parity.features.loops import Partly, compiled
from benchmarks.parity.rows import DDP, PLAIN, ROUNDING, Row
from benchmarks.parity.training import Training, sgd
from tests.support.layers import Adapted, Branching, Checkpointed, Pictures, adapters

UNUSED = {"find_unused_parameters": True}


def beside_both(
    feature: str, model: Callable[[], nn.Module], within: float = 0.0, ddp: Any = None, **parts: Any
) -> list[Row]:
    """The rows of a model."""
    train = Training(model=model, **parts)
    return [Row(feature, PLAIN, train, within), Row(feature, DDP, train, within, ddp=ddp or {})]


ROWS = [
    *beside_both("Activation checkpointing", partial(Checkpointed, False)),
    *beside_both("Activation checkpointing, `use_reentrant=True`", partial(Checkpointed, True)),
    *beside_both("Control flow that differs between slices", Branching, ddp=UNUSED),
    Row("Parameters without a gradient have no decay: `AdamW`", PLAIN, Training(model=Partly)),
    Row("Parameters without a gradient have no momentum: `SGD`", PLAIN, Training(model=Partly, optimizer=sgd)),
    *beside_both("`channels_last`", partial(Pictures, torch.channels_last), ROUNDING),
    *beside_both(
        "Adapters on a quantised, frozen base",
        Adapted,
        optimizer=lambda parameters: adapters(parameters, fused=True),
    ),
    Row("`torch.compile`", DDP, Training(model=compiled)),
]
