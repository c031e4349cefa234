"""Element types: their names, sizes, numbers on the wire, and their numpy and torch counterparts.

Names are torch's without the prefix ("float32"). Only float32 and float64 travel and are trained, the others occur in
models. torch is imported when a function needs it, so that processes which only move bytes stay small.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from paramserver.errors import ModelError, ProtocolError
from paramserver.v1 import types_pb2 as types

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

# Bytes of one element, for every type that a model may have.
SIZES: Mapping[str, int] = MappingProxyType(
    {
        "float16": 2,
        "bfloat16": 2,
        "float32": 4,
        "float64": 8,
        "bool": 1,
        "uint8": 1,
        "int8": 1,
        "int16": 2,
        "int32": 4,
        "int64": 8,
    }
)

# Those of them that numpy has, too, with the same name.
_NUMPY = frozenset(SIZES) - {"bfloat16"}

# The types that travel.
WIRE: Mapping[str, types.DType] = MappingProxyType(
    {"float32": types.DTYPE_FLOAT32, "float64": types.DTYPE_FLOAT64},
)


def itemsize(dtype: str) -> int:
    """Bytes of one element. Raises ModelError for a type that paramserver does not know."""
    size = SIZES.get(dtype)
    if size is None:
        raise ModelError(f"element type {dtype[:40]!r} is not supported; use one of {', '.join(SIZES)}")
    return size


def wire_dtype(dtype: str) -> types.DType:
    """The number of a type on the wire. Raises ModelError for a type that does not travel."""
    number = WIRE.get(dtype)
    if number is None:
        raise ModelError(f"element type {dtype[:40]!r} does not travel; convert to one of {', '.join(WIRE)} first")
    return number


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch type. Raises ModelError for a type that paramserver does not know."""
    import torch

    itemsize(dtype)
    found = getattr(torch, dtype)
    assert isinstance(found, torch.dtype)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch type. Raises ModelError for complex, quantised and other unsupported types."""
    name = str(dtype).removeprefix("torch.")
    itemsize(name)
    return name


def in_model_type(master: torch.Tensor, wanted: torch.dtype) -> torch.Tensor:
    """Values of the master type in the model's type: rounded for whole numbers; above 0.5 is true; see `real_of`."""
    import torch

    if wanted is torch.bool:
        return master > 0.5
    if wanted.is_complex:
        return torch.view_as_complex(master.to(wanted.to_real(), copy=True))
    return (master if wanted.is_floating_point else master.round()).to(wanted)


def real_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in real numbers, as it travels: a complex one has a last dimension for real and imaginary part."""
    import torch

    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


class _Memory:
    """Shows bytes to numpy as writable, and keeps their owner alive."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, owner: object, address: int, nbytes: int) -> None:
        self.owner = owner
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def tensor_from(buffer: Buffer, dtype: str) -> torch.Tensor:
    """A flat tensor that shares the memory of ``buffer`` and keeps it alive; nothing is copied.

    The tensor is for reading only, whatever torch thinks: the bytes usually belong to a received message, which others
    may read, too. Raises ProtocolError if the length is not a multiple of the element size.
    """
    import torch

    size = itemsize(dtype)
    array = np.frombuffer(memoryview(buffer), dtype=np.uint8)
    if array.size % size:
        raise ProtocolError(f"{array.size} bytes are no whole number of {dtype} elements of {size} bytes")
    if not array.size:
        return torch.empty(0, dtype=torch_dtype(dtype))
    # torch warns about read-only arrays, and silencing a warning is not safe between threads.
    memory = np.asarray(_Memory(array, array.ctypes.data, array.size))
    # Each operation of torch gives the interpreter's lock away, and then waits for other threads to get it back.
    if dtype in _NUMPY:
        return torch.from_numpy(memory.view(dtype))
    return torch.from_numpy(memory).view(torch_dtype(dtype))


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; keeps the tensor's memory alive."""
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    if not tensor.numel():
        return memoryview(b"")
    # Memory does not tell that its numbers are to be read conjugated or negated.
    assert not tensor.is_conj()
    assert not tensor.is_neg()
    # Without operations of torch: see `tensor_from`.
    return np.asarray(_Memory(tensor, tensor.data_ptr(), tensor.nbytes)).data
