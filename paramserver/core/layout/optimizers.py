"""The optimizers of a job, by parameter group: one for all groups, or one for each group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paramserver.core.layout.hypers import Hypers, Rule, rule_of, validate, validate_change, validate_shape
from paramserver.core.layout.plan import Kind, TensorSpec
from paramserver.errors import ModelError

_SUM = "sum"


@dataclass(frozen=True, slots=True)
class Optimizers:
    """``names``: one name for all groups, or the name of each group, in their order.

    >>> Optimizers(("muon", "adamw")).of(1), Optimizers(("sgd",)).of(1)
    ('adamw', 'sgd')
    """

    names: tuple[str, ...]

    @classmethod
    def by_group(cls, names: Sequence[str]) -> Optimizers:
        """Of groups with these optimizers. Groups that have the same one need its name once.

        >>> Optimizers.by_group(["adam", "adam"]).names
        ('adam',)
        """
        return cls(tuple(names[:1] if len(set(names)) == 1 else names))

    def of(self, group: int) -> str:
        """The name of the optimizer of a group. Raises ModelError if there is no such group."""
        if len(self.names) == 1:
            return self.names[0]
        if group >= len(self.names):
            raise ModelError(f"a parameter is in group {group}, and the optimizers have {len(self.names)}")
        return self.names[group]

    def rule(self, group: int) -> Rule:
        """The rule of the optimizer of a group. Raises ModelError if it is not supported."""
        return rule_of(self.of(group))

    def whole(self, group: int) -> bool:
        """Whether tensors of a group are updated whole. Unknown optimizers are refused where numbers are checked."""
        try:
            return self.rule(group).whole
        except ModelError:
            return False

    @property
    def sums(self) -> bool:
        """Whether servers add up what is pushed, and do not divide by the samples."""
        return self.names == (_SUM,)

    def __str__(self) -> str:
        return " and ".join(dict.fromkeys(self.names))

    # ---- checks

    def validate(self, groups: Sequence[Hypers]) -> None:
        """Raises ModelError, naming group and field, unless servers can run these optimizers with these numbers."""
        if len(self.names) == 1:
            validate(self.names[0], groups)
            return
        if len(self.names) != len(groups) or _SUM in self.names:
            raise ModelError(f"the optimizers {self} do not fit to {len(groups)} parameter groups: give each group one")
        for number, (name, hypers) in enumerate(zip(self.names, groups, strict=True)):
            validate(name, [hypers], number)

    def validate_shapes(self, tensors: Iterable[TensorSpec]) -> None:
        """Raises ModelError, naming the tensor, unless each parameter has a shape that its optimizer can train."""
        for tensor in tensors:
            if tensor.kind is Kind.PARAMETER:
                validate_shape(self.of(tensor.group), tensor.name, tensor.shape)

    def validate_change(self, before: Sequence[Hypers], after: Sequence[Hypers]) -> None:
        """Raises ModelError unless training may go on with the numbers ``after`` where it had the valid ``before``."""
        if len(self.names) == 1:
            validate_change(self.names[0], before, after)
            return
        self.validate(after)
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            validate_change(self.of(number), [one], [other], number)
