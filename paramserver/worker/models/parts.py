"""The models of a job, by name, and how they become one model for the servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paramserver import errors


@dataclass(frozen=True, slots=True)
class Part:
    """One of several models. ``state``: of its optimizer when it was prepared. ``turns``: its steps on each batch."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    state: Mapping[torch.Tensor, Any]
    turns: int


def check_part(name: object, turns: object, present: Sequence[Part]) -> None:
    """Raises ModelError for a name that is none or is taken, and for a number of turns that is none."""
    if not isinstance(name, str) or not name.isidentifier() or hasattr(nn.ModuleDict, name):
        raise errors.ModelError(
            f"name={name!r} cannot be the name of a model: use letters, digits and underscores, and no name of a "
            "method of nn.ModuleDict"
        )
    if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
        raise errors.ModelError(f"turns is the number of optimizer steps on each batch, at least 1, not {turns!r}")
    if any(part.name == name for part in present):
        raise errors.ModelError(f"a model called {name!r} is prepared already: give each model a name of its own")


def check_apart(part: Part, present: Sequence[Part]) -> None:
    """Raises ModelError unless the model shares no parameter with the others, and its optimizer has only its own."""
    own = {id(parameter) for parameter in part.model.parameters()}
    for other in present:
        theirs = {id(p): name for name, p in other.model.named_parameters()}
        if shared := own & theirs.keys():
            raise errors.ModelError(
                f"models {other.name!r} and {part.name!r} share the parameter {theirs[shared.pop()]!r}: a parameter "
                "belongs to one model"
            )
    foreign = [p for group in part.optimizer.param_groups for p in group["params"] if id(p) not in own]
    if foreign:
        raise errors.ModelError(
            f"the optimizer of {part.name!r} has a parameter of shape {tuple(foreign[0].shape)} that is not of this "
            "model: give each model an optimizer of its own parameters only"
        )


def joint_model(parts: Sequence[Part]) -> nn.Module:
    """All models as one: tensors are called as in their model, with its name before."""
    return nn.ModuleDict({part.name: part.model for part in parts})


def order_of_turns(parts: Sequence[Part]) -> list[str]:
    """The name of the model that steps, by turn."""
    return [part.name for part in parts for _ in range(part.turns)]


def joint_weights(parts: Sequence[Part], given: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """State dicts of all models as that of the joint one."""
    return {f"{part.name}.{key}": value for part in parts for key, value in given[part.name].items()}
