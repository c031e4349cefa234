"""The optimizer that ``ctx.prepare`` hands back: torch's interface, the update on the servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paramserver import errors
from paramserver.worker.script.state import FarState, lost, same

# A scheduler of torch gives this attribute to the method step() of its optimizer.
_BY_SCHEDULER = "_wrapped_by_lr_sched"


class ServerOptimizer(torch.optim.Optimizer):
    """Shares its parameter groups and hooks with the optimizer that was given; ``step`` contributes.

    The state is on the servers: ``state`` and :meth:`state_dict` read it there. ``fetch`` gives it by parameter.

    >>> optimizer.param_groups[0]["lr"]
    0.1
    """

    # torch's GradScaler then calls step() always, and leaves the scale and the overflow flag as attributes.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        wrapped: torch.optim.Optimizer,
        contribute: Callable[[float, bool], None],
        fetch: Callable[[], dict[torch.Tensor, dict[str, torch.Tensor]]],
        add_group: Callable[[dict[str, Any]], None],
    ) -> None:
        self.wrapped = wrapped
        self._contribute, self._add_group = contribute, add_group
        # A scheduler was built on the optimizer before ctx.prepare.
        self._scheduled = hasattr(wrapped.step, _BY_SCHEDULER)
        super().__init__([{"params": list(group["params"])} for group in wrapped.param_groups], {})
        self.param_groups = wrapped.param_groups
        self.defaults = wrapped.defaults
        for name in _HOOKS:  # those registered so far, and their handles
            setattr(self, name, getattr(wrapped, name))
        wrapped.state.clear()  # the servers have it
        self._far_state: Any = FarState(fetch)
        self.state = self._far_state  # type: ignore[assignment]
        retire(wrapped)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Contribute the gradients of the present slice; returns with the next version of the weights, or with work.

        Returns what ``closure`` returns, if one is given. Hooks of ``register_step_pre_hook`` are called before the
        gradients are taken, those of ``register_step_post_hook`` when it returns. Raises UserError if the script has
        written to parameters that are trained, and ModelError if it has replaced ``state`` or ``param_groups``.

        >>> for x, y in loader:
        ...     F.mse_loss(model(x), y).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> ctx.version
        4
        """
        if self.state is not self._far_state:
            raise lost()
        if self.param_groups is not self.wrapped.param_groups:
            raise errors.ModelError(
                "the script has replaced optimizer.param_groups, and the servers do not get the hyper-parameters of "
                'other groups: change the groups in their place (optimizer.param_groups[0]["lr"] = 0.1)'
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = getattr(self, "grad_scale", None)
        found = getattr(self, "found_inf", None)
        overflow = found is not None and bool(found.item() != 0)
        self._contribute(1.0 if scale is None else 1.0 / float(scale), overflow)
        told_of_steps(self, self.wrapped)  # schedulers are built before ctx.prepare or after it
        return loss

    @property
    def scheduled(self) -> bool:
        """Whether a scheduler of torch was built on this optimizer, before ctx.prepare or after it."""
        return self._scheduled or hasattr(self.step, _BY_SCHEDULER)

    def state_dict(self) -> dict[str, Any]:
        """The state as torch's optimizer has it: ``plain.load_state_dict(optimizer.state_dict())`` goes on from it.

        Read from the servers, at the version of the weights at hand (asynchronous: at each server's present one). Any
        worker may call it at any time, alone. State of float16 and bfloat16 parameters is float32, as servers keep it.

        >>> if ctx.is_main:
        ...     torch.save({"optimizer": optimizer.state_dict(), "model": model.state_dict()}, "at.pt")
        """
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the hyper-parameters of a state that is the servers' present one.

        Any other state has to be loaded into the optimizer before ``ctx.prepare``, or afterwards with ``ctx.load``.
        Raises ModelError for that, and for another number of parameter groups.

        >>> saved = optimizer.state_dict()
        >>> saved["param_groups"][0]["lr"] = 0.05
        >>> optimizer.load_state_dict(saved)
        >>> optimizer.param_groups[0]["lr"]
        0.05
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups = state_dict.get("param_groups", [])
        if len(groups) != len(self.param_groups):
            raise errors.ModelError(
                f"the state has {len(groups)} parameter groups, this optimizer has {len(self.param_groups)}"
            )
        present = self.state_dict()
        if not same(present["state"], state_dict.get("state", {})):
            raise errors.ModelError(
                "this optimizer state would be lost, since the servers have another one: load it into the optimizer "
                "before ctx.prepare, which takes it over, or call ctx.load(optimizer=...) in every worker"
            )
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters from now on: those of a group that ``ctx.prepare`` was told of with ``later``.

        They have no optimizer state before, as in plain torch. Call it in all workers, at the beginning of the same
        epoch. Raises ModelError for other parameters, and where a scheduler was prepared.

        >>> optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        Traceback (most recent call last):
        paramserver.errors.ModelError: servers lay out the parameters once, so a group ...
        """
        if hasattr(self, "wrapped") and self.param_groups is self.wrapped.param_groups:
            self._add_group(param_group)
        else:
            super().add_param_group(param_group)


# torch's ordered dictionaries of hooks; a hook's handle holds on to the dictionary, so it is shared.
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def told_of_steps(*optimizers: torch.optim.Optimizer) -> None:
    """This worker or another one has stepped: without this, torch's schedulers warn that nobody has."""
    for optimizer in optimizers:
        optimizer._opt_called = True  # type: ignore[attr-defined]


def retire(given: torch.optim.Optimizer) -> None:
    """Guards the optimizer given to ``ctx.prepare``: a script that still uses it would change nothing that counts."""

    def refused(what: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise errors.ModelError(
                f"{what} was called on the optimizer that was given to ctx.prepare: use the one that it returned "
                "(model, optimizer = ctx.prepare(model, optimizer))"
            )

        return refuse

    for name in ("step", "state_dict", "load_state_dict", "add_param_group"):
        refuse: Any = refused(f"{name}()")
        if name == "step":
            setattr(refuse, _BY_SCHEDULER, True)  # or schedulers warn that step() was replaced
        setattr(given, name, refuse)
