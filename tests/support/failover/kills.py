"""Processes that are killed when a number of slices has begun, and the ledger that must come out."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from paramserver.worker.context import Context
from tests.support.failover.ledger import CELLS, PER_EPOCH
from tests.support.failover.rollback import Rig


class Kills:
    """Kills processes when so many slices have been begun, all workers together."""

    def __init__(self, *at: tuple[int, tuple[str, ...]]) -> None:
        self.left = sorted(at)
        self.rig: Rig | None = None
        self._begun = 0
        self._lock = threading.Lock()

    def __call__(self, ctx: Context, slices: int) -> None:
        with self._lock:
            self._begun += 1
            while self.left and self._begun >= self.left[0][0]:
                assert self.rig is not None
                self.rig.kill_now(*self.left.pop(0)[1])


def exact(rig: Rig, summary: Mapping[str, Any], epochs: int, slices_per_step: int = 1) -> None:
    """Each cell once per epoch, and as many contributions as there are slices."""
    assert torch.equal(rig.final("cells"), torch.full((CELLS,), float(epochs)))
    assert summary["contributions_applied"] == PER_EPOCH * epochs
    if slices_per_step == 1:
        assert summary["steps"] == PER_EPOCH * epochs
