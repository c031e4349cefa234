"""State dicts as bytes: tensors in the format of safetensors, all else as JSON beside them. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from paramserver import errors
from paramserver.checkpoint.header import LENGTH, Entry, decode, encode, header_bytes
from paramserver.tensors.dtypes import SIZES, buffer_of, tensor_from

# The key of the JSON in the metadata.
_KEY = "registered"
_PLAIN = (str, int, float, bool, type(None))


def packed(states: Mapping[str, Any]) -> bytes:
    """The states of objects by name, as bytes. Raises UserError, naming the entry, for a value that cannot be kept."""
    tensors: list[Tensor] = []
    skeleton = json.dumps({name: _skeleton(state, name, tensors) for name, state in states.items()})
    entries = [
        Entry(str(number), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for number, tensor in enumerate(tensors)
    ]
    return b"".join((encode(entries, {_KEY: skeleton}), *(buffer_of(tensor) for tensor in tensors)))


def _skeleton(value: Any, where: str, tensors: list[Tensor]) -> Any:
    """The value for JSON: a plain value, or a list of a word and what it holds."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        if str(value.dtype).removeprefix("torch.") not in SIZES or value.layout is not torch.strided:
            raise errors.UserError(f"ctx.register keeps dense tensors of numbers, and {where} is {value.dtype}")
        tensors.append(value.detach().to("cpu").contiguous().clone())
        return ["tensor", len(tensors) - 1]
    if isinstance(value, Mapping):
        if not all(type(key) in (str, int) for key in value):
            raise errors.UserError(f"ctx.register keeps dicts whose keys are texts or whole numbers, not {where}")
        return ["dict", *([key, _skeleton(one, f"{where}.{key}", tensors)] for key, one in value.items())]
    if type(value) in (list, tuple):
        word = type(value).__name__
        return [word, *(_skeleton(one, f"{where}.{number}", tensors) for number, one in enumerate(value))]
    raise errors.UserError(
        f"ctx.register cannot keep {where}, a {type(value).__name__}: a state may hold tensors, numbers, "
        "texts, true, false and None, and lists, tuples and dicts of these"
    )


def unpacked(data: bytes) -> dict[str, Any]:
    """The states by name. Raises CheckpointError for bytes that :func:`packed` has not made."""
    length = header_bytes(data[: LENGTH.size], len(data))
    header = decode(data[LENGTH.size : LENGTH.size + length], len(data))
    tensors: dict[str, Tensor] = {}
    for name, entry in header.entries.items():
        start = header.offsets[name]
        raw = bytearray(data[start : start + entry.nbytes])
        tensors[name] = tensor_from(raw, entry.dtype).view(entry.shape)
    try:
        found = json.loads(header.metadata[_KEY])
        return {name: _value(one, tensors) for name, one in found.items()}
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise errors.CheckpointError(f"the state of registered objects makes no sense: {error}") from error


def _value(given: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(given, list):
        if type(given) not in _PLAIN:
            raise ValueError(f"{type(given).__name__} stands where a value should")
        return given
    word, *rest = given
    if word == "tensor":
        return tensors[str(rest[0])]
    if word == "dict":
        return dict(_pairs(rest, tensors))
    return {"list": list, "tuple": tuple}[word](_value(one, tensors) for one in rest)


def _pairs(given: list[Any], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str | int, Any]]:
    for key, value in given:
        yield key, _value(value, tensors)
