"""Digests of samples and batches: of what is in them, so that workers can compare them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from paramserver.tensors.dtypes import buffer_of


def digest_of(value: Any, size: int = 8) -> tuple[int, str]:
    """A whole number of ``size`` bytes, and the name of a type that could not be looked into (empty: there is none).

    Tensors, arrays, numbers, texts, bytes and images count by their content, and so do lists, tuples, dicts, sets and
    dataclasses of them. Other objects count by their type.
    """
    found, unknown = hashlib.blake2b(digest_size=size), [""]
    _add(value, found, unknown, 0)
    return int.from_bytes(found.digest(), "little"), unknown[0]


def _add(one: Any, found: Any, unknown: list[str], depth: int) -> None:
    if isinstance(one, torch.Tensor):
        plain = one.detach().resolve_conj().resolve_neg()
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        plain = plain.to("cpu").contiguous()
        found.update(f"{plain.dtype} {tuple(plain.shape)} ".encode())
        found.update(buffer_of(plain))
    elif isinstance(one, np.ndarray | np.generic):
        array = np.asarray(one)
        found.update(f"{array.dtype} {array.shape} ".encode())
        if array.dtype.hasobject:
            _add(array.tolist(), found, unknown, depth + 1)
        else:
            found.update(np.ascontiguousarray(array).tobytes())
    elif one is None or isinstance(one, str | int | float | complex):
        found.update(f"{one!r} ".encode("utf-8", "surrogatepass"))
    elif isinstance(one, bytes | bytearray | memoryview):
        found.update(f"{len(one)} ".encode())
        found.update(bytes(one))
    elif depth > 20:
        unknown[0] = unknown[0] or type(one).__name__
    else:
        _add_parts(one, found, unknown, depth + 1)


def _add_parts(one: Any, found: Any, unknown: list[str], depth: int) -> None:
    if isinstance(one, Mapping):
        for key, inner in sorted(one.items(), key=lambda item: repr(item[0])):
            found.update(f"{key!r}: ".encode("utf-8", "surrogatepass"))
            _add(inner, found, unknown, depth)
    elif isinstance(one, list | tuple):
        found.update(f"{len(one)} ".encode())
        for inner in one:
            _add(inner, found, unknown, depth)
    elif isinstance(one, set | frozenset):
        _add(sorted(map(repr, one)), found, unknown, depth)
    elif dataclasses.is_dataclass(one) and not isinstance(one, type):
        for field in dataclasses.fields(one):
            _add(getattr(one, field.name, None), found, unknown, depth)
    elif callable(getattr(one, "tobytes", None)) and hasattr(one, "size") and hasattr(one, "mode"):  # an image of PIL
        found.update(f"{one.mode} {one.size} ".encode())
        found.update(one.tobytes())
    else:
        found.update(type(one).__name__.encode())
        unknown[0] = unknown[0] or type(one).__name__
