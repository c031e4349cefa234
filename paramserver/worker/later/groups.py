"""The parameter groups of a job: those of the script's optimizers, and those that the script will add later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from paramserver import errors
from paramserver.core.layout.hypers import Hypers
from paramserver.core.layout.optimizers import Optimizers
from paramserver.tensors.optimizers import describe

Group = dict[str, Any]


class Groups:
    """Servers know all groups from the beginning, in this order: those of each optimizer, then the later ones.

    A group that waits has the optimizer's defaults, and its parameters no gradient. ``later``: the parameters of each
    later group of a single optimizer. Raises ModelError for optimizers that servers do not run, and for later groups
    that make no sense.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], later: Sequence[object] = ()) -> None:
        assert optimizers
        assert len(optimizers) == 1 or not later
        self._optimizers = list(optimizers)
        # How many groups each optimizer had, and the parameters of all groups, as servers lay them out.
        self._counts = [len(one.param_groups) for one in optimizers]
        self._laid_out = [_ids(group) for group in self._own()]
        self._first = len(self._laid_out)
        given = {id(p) for group in self._own() for p in group["params"]}
        # By later group: its parameters, how servers have it while it waits, and the group that was added.
        self._parameters = [_parameters(number, one, given) for number, one in enumerate(later)]
        self._waiting: list[Group] = [{**optimizers[0].defaults, "params": found} for found in self._parameters]
        self._added: dict[int, tuple[Group, int]] = {}
        names = [describe(one)[0] for one in optimizers]
        self.kinds = Optimizers.by_group(
            [name for name, count in zip(names, self._counts, strict=True) for _ in range(count)] or names[:1]
        )

    def _own(self) -> list[Group]:
        return [group for one in self._optimizers for group in one.param_groups]

    def all(self, present: Sequence[Group] | None = None) -> list[Group]:
        """All groups, as servers have them. ``present``: groups in place of the optimizers'.

        Raises ModelError if the script has taken groups or parameters out of an optimizer, or has put others in.
        """
        own = self._own() if present is None else present
        if present is None:
            self.check()
        if not self._waiting:
            return list(own)
        place = {id(group): number for number, group in enumerate(self._own())}
        found = list(own[: self._first])
        for number, group in enumerate(self._waiting):
            found.append(own[place[id(self._added[number][0])]] if number in self._added else group)
        return found

    def check(self) -> None:
        """Raises ModelError if the script has taken groups or parameters out of an optimizer, or has put others in."""
        groups = self._own()
        own = [_ids(group) for group in groups[: self._first]]
        if own != self._laid_out or len(groups) != self._first + len(self._added):
            raise errors.ModelError(
                "optimizer.param_groups has other groups or other parameters than at ctx.prepare, and servers lay them "
                "out once: leave them as they are. To stop training some parameters, freeze them "
                "(requires_grad_(False)) and clear their gradients; to train more, see docs/training.md, Groups that "
                "are added later"
            )

    def hypers(self, present: Sequence[Group] | None = None) -> list[Hypers]:
        """The hyper-parameters of all groups. Raises ModelError for values that servers do not take."""
        groups = self.all(present)
        if len(self._optimizers) == 1:
            return list(describe(self._optimizers[0], groups)[1])
        found: list[Hypers] = []
        for optimizer, count in zip(self._optimizers, self._counts, strict=True):
            found += describe(optimizer, groups[len(found) : len(found) + count])[1]
        return found

    def waits(self, group: int) -> bool:
        """Whether this group, by its number on servers, has not been added yet."""
        return group >= self._first and group - self._first not in self._added

    @property
    def waiting(self) -> int:
        """How many groups have not been added yet."""
        return len(self._waiting) - len(self._added)

    @property
    def added(self) -> int:
        """How many later groups the script has added."""
        return len(self._added)

    def add(self, group: Group, epoch: int) -> None:
        """The script adds a later group in this epoch. Raises ModelError if no later group has its parameters."""
        given = group.get("params", ())
        wanted = {id(p) for p in ([given] if isinstance(given, torch.Tensor) else list(given))}
        numbers = [n for n, found in enumerate(self._parameters) if {id(p) for p in found} == wanted]
        if not numbers or numbers[0] in self._added:
            raise errors.ModelError(
                "servers lay out the parameters once, so a group that is added after ctx.prepare has to be named "
                "there: ctx.prepare(model, optimizer, later=[parameters of the group]); or give the optimizer the "
                "group before, and freeze it with requires_grad_(False)"
            )
        optimizer, before = self._optimizers[0], self.hypers()
        type(optimizer).add_param_group(optimizer, {**group, "params": list(self._parameters[numbers[0]])})
        self._added[numbers[0]] = optimizer.param_groups[-1], epoch
        try:
            self.kinds.validate_change(before, self.hypers())
        except ValueError:
            del self._added[numbers[0]]
            optimizer.param_groups.pop()
            raise

    def back_to(self, epoch: int) -> bool:
        """The script begins this epoch: groups that it added in this or a later epoch wait again. True if any did."""
        late = [number for number, (_, at) in self._added.items() if at >= epoch]
        for number in late:
            group, _ = self._added.pop(number)
            groups = self._optimizers[0].param_groups
            groups[:] = [one for one in groups if one is not group]
        return bool(late)


def _ids(group: Group) -> list[int]:
    return [id(parameter) for parameter in group["params"]]


def _parameters(number: int, given: object, known: set[int]) -> list[nn.Parameter]:
    """The parameters of a later group, each of which is added to ``known``."""
    found = list(given.parameters() if isinstance(given, nn.Module) else given if isinstance(given, Iterable) else ())
    if not found or not all(isinstance(one, nn.Parameter) for one in found):
        raise errors.ModelError(
            f"later[{number}] of ctx.prepare has to be the parameters of a group, or the module that has them: "
            "later=[model.body.parameters()]"
        )
    for parameter in found:
        if id(parameter) in known:
            raise errors.ModelError(
                f"later[{number}] of ctx.prepare has a parameter that is in the optimizer or in another later group: "
                "give each parameter once"
            )
        known.add(id(parameter))
    return found
