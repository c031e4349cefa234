"""Batches on the device of the model. A batch keeps its class."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device, and with the classes that it had. On the CPU it is the batch itself.

    Tensors are looked for in tuples, lists, dicts, and in what is derived from them; everything else stays as it is.

    >>> to_device({"x": torch.ones(2)}, torch.device("meta"))["x"].device
    device(type='meta')
    """
    return batch if device.type == "cpu" else _moved(batch, device)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return _copy(batch, [(key, _moved(value, device)) for key, value in batch.items()])
    if isinstance(batch, list):
        return _copy(batch, enumerate([_moved(value, device) for value in batch]))
    if isinstance(batch, tuple):
        return _tuple(batch, [_moved(value, device) for value in batch])
    return batch


def _copy(batch: Any, values: Iterable[tuple[Any, Any]]) -> Any:
    """A copy of a dict or list, which may be of a class of the script, with these values."""
    made = copy.copy(batch)
    if getattr(batch, "__dict__", None) is batch:  # a dict whose keys are its attributes
        made.__dict__ = made
    for key, value in values:
        made[key] = value
    return made


def _tuple(batch: Any, values: list[Any]) -> Any:
    kind = type(batch)
    try:
        made = tuple.__new__(kind, values)  # not by a `__new__` of the script, which may take other arguments
    except TypeError:  # the named results of torch's functions
        return kind(values)
    if vars_ := getattr(batch, "__dict__", None):
        made.__dict__.update(vars_)
    return made
