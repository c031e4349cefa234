"""Random numbers of a slice: the same on every worker."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed torch (the CPU and all devices in use), NumPy and Python with a number in [0, 2**63).

    Does the same as `torch.manual_seed`, except for devices that are not in use. For each of these `torch.manual_seed`
    records the whole call stack, which takes longer than a small slice.
    """
    torch.default_generator.manual_seed(seed)
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if device.is_initialized():
            device.manual_seed_all(seed)
    if _mps():
        torch.mps.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def states() -> tuple[object, ...]:
    """The states of the generators of torch (CPU), NumPy and Python; equal tuples mean equal numbers."""
    of_numpy: Any = np.random.get_state()
    kind, key, *rest = of_numpy
    return torch.default_generator.get_state().numpy().tobytes(), (kind, key.tobytes(), *rest), random.getstate()


def restore(former: tuple[Any, ...]) -> None:
    """Restore the states that `states` returned."""
    of_torch, (kind, key, *rest), of_python = former
    torch.default_generator.set_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))
    np.random.set_state((kind, np.frombuffer(key, np.uint32), *rest))
    random.setstate(of_python)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context in which the generators of torch (CPU), NumPy and Python begin with a seed in [0, 2**63).

    After the context they are as they were before.
    """
    former = states()
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
    try:
        yield
    finally:
        restore(former)


@cache
def _mps() -> bool:
    return torch.backends.mps.is_available()
