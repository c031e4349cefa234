"""A training job whose gradients leave while the backward pass computes them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from paramserver.core.versions import drafts
from paramserver.worker.context import Context
from paramserver.worker.device import Ticket
from paramserver.worker.gradients import early
from paramserver.worker.gradients.early import EarlyPushes
from paramserver.worker.gradients.leaving import Leaving
from tests.support.cluster.programs import Program, adamw, dataset, network

DATA = dataset(48)
OPTIONS: dict[str, Any] = {"workers": 2, "servers": 2, "settings": {"training.chunk_bytes": 832}}


def script(each: Any = None, **options: Any) -> Program:
    return Program(DATA, 8, 2, lambda: network(hidden=300, norm=True), adamw, each=each, **options)


def clip(ctx: Context, number: int) -> None:
    ctx.clip_grad_norm(0.1)


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Small models leave early, too. Counts the contributions that began to, and those that were right in the end."""
    found: Counter[str] = Counter()
    begin, seal = EarlyPushes.begin, Leaving.seal

    def counted_begin(self: EarlyPushes, *args: Any) -> Leaving:
        found["begun"] += 1
        return begin(self, *args)

    def counted_seal(self: Leaving, ticket: Ticket | None = None) -> None:
        found["sealed"] += self.push is not None
        seal(self, ticket)

    monkeypatch.setattr(early, "LEAST_BYTES", 0)
    monkeypatch.setattr(drafts, "DRAFT_BYTES", 0)
    monkeypatch.setattr(EarlyPushes, "begin", counted_begin)
    monkeypatch.setattr(Leaving, "seal", counted_seal)
    return found
