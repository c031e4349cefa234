"""Results that a script gathers, as bytes, without pickle: numbers, texts, tensors, arrays, and containers of them."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import torch

from paramserver import errors

# Bytes of one result.
MOST_BYTES = 1 << 20
_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )
}
_HEAD = struct.Struct("<I")


def encode(value: Any) -> bytes:
    """The bytes of a result. Raises UserError for what is none, and for one of more than 1 MiB."""
    parts: list[bytes] = []
    tree = json.dumps(_tree(value, parts), separators=(",", ":")).encode()
    found = b"".join([_HEAD.pack(len(tree)), tree, *parts])
    if len(found) > MOST_BYTES:
        raise errors.UserError(
            f"ctx.gather was given a result of {len(found)} bytes: {MOST_BYTES} is the most for a batch; give it sums, "
            "or the predicted classes instead of the outputs of the model"
        )
    return found


def decode(data: bytes) -> Any:
    """The value of these bytes. Tensors are on the CPU. Raises ProtocolError for other bytes."""
    try:
        (size,) = _HEAD.unpack_from(data)
        tree = json.loads(data[_HEAD.size : _HEAD.size + size])
        value, rest = _value(tree, memoryview(data)[_HEAD.size + size :])
    except (ValueError, KeyError, TypeError, struct.error, RecursionError, RuntimeError) as error:
        raise errors.ProtocolError(f"a result of ctx.evaluate cannot be read: {error}") from error
    if rest:
        raise errors.ProtocolError(f"a result of ctx.evaluate has {len(rest)} bytes too many")
    return value


def _tree(value: Any, parts: list[bytes]) -> Any:
    """The value for JSON: containers and tensors are objects with one key."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, np.generic):
        return _tree(value.item(), parts)
    if isinstance(value, np.ndarray):
        try:
            tensor = torch.from_numpy(np.ascontiguousarray(value))
        except TypeError as error:
            raise errors.UserError(f"ctx.gather cannot take an array of {value.dtype}") from error
        return {"array": _tensor(tensor.reshape(value.shape), parts)}
    if isinstance(value, torch.Tensor):
        return {"tensor": _tensor(value, parts)}
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [_tree(one, parts) for one in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _tree(one, parts) for key, one in value.items()}}
    raise errors.UserError(
        "ctx.gather takes numbers, texts, tensors and arrays, and lists, tuples and dicts of them, "
        f"not {type(value).__name__}"
    )


def _tensor(tensor: torch.Tensor, parts: list[bytes]) -> list[Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _TYPES:
        raise errors.UserError(f"ctx.gather cannot take a tensor of {tensor.dtype}")
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    parts.append(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return [dtype, *tensor.shape]


def _value(tree: Any, rest: memoryview) -> tuple[Any, memoryview]:
    """The value of a tree, and the bytes after those of its tensors."""
    if not isinstance(tree, dict):
        return tree, rest
    ((kind, inner),) = tree.items()
    if kind in ("tensor", "array"):
        dtype, *shape = inner
        size = torch.Size(shape).numel() * _TYPES[dtype].itemsize
        if size > len(rest):
            raise ValueError("bytes are missing")
        flat = (
            torch.frombuffer(bytearray(rest[:size]), dtype=_TYPES[dtype])
            if size
            else torch.empty(0, dtype=_TYPES[dtype])
        )
        tensor = flat.reshape(shape)
        return tensor if kind == "tensor" else tensor.numpy(), rest[size:]
    values = []
    for one in inner.values() if kind == "dict" else inner:
        value, rest = _value(one, rest)
        values.append(value)
    if kind == "dict":
        return dict(zip(inner, values, strict=True)), rest
    return {"list": list, "tuple": tuple}[kind](values), rest
