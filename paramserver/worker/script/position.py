"""Where the script is in its epochs, for the prepared loader and ``ctx.epochs``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import structlog
from torch.utils.data import DataLoader, DistributedSampler

from paramserver import errors
from paramserver.core.versions.consistency import Mode
from paramserver.core.work.passes import Passes
from paramserver.worker.data.numbers import EpochNumbers
from paramserver.worker.engine import Engine
from paramserver.worker.job.phases import COMPUTE, DATA
from paramserver.worker.later.thawing import Thawing
from paramserver.worker.pace import Item
from paramserver.worker.registered.objects import Objects
from paramserver.worker.schedulers.schedules import Schedules
from paramserver.worker.script.guard import Guard
from paramserver.worker.script.steps import Steps

log = structlog.get_logger("paramserver.worker")


class Position:
    """Gives slices to the loader, and follows the job where it goes back. See `loader.LoopPosition`."""

    def __init__(
        self,
        engine: Engine,
        passes: Passes,
        schedules: Schedules,
        objects: Objects,
        numbers: EpochNumbers,
        saves_best: bool,
    ) -> None:
        """``saves_best``: checkpoints are kept for values that the script logs, so the ends of epochs are saved."""
        self._engine, self._passes, self._schedules, self._objects = engine, passes, schedules, objects
        self._numbers = numbers
        self._saves_best = saves_best
        # Which epoch the script says that its next pass is; a `DistributedSampler` of its own, which may know.
        self._said: int | None = None
        self._sampler: DistributedSampler[Any] | None = None
        # The optimizer has come with a state.
        self._trained_before = False
        self._steps: Steps | None = None
        self._guard: Guard | None = None
        self._thawing: Thawing | None = None
        self._left = False
        # The number of the present iteration over the loader; what it was to give next, if that is known already.
        self._iteration = 0
        self._kept: list[Item | None] = []
        # A warning has said that the weights are past the end of a pass.
        self._told_late = False

    def model_comes(self, steps: Steps, guard: Guard, thawing: Thawing, trained_before: bool = False) -> None:
        """The model is prepared. ``trained_before``: its optimizer has come with a state."""
        self._steps, self._guard, self._thawing = steps, guard, thawing
        self._trained_before = trained_before

    def loader_comes(self, loader: DataLoader[Any]) -> None:
        """The loader is prepared."""
        for one in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
            if isinstance(one, DistributedSampler):
                self._sampler = one

    # ---- epochs

    def epochs(self, count: int, loader: bool, start: int | None) -> Iterator[int]:
        """The numbers of epochs from where the job stands up to ``count``; earlier ones come again.

        ``loader``: there is one. ``start``: the number of the job's first epoch.
        """
        progress, rollback, numbers = self._engine.progress, self._engine.rollback, self._numbers
        if start is not None:
            numbers.begin_with(start)
            self._tell("the first epoch of ctx.epochs", numbers.first)
        count -= numbers.first
        if count < 1:  # all of them were trained before
            return
        progress.plan(count)
        progress.went_through(False)
        epoch = min(rollback.open_epoch(), count - 1)
        while True:
            while epoch < count:
                progress.in_epoch(epoch)
                self._passes.plan(epoch, last=epoch == count - 1)
                if self._thawing is not None:
                    self._thawing.begin_epoch(epoch)
                self._schedules.begin_epoch(epoch)
                self._objects.follow()
                rollback.goes_on()
                yield numbers.of(epoch)
                epoch = rollback.next_epoch(epoch)
            self._objects.settle()
            if self._engine.loop.finish():
                break
            epoch = min(rollback.open_epoch(), count - 1)
        if self._guard is not None:
            self._guard.outside()
        # A script that leaves its last epoch in the middle wants no more of it, and does not promise the rest.
        progress.went_through(not loader or not self._passes.left)

    def leave(self, loader: bool, failed: bool) -> None:
        """The script leaves the job. A plain loop over the loader is known to be at its end when the script is.

        ``loader``: there is one. ``failed``: the script ends with an error.
        """
        self._left = True
        if not failed:
            with contextlib.suppress(errors.ParamServerError):  # the job's own errors come in a moment
                self._objects.settle()
        passes, progress = self._passes, self._engine.progress
        if self._steps is not None and self._steps.unfinished and not failed:
            log.warning(f"the last step is lost: {self._steps.unfinished}")
        if passes.left and loader:
            log.warning(
                f"the script ends in the middle of epoch {passes.epoch + 1}: what is left of that epoch is not "
                "trained, unless other workers do it. A count of batches is that of one worker: to end all workers "
                f"after so many updates, compare ctx.version with their number (now {self._engine.weights.version})"
            )
        if not failed:
            self._schedules.leave(passes.epoch + 1)
        if not passes.plain:
            return
        progress.plan(max(progress.epochs_planned, passes.epoch + 1))
        progress.went_through(progress.through or (passes.ended and not failed))

    # ---- for the loader

    def set_epoch(self, epoch: int) -> None:
        self._said = epoch

    def _number(self) -> None:
        """A pass begins: if the script says its number, the job's epochs are numbered by it."""
        passes, numbers, said = self._passes, self._numbers, self._said
        self._said = None
        if passes.planned or passes.epoch >= 0:
            comes = numbers.of(passes.epoch if passes.planned else passes.next_epoch)
            if said is not None and said != comes:
                raise errors.UserError(
                    f"loader.set_epoch({said}) was called, and the epoch that begins is {comes}, counted from 0: call "
                    "it with the number of each epoch before the loop over the loader, or before the first one only"
                )
            return
        if said is None and self._sampler is not None:
            said = self._sampler.epoch or None
        if said is not None:
            numbers.begin_with(said)
            if said < numbers.first:
                raise errors.UserError(
                    f"the script begins with epoch {said}, and the job has begun with epoch {numbers.first}: begin "
                    "with the same epoch in all workers"
                )
            passes.begins_with(said - numbers.first)
        self._tell("the first loop over the prepared loader", numbers.of(passes.next_epoch), said is None)

    def _tell(self, what: str, epoch: int, unsaid: bool = False) -> None:
        """Say, on one worker, with which epoch the script begins, unless that is epoch 0 of a new optimizer.

        ``unsaid``: the script has not said the number; a warning if it may go on from a checkpoint of its own.
        """
        session = self._engine.member.session
        if session.rank or self._engine.weights.version:
            return
        what = f"{what} is epoch {epoch}, counted from 0: the order of samples follows from this number"
        if unsaid and self._trained_before:
            log.warning(
                f"{what}. The optimizer has been trained before: to go on from another epoch, call "
                "loader.set_epoch(epoch) before the loop"
            )
        elif epoch:
            log.info(what)

    def begin_pass(self) -> int:
        if self._left:
            raise errors.UserError("this worker has left the job: iterate over the prepared loader before ctx.close()")
        if self._steps is None:
            raise errors.UserError("give the model and its optimizer to ctx.prepare before iterating over its loader")
        if not self._passes.through:
            self._number()
        iteration = self._passes.begin()
        self._engine.progress.in_epoch(self._passes.epoch)
        self._iteration = iteration
        self._kept.clear()
        self._schedules.begin_pass()
        return iteration

    def next_turn(self, item: Item) -> Item | None:
        """The slice to compute after ``item``, if it is the next turn on the same batch; else the loader gives it."""
        following = self.next_item(self._iteration)
        if following is not None and self._follows(item, following):
            self._engine.member.phases.enter(COMPUTE)
            return following
        self._kept.append(following)
        self._passes.looked_ahead()
        return None

    def _follows(self, one: Item, other: Item) -> bool:
        """Whether the other slice is the next turn on the batch of the first one."""
        data = self._engine.slices.data
        turns = data.turns if data is not None else 1
        return (other.epoch, other.index) == (one.epoch, one.index + 1) and other.index % turns > 0

    def next_item(self, iteration: int) -> Item | None:
        passes, engine = self._passes, self._engine
        if self._kept:
            kept = self._kept.pop()
            if kept is None:
                passes.gives(None)
            return kept
        passes.check(iteration)
        while True:
            item = engine.loop.next_item(passes.epoch, passes.last, stay=passes.plain)
            if item is None and passes.last and engine.modes.present.mode is Mode.ASYNC:
                engine.reading.pull_latest()
            elif item is None:
                engine.reading.settle()
            if passes.plain and engine.rollback.went_back():
                passes.goes_back()
                if item is None:  # slices of this pass are undone
                    continue
            back = passes.gives(None if item is None else item.epoch)
            if self._thawing is not None:
                self._thawing.check()
            if item is None:  # a schedule is where the epoch's last update has brought it
                self._schedules.align(at_end=True)
                if engine.rollback.aborted and engine.rollback.open_epoch() > passes.epoch:
                    engine.rollback.goes_on()  # others have trained the epoch again meanwhile: it does not come again
                self._look_past()
                if self._saves_best and not engine.rollback.aborted:
                    engine.loop.end_of_epoch(passes.epoch)
                return None
            if back is not None:
                self._schedules.set_back(back)
            if engine.loop.may_compute(item):
                passes.steps_past = 0
                engine.loop.goes_on()
                engine.member.phases.enter(DATA)
                return item
            assert self._steps is not None
            self._steps.pass_over(item)

    def _look_past(self) -> None:
        """The script is at the end of its pass. Other workers do not wait for a worker that was not needed."""
        engine, passes, epoch, past = self._engine, self._passes, self._passes.epoch, 0
        if engine.modes.present.mode is Mode.SYNC and engine.slices.counted:
            schedule = engine.slices.schedule()
            if schedule.epoch <= epoch:
                past = max(0, engine.weights.version - schedule.first_version(epoch + 1))
        passes.steps_past = past
        if past and not self._told_late:
            self._told_late = True
            log.warning(
                f"the weights of this worker are {past} steps past the end of epoch {epoch}: the other workers did not "
                "need it for the last steps, and have gone on. What the script itself computes with the model now is "
                "of these weights; ctx.steps_past_epoch has the number. The results of ctx.evaluate are those of the "
                "epoch's end"
            )

    def leave_pass(self, iteration: int) -> None:
        if self._passes.leave_iteration(iteration) and self._guard is not None:
            self._guard.outside()

    def ahead(self) -> Iterator[Item]:
        """The slices whose batches are likely to be wanted. A batch serves for all turns that follow each other."""
        loop, former = self._engine.loop, None
        for item in loop.ahead(self._passes.epoch):
            if not loop.poisoned(item) and not (former is not None and self._follows(former, item)):
                yield item
            former = item

    def begin(self, item: Item, number: int, of: int, samples: int) -> None:
        assert self._steps is not None
        self._engine.member.phases.enter(COMPUTE)
        self._steps.begin(item, number, of, samples)

    def pass_over(self, item: Item) -> None:
        assert self._steps is not None
        self._steps.pass_over(item)

    def go_on(self) -> None:
        self._engine.member.phases.enter(DATA)

    def end(self, item: Item) -> None:
        assert self._steps is not None
        self._steps.end(item)
