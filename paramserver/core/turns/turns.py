"""Turns: the optimizer steps that a script makes on one batch, in their order. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from paramserver.errors import UserError


class Turns:
    """The optimizer steps on the batch at hand. ``order``: the name of the model that steps, by turn.

    The script makes all steps on each batch that it is given. The step of the wanted turn contributes. Steps before it
    are repeated, since they have counted already, and steps after it may be computed here or elsewhere.

    >>> turns = Turns(["critic", "actor"])
    >>> turns.begin(1)
    >>> turns.step("critic"), turns.step("actor")
    (False, True)
    """

    def __init__(self, order: Sequence[str]) -> None:
        self._order = tuple(order)
        # How many steps the script has made on this batch, and the turn that is to contribute, if any is.
        self._made = 0
        self._wanted: int | None = None

    def begin(self, turn: int) -> None:
        """The script gets a batch, and this turn on it is to contribute."""
        self._made, self._wanted = 0, turn

    def go_on(self, turn: int | None) -> None:
        """A step has contributed. ``turn``: the one that is to contribute now; None: no other on this batch."""
        self._wanted = turn

    @property
    def wanted(self) -> str:
        """The model whose step is to contribute next; empty: none on this batch."""
        return "" if self._wanted is None else self._order[self._wanted]

    def end(self) -> None:
        """The script asks for the next batch. Raises UserError if it has made some of the steps on this one."""
        if 0 < self._made < len(self._order):
            words = ", ".join(self._order)
            raise UserError(
                f"the script asks for another batch where the optimizer of {self._order[self._made]!r} is to step: on "
                f"each batch optimizers step in the order in which their models were prepared ({words}), all of them "
                "or none. To step on other samples each time, give the loader larger batches and take a part for "
                "each step"
            )

    def step(self, name: str) -> bool:
        """The optimizer of this model steps: whether this contributes. Raises UserError if it is not its turn."""
        words = ", ".join(self._order)
        if self._made == len(self._order):
            raise UserError(
                f"the optimizer of {name!r} steps once more on a batch on which all steps are made ({words}): say how "
                f"often it steps on each batch with ctx.prepare(..., name={name!r}, turns=...)"
            )
        if self._order[self._made] != name:
            raise UserError(
                f"the optimizer of {name!r} steps where it is the turn of {self._order[self._made]!r}: on each batch "
                f"optimizers step in the order in which their models were prepared ({words})"
            )
        self._made += 1
        return self._made - 1 == self._wanted
