"""Optimizers that are not torch's: what a class says of itself, and which classes this process runs.

No code travels. A server imports a class only if its own configuration names it (`cluster.optimizers`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from paramserver.core.layout.hypers import HyperValue, own_name, validate
from paramserver.errors import ModelError

_Class = TypeVar("_Class", bound=type[torch.optim.Optimizer])
# Entries of parameter groups that say how torch executes an optimizer, not what it computes.
_EXECUTION = frozenset(("foreach", "fused", "capturable", "differentiable"))
# The classes that this process runs, as module:class. Set once when the process starts.
_allowed: frozenset[str] | None = frozenset()


def server_optimizer(
    *,
    arrays: Sequence[str] = (),
    numbers: Sequence[str] = (),
    counts: Sequence[str] = (),
    elementwise: bool = False,
) -> Callable[[_Class], _Class]:
    """Declare an optimizer class that servers may run. They need it in ``cluster.optimizers``, and must import it.

    The names are keys of ``self.state[parameter]``, all of which its first step makes. ``arrays``: tensors of the
    parameter's shape. ``numbers``: tensors of one element. ``counts``: whole numbers of Python. ``elementwise``: each
    element is updated from itself alone, so that a tensor may be cut; otherwise a server gets whole tensors.
    Hyper-parameters are numbers, true or false, or tuples of numbers, and are arguments of the class.

    >>> @ps.server_optimizer(elementwise=True)
    ... class Signs(torch.optim.Optimizer):
    ...     def __init__(self, params, lr=0.01):
    ...         super().__init__(params, {"lr": lr})
    ...
    ...     @torch.no_grad()
    ...     def step(self, closure=None):
    ...         for group in self.param_groups:
    ...             for p in group["params"]:
    ...                 if p.grad is not None:
    ...                     p.add_(p.grad.sign(), alpha=-group["lr"])
    """

    def declare(kind: _Class) -> _Class:
        setattr(kind, "__paramserver__", (tuple(arrays), tuple(numbers), tuple(counts), elementwise))  # noqa: B010
        return kind

    return declare


def allow(paths: Iterable[str] | None) -> None:
    """From now on this process runs these classes, each as module:class; None: any, where the script trains alone."""
    global _allowed
    _allowed = None if paths is None else frozenset(paths)


def own_class(path: str) -> type[torch.optim.Optimizer]:
    """The class at this path. Raises ModelError if this process does not run it, or cannot import it."""
    if _allowed is not None and path not in _allowed:
        raise ModelError(f"this server does not run the optimizer {path[:100]}: name it in its cluster.optimizers")
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ModelError(f"this server cannot import the optimizer {path}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and hasattr(found, "__paramserver__")):
        raise ModelError(f"{path} is no optimizer that is declared with paramserver.server_optimizer")
    return found


def describe_own(
    optimizer: torch.optim.Optimizer, param_groups: Sequence[Mapping[str, Any]]
) -> tuple[str, list[dict[str, HyperValue]]]:
    """The name of a declared optimizer, and the hyper-parameters of each of these parameter groups.

    Raises ModelError for a class that cannot be imported by its name, and for values that servers do not take.
    """
    kind: Any = type(optimizer)
    if "<locals>" in kind.__qualname__ or kind.__module__ == "__main__":
        raise ModelError(f"{kind.__qualname__} cannot be imported by servers: put the class into a module of its own")
    arrays, numbers, counts, elementwise = vars(kind)["__paramserver__"]
    name = own_name(f"{kind.__module__}:{kind.__qualname__}", arrays, numbers, counts, not elementwise)
    keys = optimizer.defaults.keys() - _EXECUTION
    groups = [{key: _value(key, group[key]) for key in sorted(keys)} for group in param_groups]
    validate(name, groups)
    return name, groups


def _value(key: str, value: Any) -> HyperValue:
    if isinstance(value, bool):
        return value
    try:
        return tuple(float(number) for number in value) if isinstance(value, tuple | list) else float(value)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"the hyper-parameter {key} is {value!r}: servers take numbers, true or false, and tuples of numbers"
        ) from error


def whole_again(value: HyperValue) -> Any:
    """All numbers travel as floats. One without a fraction becomes a whole number, as for the length of a loop."""
    if isinstance(value, tuple):
        return value
    return int(value) if not isinstance(value, bool) and float(value).is_integer() else value
