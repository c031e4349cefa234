"""Batches that are the script's own: what it changes in them is seen by no slice that is computed again.

A script may change a batch in its place (``x.div_(255)``). A slice may be computed twice, also by another worker. So a
batch that is kept, or that lies in the memory of the data set, is handed out as a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate


class OwnCollate:
    """A ``collate_fn`` whose batches share no memory with the samples, which the data set may keep."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        batch = self.collate(samples)
        if self.collate is default_collate:  # it makes new tensors
            return batch
        kept = set(_addresses(samples))
        return _apart(batch, kept) if kept.intersection(_addresses(batch)) else batch


def _apart(value: Any, kept: set[int]) -> Any:
    """The same with copies of tensors and arrays that lie at these addresses."""
    if isinstance(value, torch.Tensor):
        return value.clone() if kept.intersection(_addresses(value)) else value
    if isinstance(value, np.ndarray):
        return value.copy() if kept.intersection(_addresses(value)) else value
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update({key: _apart(one, kept) for key, one in value.items()})
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_apart(one, kept) for one in value))
    if type(value) in (list, tuple):
        return type(value)(_apart(one, kept) for one in value)
    return value


def _addresses(value: Any) -> Iterator[int]:
    """Where the memory of tensors and arrays begins, in dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and value.numel():
            yield value.untyped_storage().data_ptr()
    elif isinstance(value, np.ndarray):
        base = value
        while isinstance(base.base, np.ndarray):
            base = base.base
        yield base.ctypes.data
        yield value.ctypes.data
    elif isinstance(value, dict):
        for one in value.values():
            yield from _addresses(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _addresses(one)
