"""Where the script is in its epochs, for the prepared loader and ``ctx.epochs``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import structlog

from paramserver import errors
from paramserver.core.versions.consistency import Mode
from paramserver.core.work.passes import Passes
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
        self, engine: Engine, passes: Passes, schedules: Schedules, objects: Objects, saves_best: bool
    ) -> None:
        """``saves_best``: checkpoints are kept for values that the script logs, so the ends of epochs are saved."""
        self._engine, self._passes, self._schedules, self._objects = engine, passes, schedules, objects
        self._saves_best = saves_best
        self._steps: Steps | None = None
        self._guard: Guard | None = None
        self._thawing: Thawing | None = None
        self._left = False
        # The number of the present iteration over the loader; what it was to give next, if that is known already.
        self._iteration = 0
        self._kept: list[Item | None] = []

    def model_comes(self, steps: Steps, guard: Guard, thawing: Thawing) -> None:
        """The model is prepared."""
        self._steps, self._guard, self._thawing = steps, guard, thawing

    # ---- epochs

    def epochs(self, count: int, loader: bool) -> Iterator[int]:
        """The epochs from where the job stands up to ``count``; earlier ones come again. ``loader``: there is one."""
        progress, rollback = self._engine.progress, self._engine.rollback
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
                yield epoch
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
                "trained, unless other workers do it"
            )
        if not failed:
            self._schedules.leave(passes.epoch + 1)
        if not passes.plain:
            return
        progress.plan(max(progress.epochs_planned, passes.epoch + 1))
        progress.went_through(progress.through or (passes.ended and not failed))

    # ---- for the loader

    def begin_pass(self) -> int:
        if self._left:
            raise errors.UserError("this worker has left the job: iterate over the prepared loader before ctx.close()")
        if self._steps is None:
            raise errors.UserError("give the model and its optimizer to ctx.prepare before iterating over its loader")
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
                if self._saves_best and not engine.rollback.aborted:
                    engine.loop.end_of_epoch(passes.epoch)
                return None
            if back is not None:
                self._schedules.set_back(back)
            if engine.loop.may_compute(item):
                engine.loop.goes_on()
                engine.member.phases.enter(DATA)
                return item
            assert self._steps is not None
            self._steps.pass_over(item)

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
