"""The models of a script that prepares several ones, until the loader comes, and afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from paramserver import errors
from paramserver.worker.models.parts import (
    Part,
    check_apart,
    check_part,
    joint_model,
    joint_weights,
    order_of_turns,
)
from paramserver.worker.models.steps import TurnSteps
from paramserver.worker.script.binding import ModelBinding
from paramserver.worker.script.optimizer import ServerOptimizer

State = dict[torch.Tensor, dict[str, torch.Tensor]]


def state_of(optimizer: torch.optim.Optimizer, fetch: Callable[[], State]) -> State:
    """The state of one of several optimizers, out of that of all."""
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {p: state for p, state in fetch().items() if id(p) in mine}


class Models:
    """Collects models by name. When the loader comes, they become one model for the servers."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.optimizers: dict[str, ServerOptimizer] = {}
        self._steps: TurnSteps | None = None
        self._fetch: Callable[[], State] | None = None

    def __bool__(self) -> bool:
        return bool(self.parts)

    @property
    def turns(self) -> int:
        """Optimizer steps on each batch."""
        return sum(part.turns for part in self.parts) or 1

    def add(self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer, turns: int) -> ServerOptimizer:
        """Another model. Raises ModelError if it cannot be trained beside the others, or comes too late."""
        if self._steps is not None:
            raise errors.ModelError(
                f"the model {name!r} comes after the loader: prepare every model before the loader, or the last one "
                "together with it"
            )
        check_part(name, turns, self.parts)
        part = Part(name, model, optimizer, dict(optimizer.state), turns)
        check_apart(part, self.parts)
        self.parts.append(part)

        def contribute(unscale: float, overflow: bool) -> None:
            if self._steps is None:
                raise errors.UserError(
                    "give the loader to ctx.prepare before the first optimizer.step(): jobs of several models have "
                    "one. If the script draws its batches itself, loop over a prepared DataLoader(range(steps), "
                    "batch_size=1), and draw in the loop"
                )
            self._steps.step_of(name, unscale, overflow)

        def fetch() -> State:
            if self._fetch is None:
                return {p: dict(state) for p, state in part.state.items()}
            return state_of(optimizer, self._fetch)

        def add_group(group: dict[str, Any]) -> None:
            raise errors.ModelError("parameter groups cannot be added where a job has several models")

        self.optimizers[name] = made = ServerOptimizer(optimizer, contribute, fetch, add_group)
        return made

    def joint(self) -> tuple[nn.Module, list[torch.optim.Optimizer], State]:
        """All models as one, their optimizers, and the state that these have brought."""
        state = {parameter: found for part in self.parts for parameter, found in part.state.items()}
        return joint_model(self.parts), [part.optimizer for part in self.parts], state

    def order(self) -> list[str]:
        """The name of the model that steps, by turn."""
        return order_of_turns(self.parts)

    def trained(self, binding: ModelBinding) -> dict[str, list[int]]:
        """The parameters of each model that are trained, by index. The empty name has none."""
        found: dict[str, list[int]] = {"": []}
        for part in self.parts:
            mine = {id(p) for group in part.optimizer.param_groups for p in group["params"]}
            found[part.name] = [index for index, p in enumerate(binding.parameters) if id(p) in mine]
        return found

    def begin(self, steps: TurnSteps, fetch: Callable[[], State]) -> None:
        """The servers have the models."""
        self._steps, self._fetch = steps, fetch

    # ---- states by name

    def by_name(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict of the joint model, and the state of the optimizers, by the name of the model."""
        return {
            part.name: {
                "model": {
                    key.removeprefix(f"{part.name}."): value
                    for key, value in weights.items()
                    if key.startswith(f"{part.name}.")
                },
                "optimizer": self.optimizers[part.name].state_dict(),
            }
            for part in self.parts
        }

    def joint_states(self, state: object) -> tuple[dict[str, Any], list[Mapping[str, Any]]]:
        """The state that `by_name` gave, as that of the joint model, and of each optimizer. Otherwise UserError."""
        names = {part.name for part in self.parts}
        if (
            not isinstance(state, Mapping)
            or state.keys() != names
            or any(not isinstance(one, Mapping) or one.keys() != {"model", "optimizer"} for one in state.values())
        ):
            raise errors.UserError(
                "with several models ctx.load takes what ctx.state_dict() gives: for each of "
                f"{', '.join(sorted(names))} the keys 'model' and 'optimizer'"
            )
        weights = joint_weights(self.parts, {name: state[name]["model"] for name in names})
        return weights, [state[part.name]["optimizer"] for part in self.parts]
