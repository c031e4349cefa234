"""Notices which parameters a script reads, just before each read.

torch tells a *function mode* of every call of its functions in a thread, with the tensors that are its arguments:
`F.linear(x, weight)`, `weight.detach()`, `weight.data.numpy()`, pickling. So it does not matter which module owns a
parameter, or whether it is read by a module at all. Some reads torch does not report (other threads, compiled code).
They are noticed afterwards: a parameter then has a gradient without a read.
"""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from paramserver.tensors.private import function_modes


class Reader(Protocol):
    """Is told of each read of a parameter."""

    def read(self, tensor: int) -> None:
        """The parameter of this index is about to be read."""

    def read_all(self) -> None:
        """All parameters may be about to be read."""

    def complete(self) -> None:
        """From now on parameters may be read without a report."""


# Properties and methods that tell facts about a tensor, and do not read its elements.
_PROPERTIES = (
    *("grad", "requires_grad", "is_leaf", "retains_grad", "grad_fn", "output_nr", "_version", "_backward_hooks"),
    *("_post_accumulate_grad_hooks", "shape", "ndim", "dtype", "device", "layout", "names", "itemsize", "nbytes"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "is_xpu", "is_mps", "is_nested"),
)
_METHODS = (
    *("size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "storage_offset", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "has_names", "__hash__", "__len__"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
)


def _harmless() -> frozenset[Callable[..., Any]]:
    found: set[Callable[..., Any]] = set()
    for name in _PROPERTIES:
        slot = getattr(torch.Tensor, name, None)
        found.update(getattr(slot, part) for part in ("__get__", "__set__", "__delete__") if hasattr(slot, part))
    found.update(getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name))
    return frozenset(found)


_HARMLESS = _harmless()
# The types of which it is known where their elements lie.
_PLAIN = frozenset((torch.Tensor, nn.Parameter))


class Reads(TorchFunctionMode):
    """Reports reads of these parameters, and of tensors that share their memory, in the thread that calls `begin`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._index = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._parameters = parameters  # kept alive, so that no other object gets their ids
        # Where they lie, in the order of their addresses: begin, end, index.
        self._places: list[tuple[int, int, int]] = []
        self._reader: Reader | None = None

    @property
    def count(self) -> int:
        """How many parameters there are."""
        return len(self._parameters)

    def begin(self, reader: Reader, views: Sequence[torch.Tensor]) -> bool:
        """Report to ``reader`` from now on; False where that is not possible, as if parameters are not these views."""
        stack = function_modes()
        if stack is None or (self not in stack and (stack or _compiled())):
            return False  # the script's own mode may end before this one
        begins = [parameter.data_ptr() for parameter in self._parameters]
        if begins != [view.data_ptr() for view in views]:
            return False
        self._places = sorted(
            (begin, begin + parameter.nbytes, index)
            for index, (begin, parameter) in enumerate(zip(begins, self._parameters, strict=True))
        )
        self._reader = reader
        if self not in stack:
            self.__enter__()  # type: ignore[no-untyped-call]
        return True

    def end(self) -> None:
        """Report no more."""
        self._reader = None
        stack = function_modes()
        if stack and stack[-1] is self:  # below a mode of the script it stays, and does nothing
            self.__exit__(None, None, None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Torch calls this method in place of ``func``."""
        # Compiled code would not wait.
        if self._reader is not None and not torch.compiler.is_compiling() and func not in _HARMLESS:
            self._tell(self._reader, func, args, kwargs)
        return func(*args, **(kwargs or {}))

    def _tell(
        self, reader: Reader, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None
    ) -> None:
        if func is torch.Tensor.backward:  # within it, this mode does not hear of anything
            reader.complete()
            return
        self._look(reader, args)
        if kwargs:
            self._look(reader, kwargs.values())

    def _look(self, reader: Reader, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                index = self._index.get(id(value))
                if index is not None:
                    reader.read(index)
                else:
                    self._look_behind(reader, value)
            elif isinstance(value, list | tuple):
                self._look(reader, value)
            elif isinstance(value, dict):
                self._look(reader, value.values())

    def _look_behind(self, reader: Reader, tensor: torch.Tensor) -> None:
        """A tensor that is no parameter may share the memory of parameters."""
        try:
            begin = tensor.data_ptr() if type(tensor) in _PLAIN else None
        except RuntimeError:  # for example a tensor that torch.func wraps
            begin = None
        if begin is None:
            reader.read_all()
            return
        at = bisect.bisect_right(self._places, (begin, math.inf)) - 1
        if at < 0 or begin >= self._places[-1][1]:
            return
        end = begin + _extent(tensor)
        for first, last, index in self._places[at:]:
            if first >= end:
                return
            if last > begin:
                reader.read(index)


def _extent(tensor: torch.Tensor) -> int:
    """The number of bytes from the first byte of a tensor to its last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size() if tensor.numel() else 0


def _compiled() -> bool:
    """Whether torch was asked to compile something here: it would compile again where a mode has come or gone."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    backends: dict[int, object] = getattr(dynamo, "cached_backends", {})
    return any(backend is not None for backend in backends.values())
