"""Refuses learning rates that would depend on which worker computes which slice."""

from __future__ import annotations

from collections.abc import Sequence

from paramserver import errors
from paramserver.core.versions.names import SyncName
from paramserver.core.work.passes import Passes
from paramserver.v1 import types_pb2
from paramserver.worker.pace import Item
from paramserver.worker.script.optimizer import ServerOptimizer
from paramserver.worker.script.schedule import Schedules


class Rates:
    """Compares the hyper-parameters of each slice with those of the slice that the script handed in before."""

    def __init__(self, passes: Passes, schedules: Schedules) -> None:
        self._passes, self._schedules = passes, schedules
        self._optimizers: list[ServerOptimizer] = []
        # Of the slice before: the timeline, the step (asynchronous: None), the epoch, what was sent, learning rates.
        self._timeline, self._step, self._epoch = -1, -1, -1
        self._groups: Sequence[types_pb2.GroupHypers] = ()
        self._rates: list[float] = []

    def watch(self, optimizer: ServerOptimizer) -> None:
        """The script steps with this optimizer, too."""
        self._optimizers.append(optimizer)

    def check(self, item: Item, timeline: int, groups: Sequence[types_pb2.GroupHypers]) -> None:
        """A slice is handed in with these hyper-parameters.

        Raises UserError if a scheduler that `ctx.prepare` does not know has changed a learning rate where it counts
        this worker's slices, or if another slice of the same step has other hyper-parameters.
        """
        step = item.name.step if isinstance(item.name, SyncName) else -1
        rates = [float(group["lr"]) for optimizer in self._optimizers for group in optimizer.param_groups]
        former = (self._timeline, self._step, self._epoch, self._groups, self._rates)
        self._timeline, self._step, self._epoch, self._groups, self._rates = timeline, step, item.epoch, groups, rates
        if former[0] != timeline:
            return
        changed = any(one != other for one, other in zip(rates, former[4], strict=False))
        counts_here = self._passes.planned or former[2] == item.epoch
        if changed and counts_here and not self._schedules and any(one.scheduled for one in self._optimizers):
            raise errors.UserError(
                f"a scheduler that ctx.prepare does not know has changed the learning rate from {_first(former[4])} to "
                f"{_first(rates)}: it counts the steps of this worker, and not those of the job. Give it to "
                "ctx.prepare: scheduler = ctx.prepare(scheduler)"
            )
        if step >= 0 and former[1] == step and list(former[3]) != list(groups):
            raise errors.UserError(
                f"two slices of step {step} have different hyper-parameters (the learning rates {_first(former[4])} "
                f"and {_first(rates)}), and a step has one update: give the scheduler to ctx.prepare, or compute the "
                "hyper-parameters from ctx.version, which is the number of the step"
            )


def _first(rates: Sequence[float]) -> str:
    return f"{rates[0]:g}" if rates else "none"
