"""The private names of torch that this package uses. A later torch may not have them any more.

Each name is looked up here, once, when this module is imported. Where torch lacks the name, the plain way stands in its
place: slower, and with the same results. `tell` says so in one line of the log.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import structlog
import torch
import torch.overrides
from torch import Tensor

log = structlog.get_logger("paramserver.torch")

_missing: list[str] = []


def _find(owner: Any, name: str) -> Any:
    found = getattr(owner, name, None)
    if found is None:
        _missing.append(f"{owner.__name__}.{name}")
    return found


@cache
def tell() -> None:
    """Log once which private names this torch lacks, if any."""
    if _missing:
        log.warning(
            "this version of torch lacks names that make some work faster, so that work goes the plain way",
            torch=torch.__version__,
            names=_missing,
        )


# ---- many tensors in one operation

_copy, _mul, _sub = (_find(torch, f"_foreach_{name}_") for name in ("copy", "mul", "sub"))
_norm = _find(torch, "_foreach_norm")


def copy_all(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """``place.copy_(value)`` for each of them."""
    if _copy is not None:
        _copy(places, values)
        return
    for place, value in zip(places, values, strict=True):
        place.copy_(value)


def scale_all(places: Sequence[Tensor], factor: float) -> None:
    """``place.mul_(factor)`` for each of them."""
    if _mul is not None:
        _mul(places, factor)
        return
    for place in places:
        place.mul_(factor)


def subtract_all(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """``place.sub_(value)`` for each of them."""
    if _sub is not None:
        _sub(places, values)
        return
    for place, value in zip(places, values, strict=True):
        place.sub_(value)


def largest_of_all(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """The largest absolute number of each tensor, as one tensor. No tensor is empty."""
    kind = float("inf")
    if _norm is not None:
        return torch.stack(_norm(tensors, kind, dtype=dtype))
    return torch.stack([torch.linalg.vector_norm(tensor, kind, dtype=dtype) for tensor in tensors])


# ---- fused optimizers

_FUSED_NAMES = {
    "sgd": ("_fused_sgd_",),
    "adam": ("_fused_adam_", "_fused_adamw_"),  # it may decay as AdamW does
    "adamw": ("_fused_adam_", "_fused_adamw_"),
    "adagrad": ("_fused_adagrad_",),
}
fused: dict[str, Callable[..., None]] = {
    name: found
    for name in dict.fromkeys(name for names in _FUSED_NAMES.values() for name in names)
    if (found := _find(torch, name)) is not None
}
# The optimizers that have a fused kernel for CPU tensors of float32 and float64.
FUSED = frozenset(optimizer for optimizer, names in _FUSED_NAMES.items() if fused.keys() >= set(names))


# ---- function modes

_stack_of_modes = _find(torch.overrides, "_get_current_function_mode_stack")
_unheard = _find(torch._C, "DisableTorchFunction") if hasattr(torch, "_C") else None


def function_modes() -> list[Any] | None:
    """The function modes of this thread; None if nobody can tell, or if no operation can be kept from them."""
    return None if _stack_of_modes is None or _unheard is None else list(_stack_of_modes())


def unheard() -> AbstractContextManager[None]:
    """Context in which torch reports no calls to function modes, since the calls there are not the script's."""
    made: AbstractContextManager[None] = contextlib.nullcontext() if _unheard is None else _unheard()
    return made


# ---- the compiler

_compile = _find(torch, "_compile")
_source = partial(inspect.getsourcefile, _compile)


def is_exempt(function: Any) -> bool:
    """Whether torch has exempted this function from compilation, which loads the compiler at the first call."""
    code = getattr(function, "__code__", None)
    return _compile is not None and code is not None and code.co_filename == _source()
