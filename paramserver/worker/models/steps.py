"""The optimizer steps of a script that trains several models: each step on a batch is a slice of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from paramserver import errors
from paramserver.core.turns.turns import Turns
from paramserver.worker.pace import Item
from paramserver.worker.script.steps import Steps


class TurnSteps(Steps):
    """Steps of several models in turn. ``of_part``: the parameters of each model that are trained, by index.

    ``next_turn`` gives the slice that is the next turn on the same batch, if this worker is to compute that now.
    """

    def __init__(
        self,
        *parts: Any,
        order: Sequence[str],
        of_part: Mapping[str, Collection[int]],
        next_turn: Callable[[Item], Item | None],
    ) -> None:
        super().__init__(*parts)
        self._turns, self._of_part, self._next_turn = Turns(order), of_part, next_turn
        self._count = len(order)
        self._in_body = False

    @property
    def has_batch(self) -> bool:
        return self._in_body

    @property
    def due(self) -> bool:
        """True on each batch: the script makes all steps, also those that do not contribute."""
        self._asks = True
        return self._number + 1 == self._of

    @property
    def _only(self) -> Collection[int] | None:
        return self._of_part[self._turns.wanted]

    def begin(self, item: Item, number: int, of: int, samples: int) -> None:
        self._in_body = True
        self._turns.begin(item.index % self._count)
        super().begin(item, number, of, samples)

    def _begin_early(self, item: Item) -> None:
        """Gradients leave when the optimizer steps: a backward pass may be one of another model's turn."""

    def end(self, item: Item) -> None:
        self._in_body = False
        self._turns.end()
        if self.item is not None:
            super().end(self.item)

    def step_of(self, name: str, unscale: float, overflow: bool) -> None:
        """The optimizer of this model steps; see `Steps.step`. Raises UserError if it is not its turn."""
        if not self._in_body:
            raise errors.UserError("optimizer.step() belongs into the loop over the prepared loader")
        if not self._turns.step(name):
            # The step has counted already, or another worker makes it: what its forward passes did to buffers goes.
            self._clip_norm = 0.0
            self._binding.reset_buffers()
            self._binding.leftover.steps(self._of_part[name])
            self._binding.leftover.begin(self._of_part[name])
            return
        item = self.item
        assert item is not None
        self.step(unscale, overflow)
        self._binding.leftover.begin(self._of_part[name])
        following = self._next_turn(item)
        self.item = following
        self._turns.go_on(None if following is None else following.index % self._count)
        if following is None:
            return
        self._binding.reset_buffers()
        self._batch = following.epoch, following.index
        self.has_slice(following)
