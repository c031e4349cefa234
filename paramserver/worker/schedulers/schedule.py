"""The schedulers of one optimizer, which are advanced and put back together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paramserver import errors
from paramserver.core.versions.advances import Advance, Advances, Advancing, Back, Call
from paramserver.core.versions.ways import Way
from paramserver.worker.script.optimizer import told_of_steps


class OptimizerSchedule:
    """Makes the moves of `core.versions.advances.Advancing` with torch's schedulers."""

    def __init__(self, optimizer: Optimizer, value: Callable[[Way, int], float]) -> None:
        """``value``: what a scheduler that advances in this way is given with the update of this number."""
        self._optimizer, self._value = optimizer, value
        self.line = Advancing()
        self._ways: dict[int, Way] = {}
        self._schedulers: dict[int, LRScheduler] = {}
        # The state of each scheduler and the hyper-parameters before the first move, for when the job goes back.
        self._first: tuple[dict[int, Any], list[dict[str, Any]]] | None = None

    def add(self, number: int, scheduler: LRScheduler) -> None:
        """The scheduler of this number is prepared. None has been advanced yet."""
        self._schedulers[number] = scheduler

    @property
    def moved(self) -> bool:
        """Whether a scheduler was advanced."""
        return self._first is not None

    def advance_in_steps(self, known: Advances) -> None:
        """Of all schedulers, those that are known to do so advance with each update."""
        ways = {number: known.way(number) for number in known.per_step if number in self._schedulers}
        if any(self._ways.get(number, way).form != way.form for number, way in ways.items()):
            self.line.begin_anew()
        self._ways = ways
        before = tuple(number for number, way in ways.items() if way.before)
        self.line.advance_in_steps(tuple(number for number in ways if number not in before), before)

    def to(self, position: int, epochs: int, left_out: Collection[int] = (), begun: bool = False) -> None:
        """Bring all schedulers to where so many updates and epochs put them. ``begun``: the next update is under way.

        ``left_out``: schedulers that the script advanced in earlier steps and not in its last one. Raises UserError if
        one of these changes a learning rate now.
        """
        again = False
        for move in self.line.to(position, epochs, begun):
            if self._first is None:
                states = {number: copy.deepcopy(one.state_dict()) for number, one in self._schedulers.items()}
                self._first = states, copy.deepcopy(self._hypers())
            if isinstance(move, Back):
                again = True
                self._go_back()
                continue
            checked = move.call is None and move.number in left_out and not again
            before = self._hypers() if checked else None
            self._advance(move)
            if before is not None and self._hypers() != before:
                raise irregular(self._schedulers[move.number])

    def _go_back(self) -> None:
        assert self._first is not None
        states, groups = self._first
        for number, scheduler in self._schedulers.items():
            scheduler.load_state_dict(copy.deepcopy(states[number]))
        for group, saved in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(copy.deepcopy(saved))

    def _advance(self, move: Advance) -> None:
        scheduler: Any = self._schedulers[move.number]
        told_of_steps(scheduler.optimizer)
        args, kwargs = move.call.given if move.call is not None else ((), {})
        way = self._ways[move.number] if move.call is None else Way()
        if way.form:
            args = (self._value(way, move.update),)
        scheduler.step(*args, **kwargs)

    def _hypers(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def call(self, call: Call) -> None:
        """The script makes this call now."""
        self.line.record(call)
        self.to(call.position, call.epochs)


def irregular(scheduler: LRScheduler) -> errors.UserError:
    """The refusal of a scheduler that is advanced after some steps in the loop and not after others."""
    return errors.UserError(
        f"the script calls step() of {type(scheduler).__name__} after some optimizer steps in the loop and not after "
        "others, and a prepared scheduler advances with every step of the job: call it after each optimizer.step() or "
        "between two epochs, and put schedules that follow each other into torch.optim.lr_scheduler.SequentialLR"
    )
