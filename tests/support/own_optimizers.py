"""Optimizers as users write them, in a module that servers can import."""

from __future__ import annotations

from typing import Any

import torch

import paramserver as ps


@ps.server_optimizer(arrays=("exp_avg",), elementwise=True)
class Lion(torch.optim.Optimizer):
    """The sign of a mix of momentum and gradient. It writes to the gradient."""

    def __init__(self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                one, two = group["betas"]
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(torch.lerp(p.grad, state["exp_avg"], one).sign_(), alpha=-group["lr"])
                state["exp_avg"].lerp_(p.grad, 1 - two)
                p.grad.zero_()


@ps.server_optimizer(elementwise=True)
class Bounded(torch.optim.Optimizer):
    """Keeps weights within a bound, as those of a WGAN's critic."""

    def __init__(self, params: Any, lr: float = 0.01, bound: float = 0.05):
        super().__init__(params, {"lr": lr, "bound": bound})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad).clamp_(-group["bound"], group["bound"])


@ps.server_optimizer(arrays=("mean",), numbers=("largest",), counts=("step",))
class Normed(torch.optim.Optimizer):
    """Momentum, divided by the norm of the whole tensor; a length of a loop, a count, and a number in the state."""

    def __init__(self, params: Any, lr: float = 0.01, rounds: int = 2, plus: bool = False):
        super().__init__(params, {"lr": lr, "rounds": rounds, "plus": plus})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p), largest=torch.zeros(()))
                state["step"] += 1
                for _ in range(group["rounds"]):
                    state["mean"].lerp_(p.grad, 1 / (1 + state["step"]))
                state["largest"] = torch.maximum(state["largest"], p.grad.abs().max())
                factor = group["lr"] / (state["mean"].norm() + state["largest"] + 1e-8)
                p.sub_(state["mean"] * factor)


@ps.server_optimizer(arrays=("other",), elementwise=False)
class Careless(Lion):
    """It declares a state that it does not keep."""


class Silent(Lion):
    """It is not declared: its base class is."""
