"""Hears of a script that clips gradients with torch's own functions, which see the gradient of one slice only."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import structlog
import torch

log = structlog.get_logger("paramserver.worker")

# Public functions of torch. The last one came with torch 2.6.
_NAMES = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")

# Who wants to hear of calls; while there is somebody, the modules, names and functions that have a stand-in.
_listeners: list[Clipping] = []
_replaced: list[tuple[dict[str, Any], str, Any]] = []


class Clipping:
    """Says once that a slice of a larger step was clipped. Until then, or until :meth:`end`, functions have stand-ins.

    ``slices``: how many slices the next update has.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], slices: Callable[[], int]) -> None:
        self._parameters, self._slices = {id(one) for one in parameters}, slices
        if not _replaced:
            _replace()
        _listeners.append(self)

    def end(self) -> None:
        """Hear no more. A second call does nothing."""
        if self in _listeners:
            _listeners.remove(self)
        if not _listeners:
            _put_back()

    def hears(self, name: str, parameters: Any) -> Any:
        """The script clips these parameters; they, or a list of them if they had to be gone through."""
        if (slices := self._slices()) < 2:
            return parameters
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(id(one) in self._parameters for one in listed):
            self.end()
            log.warning(
                f"torch's {name} clips the gradient of one slice, and a step has {slices} slices: one process with the "
                "whole batch would clip the gradient of the step. To have the servers clip that, call "
                "ctx.clip_grad_norm(max_norm) instead, between backward() and optimizer.step()"
            )
        return listed or parameters


def _replace() -> None:
    for name in _NAMES:
        original = getattr(torch.nn.utils, name, None)
        for module in list(sys.modules.values()) if original is not None else ():
            # The class is asked itself: a lazy module stays unloaded, and what only stands for a module is left out.
            if issubclass(type(module), ModuleType):
                names = object.__getattribute__(module, "__dict__")
                if names.get(name) is original:
                    _replaced.append((names, name, original))
                    names[name] = _stand_in(original, name)


def _put_back() -> None:
    while _replaced:
        names, name, original = _replaced.pop()
        if getattr(names.get(name), "__wrapped__", None) is original:  # else the script has put something else there
            names[name] = original


def _stand_in(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            for one in tuple(_listeners):
                parameters = one.hears(name, parameters)
        return original(parameters, *args, **kwargs)

    return clip
