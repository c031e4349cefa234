"""torch.optim without torch.compile: a process that compiles nothing need not load the compiler.

The first use of any optimizer loads it, to exempt parts of the optimizer from compilation, and that takes more than a
second of every process that starts or is started again. Here these parts are exempt from the exemption until something
else has loaded the compiler; from then on everything is as torch has it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from paramserver.tensors import private

# Where torch keeps the exempt version of a function, once it has one.
_KEPT = "__dynamo_disable"
_COMPILER = "torch._dynamo"


def postpone_compiler() -> None:
    """Let optimizers do without the compiler until it is loaded. For the beginning of a process; may be repeated.

    If a later torch keeps the exempt version elsewhere, this has no effect, and processes start a second later.
    """
    private.tell()
    for member in list(vars(Optimizer).values()):
        outer = getattr(member, "__func__", member)
        inner = getattr(outer, "__wrapped__", None)
        if getattr(outer, "__module__", "").startswith("torch") and private.is_exempt(outer) and inner is not None:
            _postpone(outer, inner)


def _postpone(outer: Callable[..., Any], inner: Any) -> None:
    if hasattr(inner, _KEPT):
        return

    def plain(*args: Any, **kwargs: Any) -> Any:
        if _COMPILER not in sys.modules:
            return inner(*args, **kwargs)
        delattr(inner, _KEPT)
        return outer(*args, **kwargs)

    setattr(inner, _KEPT, plain)


def step(optimizer: Optimizer) -> None:
    """A step on gradients that are there, as ``optimizer.step()`` does, without its hooks."""
    with torch.no_grad():
        _plain_step(type(optimizer))(optimizer)


_plain_steps: dict[type[Optimizer], Callable[[Optimizer], Any]] = {}


def _plain_step(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    if kind not in _plain_steps:
        _plain_steps[kind] = inspect.unwrap(kind.step)
    return _plain_steps[kind]
