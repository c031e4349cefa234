"""A training job whose gradients leave while the backward pass computes them."""

from __future__ import annotations

from typing import Any

from paramserver.worker.context import Context
from tests.support.cluster.programs import Program, adamw, dataset, network

DATA = dataset(48)
OPTIONS: dict[str, Any] = {"workers": 2, "servers": 2, "settings": {"training.chunk_bytes": 832}}


def script(each: Any = None, **options: Any) -> Program:
    return Program(DATA, 8, 2, lambda: network(hidden=300, norm=True), adamw, each=each, **options)


def clip(ctx: Context, number: int) -> None:
    ctx.clip_grad_norm(0.1)
