"""The steps of a script whose model has several optimizers, such as Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paramserver import errors
from paramserver.worker.script.steps import Steps


@dataclass(frozen=True, slots=True)
class _Stepped:
    """An optimizer that has stepped on the present batch, as it was then: the script may change its parts afterwards.

    ``gradients``: by parameter, the gradient and how often it had been written to.
    """

    gradients: list[tuple[torch.Tensor, torch.Tensor, int]]
    groups: list[dict[str, Any]]
    unscale: float
    overflow: bool


class JointSteps(Steps):
    """On each batch every optimizer steps once. The one that steps last hands the gradients in."""

    def __init__(self, *parts: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__(*parts)
        self._optimizers = optimizers
        # By number of the optimizer.
        self._stepped: dict[int, _Stepped] = {}

    def _names(self, *stepped: bool) -> str:
        optimizers = enumerate(self._optimizers)
        return " and ".join(type(one).__name__ for number, one in optimizers if (number in self._stepped) in stepped)

    def step_of(self, number: int, unscale: float, overflow: bool) -> None:
        """This optimizer steps. Raises UserError if that is not its place, or if its gradients are lost."""
        self.check_place()
        if number in self._stepped:
            raise errors.UserError(
                f"{type(self._optimizers[number]).__name__} steps again before {self._names(False)} has stepped: "
                "a model with several optimizers takes one step of each on each batch"
            )
        if any(one.unscale != unscale for one in self._stepped.values()):
            raise errors.UserError(
                f"the gradients of some of {self._names(True, False)} are unscaled and those of others are not: call "
                "scaler.unscale_ for all optimizers or for none, and scaler.step for all"
            )
        groups = [dict(group) for group in self._optimizers[number].param_groups]
        mine = [p for group in groups for p in group["params"]]
        gradients = [(p, p.grad, p.grad._version) for p in mine if p.grad is not None]
        self._schedules.steps(self._optimizers[number])
        self._stepped[number] = _Stepped(gradients, groups, unscale, overflow)
        if len(self._stepped) < len(self._optimizers):
            return
        cleared = self._bring_back()
        self._binding.script_groups.check()
        try:
            self.step(unscale, any(one.overflow for one in self._stepped.values()))
        finally:
            self._stepped = {}
        for parameter in cleared:
            parameter.grad = None

    def _stepped_with(self) -> Sequence[dict[str, Any]] | None:
        """See `Steps`. Without a loader a step may have to wait for a later place, whose learning rates count."""
        if self._position.data is None or len(self._stepped) < len(self._optimizers):
            return None
        return [group for number in sorted(self._stepped) for group in self._stepped[number].groups]

    def _bring_back(self) -> list[torch.Tensor]:
        """Gradients that the script has cleared since their optimizer stepped are there again; their parameters."""
        cleared = []
        for number, one in self._stepped.items():
            for parameter, gradient, writes in one.gradients:
                if parameter.grad is None:
                    parameter.grad = gradient
                    cleared.append(parameter)
                if parameter.grad is not gradient or gradient._version != writes:
                    raise errors.UserError(
                        f"gradients of {type(self._optimizers[number]).__name__} have changed between its step and "
                        "the steps of the other optimizers: let all optimizers step first, then call zero_grad()"
                    )
        return cleared

    @property
    def unfinished(self) -> str:
        if not self._stepped:
            return ""
        return (
            f"{self._names(True)} stepped on a batch, and {self._names(False)} did not: a model with several "
            "optimizers takes one step of each on each batch. For steps in turn, give ctx.prepare several models"
        )

    def end(self, item: Any) -> None:
        if self._stepped:
            raise errors.UserError(self.unfinished)
        super().end(item)
