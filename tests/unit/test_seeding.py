"""Seeding gives the numbers that torch, NumPy and Python give after their own ways of seeding."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from paramserver.worker.data.seeding import seed_everything


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 5, 2**63 - 1])
def test_the_same_numbers(seed: int) -> None:
    seed_everything(seed)
    found = torch.rand(4), np.random.rand(4), random.random()
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    assert torch.equal(found[0], torch.rand(4))
    assert np.array_equal(found[1], np.random.rand(4))
    assert found[2] == random.random()


@pytest.mark.parametrize("name", ["cuda", "xpu", "mtia"])
@pytest.mark.parametrize("used", [False, True])
def test_devices_in_use(name: str, used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []  # torch.mtia of torch 2.6 cannot be seeded
    monkeypatch.setattr(getattr(torch, name), "is_initialized", lambda: used)
    monkeypatch.setattr(
        getattr(torch, name), "manual_seed_all", seeds.append, raising=False
    )  # torch.mtia of torch 2.6 lacks it
    seed_everything(5)
    assert seeds == ([5] if used else [])
