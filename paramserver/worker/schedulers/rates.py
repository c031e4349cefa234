"""Hyper-parameters that would depend on which worker computes which slice are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paramserver import errors
from paramserver.core.versions.names import SyncName
from paramserver.v1 import types_pb2
from paramserver.worker.pace import Item
from paramserver.worker.schedulers.schedules import Schedules
from paramserver.worker.script.optimizer import ServerOptimizer


@dataclass(frozen=True, slots=True)
class _HandedIn:
    """A slice that was handed in. ``step``: None in asynchronous mode. ``groups``: the hyper-parameters as sent."""

    timeline: int
    step: int | None
    groups: list[types_pb2.GroupHypers]
    rates: list[float]


class Rates:
    """Compares the hyper-parameters of each slice with those of the slice that the script handed in before."""

    def __init__(self, schedules: Schedules) -> None:
        self._schedules = schedules
        self._optimizers: list[ServerOptimizer] = []
        self._last: _HandedIn | None = None

    def watch(self, optimizer: ServerOptimizer) -> None:
        """The script steps with this optimizer, too."""
        self._optimizers.append(optimizer)

    def check(self, item: Item, timeline: int, groups: Sequence[types_pb2.GroupHypers]) -> None:
        """A slice is handed in with these hyper-parameters.

        Raises UserError if the optimizer has a scheduler that `ctx.prepare` does not know, or if another slice of the
        same step has other hyper-parameters.
        """
        if any(one.scheduled and not self._schedules.knows(one) for one in self._optimizers):
            raise errors.UserError(
                "the optimizer has a scheduler that ctx.prepare does not know: it would count the steps of this worker "
                "and not those of the job, and would not go back with the job. Give it to ctx.prepare before the first "
                "step: scheduler = ctx.prepare(scheduler)"
            )
        if self._schedules:  # the job has its schedule, and servers compare workers
            return
        step = item.name.step if isinstance(item.name, SyncName) else None
        rates = [float(group["lr"]) for optimizer in self._optimizers for group in optimizer.param_groups]
        former, self._last = self._last, _HandedIn(timeline, step, list(groups), rates)
        if former is None or former.timeline != timeline:
            return
        if step is not None and former.step == step and former.groups != self._last.groups:
            raise errors.UserError(
                f"two slices of step {step} have different hyper-parameters (the learning rates {_first(former.rates)} "
                f"and {_first(rates)}), and a step has one update: give the scheduler to ctx.prepare, or compute the "
                "hyper-parameters from ctx.version, which is the number of the step"
            )


def _first(rates: Sequence[float]) -> str:
    return f"{rates[0]:g}" if rates else "none"
