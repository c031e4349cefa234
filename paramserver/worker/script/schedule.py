"""Where a learning-rate schedule stands, in units of ``len(loader)``, and which learning rates are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paramserver import errors
from paramserver.core.versions.consistency import Mode
from paramserver.core.versions.names import SyncName
from paramserver.core.work.data_progress import data_progress, schedule_position, updates_per_epoch
from paramserver.core.work.passes import Passes
from paramserver.core.work.slices import DataSpec
from paramserver.v1 import shard_pb2, types_pb2
from paramserver.wire.messages import consistency_from_proto, mode_from_proto, schedule_from_proto
from paramserver.worker.engine import Engine
from paramserver.worker.pace import Item
from paramserver.worker.script.given import check_scheduler
from paramserver.worker.script.optimizer import ServerOptimizer, StepScheduler

log = structlog.get_logger("paramserver.worker")


class SchedulePosition:
    """Progress of the job through its data, as schedules count it; see `core.work.data_progress`.

    Without a data set the position is the version of the weights.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.data: DataSpec | None = None
        self._slices = 0

    def loader_comes(self, data: DataSpec) -> None:
        """The loader is prepared, and this is its data."""
        self.data = data

    @property
    def batches_per_epoch(self) -> int:
        """The length of the loader: batches in an epoch; synchronous: divided by the slices of a step, rounded up.

        In the mode in which the job began. There must be a data set.
        """
        assert self.data is not None
        view = self._engine.member.session.view
        mode = mode_from_proto(view.schedule_mode, Mode.SYNC)
        return updates_per_epoch(self.data.batches_per_epoch, view.slices_per_step, mode)

    @property
    def per_epoch(self) -> int:
        """How many updates an epoch has in the mode in which the job began. There must be a data set."""
        assert self.data is not None
        return -(-self.batches_per_epoch // self.data.batches)

    def __call__(self) -> int:
        """How many updates the version at hand is from the start."""
        if self.data is None:
            return self._engine.weights.version
        if not self._engine.member.rolled_back():  # else the view may be of a history that this worker has not followed
            view = self._engine.member.session.view
            progress = data_progress(
                schedule_from_proto(view, self.data),
                consistency_from_proto(view.consistency),
                view.async_from,
                self._engine.modes.present,
            )
            if progress is not None:
                self._slices = progress.slices(self._engine.weights.version)
        return schedule_position(self._slices, self.data.slices_per_epoch, self.per_epoch)


class ScheduleNumbers:
    """The values that one prepared scheduler is given, which all workers agree on. See `optimizer.Numbers`."""

    def __init__(self, engine: Engine, position: SchedulePosition, passes: Passes, name: str) -> None:
        self._engine, self._position, self._passes, self._name = engine, position, passes, name
        # The epoch of the last value, and how many values it has.
        self._epoch, self._count = -1, 0

    @property
    def differ(self) -> bool:
        return self._position.data is not None

    def begin_epoch(self) -> None:
        self._count = 0

    def agree(self, value: float) -> float:
        epoch = self._passes.epoch + 1
        self._count = self._count + 1 if epoch == self._epoch else 1
        self._epoch = epoch
        return self._engine.agreeing.agree(self._name, (epoch, self._count), value)

    def so_far(self, epochs: int, wait: bool) -> list[float]:
        values = self._engine.agreeing.so_far(self._name, epochs if wait else 0)
        if epochs and not any(epoch == epochs for epoch, _ in values):
            log.warning(
                f"what ReduceLROnPlateau was given after epoch {epochs} is not known: the job has gone on from a "
                "checkpoint of exactly that moment"
            )
        return [value for (epoch, _), value in sorted(values.items()) if epoch <= epochs]


class Schedules:
    """The prepared schedulers of a script, and how it advances them."""

    def __init__(self, engine: Engine, position: SchedulePosition, passes: Passes) -> None:
        self._engine, self._position, self._passes = engine, position, passes
        self._all: list[StepScheduler] = []

    def __bool__(self) -> bool:
        return bool(self._all)

    def prepare(self, scheduler: LRScheduler) -> StepScheduler:
        """The scheduler that the script gets in place of its own."""
        numbers = ScheduleNumbers(self._engine, self._position, self._passes, f"scheduler {len(self._all)}")
        made = StepScheduler(scheduler, self._position, self._steps_count, numbers)
        self._all.append(made)
        return made

    def check(self, now: list[LRScheduler], optimizer: Optimizer | None, prepared: ServerOptimizer | None) -> None:
        """Raises for a scheduler that is not of the optimizer: those given now, and earlier ones if that comes now."""
        if optimizer is not None and prepared is None:
            for scheduler in (*now, *(earlier.wrapped for earlier in self._all)):
                check_scheduler(scheduler, optimizer)
        elif optimizer is None and prepared is not None:
            for scheduler in now:
                check_scheduler(scheduler, prepared, prepared.wrapped)

    def knows(self, optimizer: ServerOptimizer) -> bool:
        """Whether a scheduler of this optimizer is prepared."""
        return any(one.wrapped.optimizer in (optimizer, optimizer.wrapped) for one in self._all)

    def _steps_count(self) -> bool:
        """True where the script's steps are the job's: inside the loop over the loader, or anywhere without one."""
        return self._passes.in_loop or self._position.data is None

    def begin_epoch(self, epoch: int) -> None:
        """An epoch of ``ctx.epochs`` begins."""
        for scheduler in self._all:
            scheduler.begin_epoch(epoch, self._per_step_elsewhere)

    def set_back(self, epochs: int) -> None:
        """The job went back so many epochs behind the present pass of a plain loop."""
        for scheduler in self._all:
            scheduler.set_back(epochs)

    def align(self) -> None:
        """A worker that had no slice for a while, or has just come, uses the learning rate of the step at hand."""
        for scheduler in self._all:
            scheduler.catch_up(self._per_step_elsewhere)
        known = [scheduler.per_step for scheduler in self._all]
        how = shard_pb2.SCHEDULE_UNSPECIFIED if None in known else shard_pb2.SCHEDULE_OTHER
        self._engine.sender.advances(shard_pb2.SCHEDULE_PER_STEP if True in known else how)

    @property
    def _per_step_elsewhere(self) -> bool:
        """Whether other workers advance their schedules in each step, where this one has not done so with any."""
        own = any(scheduler.per_step for scheduler in self._all)
        return not own and self._engine.weights.heard_schedule == shard_pb2.SCHEDULE_PER_STEP


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
