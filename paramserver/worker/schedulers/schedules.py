"""The prepared schedulers of a script, and how they advance with the job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paramserver import errors
from paramserver.core.versions.advances import MOST, Advances, Call, decode
from paramserver.core.versions.ways import Place, Way
from paramserver.core.work.passes import Passes
from paramserver.worker.engine import Engine
from paramserver.worker.schedulers.counted import Counted, inside_a_slice, twice, unknown, wrong_length
from paramserver.worker.schedulers.measured import MeasuredValues
from paramserver.worker.schedulers.position import SchedulePosition
from paramserver.worker.schedulers.schedule import OptimizerSchedule, irregular
from paramserver.worker.schedulers.scheduler import StepScheduler
from paramserver.worker.script.given import check_scheduler
from paramserver.worker.script.optimizer import ServerOptimizer

log = structlog.get_logger("paramserver.worker")


class Schedules:
    """Learns from the script which schedulers advance when, and advances those of each optimizer together.

    A worker that has not made a step yet knows it from the others. See `scheduler.Calls`.
    """

    def __init__(self, engine: Engine, position: SchedulePosition, passes: Passes) -> None:
        self._engine, self._position, self._passes = engine, position, passes
        self._all: list[StepScheduler] = []
        self._values: dict[int, MeasuredValues] = {}
        self._by_optimizer: dict[int, OptimizerSchedule] = {}
        self._of: list[OptimizerSchedule] = []  # by number of the scheduler
        # Which schedulers this script advances when, as far as its calls say; and whether it has completed a step, so
        # that its calls have named all schedulers of a step.
        self._own, self._shown = Advances(), False
        # The script has handed in a slice, and has advanced these schedulers on its batch.
        self._handed, self._called = False, set[int]()
        # The update of the batch at hand, and the optimizers that have stepped on the batch.
        self._update, self._stepped = 0, set[int]()
        self._counted = Counted()
        # Schedulers whose length is still to be compared with that of the loader; those that came before the loader.
        self._unchecked, self._early = set[int](), set[int]()
        # Schedulers that it has advanced in earlier steps and not in its last one.
        self._left_out = frozenset[int]()
        # The epoch of ctx.epochs that began last; by how many epochs a plain loop does earlier ones again.
        self._epoch, self._back = -1, 0
        self._begun = False

    def __bool__(self) -> bool:
        return bool(self._all)

    # ---- preparing

    def prepare(self, scheduler: LRScheduler) -> StepScheduler:
        """The scheduler that the script gets in place of its own."""
        number = len(self._all)
        if number == MOST:
            raise errors.UserError(f"ctx.prepare has {MOST} schedulers, and takes no more")
        if self._begun or any(one.moved for one in self._of):
            raise errors.UserError(
                f"the {type(scheduler).__name__} comes after the first step: give all schedulers to ctx.prepare before "
                "it, and put schedules that follow each other into torch.optim.lr_scheduler.SequentialLR"
            )
        optimizer = getattr(scheduler.optimizer, "wrapped", scheduler.optimizer)
        schedule = self._by_optimizer.setdefault(id(optimizer), OptimizerSchedule(optimizer, self._value))
        schedule.add(number, scheduler)
        self._unchecked.add(number)
        made = StepScheduler(scheduler, number, self)
        self._all.append(made)
        self._of.append(schedule)
        if isinstance(scheduler, ReduceLROnPlateau):
            self._values[number] = MeasuredValues(self._engine, self._passes, f"scheduler {number}")
        return made

    def check(self, now: list[LRScheduler], given: Sequence[Optimizer], prepared: Sequence[ServerOptimizer]) -> None:
        """Raises for a scheduler that is of no optimizer: those given now, and earlier ones if optimizers come now."""
        if given and not prepared:
            for scheduler in (*now, *(earlier.wrapped for earlier in self._all)):
                check_scheduler(scheduler, *given)
        elif prepared and not given:
            for scheduler in now:
                check_scheduler(scheduler, *prepared, *(one.wrapped for one in prepared))

    def knows(self, optimizer: ServerOptimizer) -> bool:
        """Whether a scheduler of this optimizer is prepared."""
        return any(one.wrapped.optimizer in (optimizer, optimizer.wrapped) for one in self._all)

    # ---- the script advances a scheduler

    @property
    def by_steps(self) -> bool:
        return self._passes.in_loop or self._position.data is None

    @property
    def differ(self) -> bool:
        return self._position.data is not None

    def in_step(self, number: int, *args: Any, **kwargs: Any) -> None:
        scheduler, way = self._all[number].wrapped, Way()
        form: int | None = None if args or kwargs else 0
        if self._regular:
            if self._shown and number not in self._own.per_step:
                raise irregular(scheduler)
            if number in self._called:
                raise twice(scheduler)
            before = self._before(number)
            if form is None:
                form = self._form(number, before, [*args, *kwargs.values()])
            way = Way(before, form or 0)
        if form is None:  # a value that means nothing to other workers, and there are none
            self._call(number, True, args, kwargs)
            return
        self._own = self._own.with_per_step(number, way)
        self._called.add(number)
        self._learn()
        if number in self._early or self._engine.progress.epochs_planned:
            self._check_length(number, self._engine.progress.epochs_planned)
        position, alone = self._position(), self._position.data is None
        self._advance(self._of[number], position, begun=position == self._update or (alone and way.before))

    def _before(self, number: int) -> bool:
        """Whether the script advances this scheduler before the optimizer's step. Raises UserError if it varies."""
        scheduler, data = self._all[number].wrapped, self._position.data
        known = number in self._own.per_step
        if data is None and known:  # the end of a step is the beginning of the next one
            return self._own.way(number).before
        stepped = {id(scheduler.optimizer), id(getattr(scheduler.optimizer, "wrapped", None))} & self._stepped
        if not stepped and data is not None and data.batches > 1:
            raise inside_a_slice(scheduler)
        if stepped and known and self._own.way(number).before:
            raise irregular(scheduler)
        return not stepped and not (known and not self._own.way(number).before)  # a batch may be left out

    def _form(self, number: int, before: bool, given: list[Any]) -> int | None:
        """The form of a value that the script gives to a scheduler in its loop; None: this worker alone knows it."""
        data, value = self._position.data, given[0]
        update = self._position() if data is None and before else self._update
        batches = 0 if data is None else self._position.batches_per_epoch
        places = [Place(0, self._counted.all + (data is None and before)), self._place(update)]
        if data is not None:
            places.insert(0, Place(self._passes.epoch, self._counted.batch))
        form, known = 0, self._known()
        if len(given) == 1 and isinstance(value, int | float):
            heard = 0 if known is None else known.way(number).form
            form = self._counted.form(number, value, places, batches, heard)
        view = self._engine.member.session.view
        if not form and (view.slices_per_step > 1 or len(view.workers) > 1 or number in self._own.per_step):
            raise unknown(self._all[number].wrapped, ", ".join(map(str, given)), batches)
        return form or None

    def _place(self, update: int) -> Place:
        """The batch with which one process would make this update."""
        data = self._position.data
        if data is None:
            return Place(0, update)
        epoch, step = divmod(update, self._position.per_epoch)
        return Place(epoch, min((step + 1) * data.batches, self._position.batches_per_epoch) - 1)

    def _value(self, way: Way, update: int) -> float:
        batches = 0 if self._position.data is None else self._position.batches_per_epoch
        return way.value(self._place(update), batches)

    def _check_length(self, number: int, epochs: int) -> None:
        """Warns if the scheduler was built with another length of the loader than that which counts."""
        data = self._position.data
        if data is None or number not in self._unchecked:
            return
        self._unchecked.discard(number)
        before, after = data.batches_per_epoch, self._position.batches_per_epoch
        early = number in self._early
        if warning := wrong_length(self._all[number].wrapped, before, after, early, epochs):
            log.warning(warning)

    def beside_steps(self, number: int, *args: Any, **kwargs: Any) -> None:
        self._own = self._own.with_between(number)
        self._call(number, False, args, kwargs)

    def measured(self, number: int, value: float, *args: Any, **kwargs: Any) -> None:
        self._own = self._own.with_between(number)
        self._call(number, False, (self._values[number].agree(value), *args), kwargs)

    def _call(self, number: int, inside: bool, args: Any, kwargs: Any) -> None:
        epochs = self._passes.epoch + (0 if inside else 1)
        self._learn()
        schedule = self._of[number]
        schedule.call(Call(number, epochs, self._until_end(schedule), (args, kwargs), inside))

    # ---- the job goes on, or back

    def loader_came(self) -> None:
        """The loader has been prepared. Schedulers that are there were built before."""
        self._early = set(self._unchecked)

    def begin_pass(self) -> None:
        """An iteration over the loader begins."""
        self._counted.begin_pass()

    def batch(self) -> None:
        """The script gets a batch of its slice."""
        self._counted.next()

    def leave(self, epochs: int) -> None:
        """The script ends, after so many epochs."""
        for number in self._own.per_step:
            self._check_length(number, epochs)

    def steps(self, *optimizers: Optimizer) -> None:
        """These optimizers of the script step on the batch at hand."""
        self._stepped.update(map(id, optimizers))

    def handed_in(self) -> None:
        """The script hands in a slice with samples."""
        self._through()
        self._handed = True
        self._tell()

    def hands_in_again(self) -> None:
        """The slice was another worker's, and the script's same step hands in another one."""
        self._handed = False

    def begin_epoch(self, epoch: int) -> None:
        """An epoch of ``ctx.epochs`` begins.

        The script advances schedulers between epochs itself, except where it begins with a later epoch (it came late,
        or the job was resumed) or leaves epochs out: then one advance per epoch is assumed. Where it comes back to an
        earlier epoch (the job went back), it advances them again.
        """
        for values in self._values.values():
            values.begin_epoch()
        former, self._epoch, self._back = self._epoch, epoch, 0
        if not self._all or epoch == former + 1:
            return
        for schedule in self._by_optimizer.values():
            schedule.line.forget(epoch if former >= 0 else 0)
        if epoch > former:
            self._assume(range(former + 1, epoch), late=former < 0)
        self._learn()
        for schedule in self._by_optimizer.values():
            self._advance(schedule, self._position())

    def _assume(self, epochs: range, late: bool) -> None:
        """The script was not there at the end of these epochs; other workers were. ``late``: at no earlier one."""
        known = self._known()
        numbers = known.between if known is not None else ()
        if late and not numbers:
            numbers = tuple(range(len(self._all)))
        numbers = tuple(number for number in numbers if known is None or number not in known.per_step)
        values = {number: self._values[number].so_far(epochs.stop) for number in numbers if number in self._values}
        for over in range(epochs.start + 1, epochs.stop + 1):
            for number in numbers:
                given = [(value,) for place, value in values[number] if place == over] if number in values else [()]
                for args in given:
                    self._of[number].line.record(Call(number, over, self._at_end(over), (args, {})))

    def set_back(self, epochs: int) -> None:
        """The job went back so many epochs behind the present pass of a plain loop, 0: it is in that pass again.

        Plain loops are not told: the calls of the epochs that are done again count when they have been done.
        """
        self._back = epochs

    def align(self, at_end: bool = False) -> None:
        """The job's next slice begins, or (``at_end``) the pass over the loader has come to its end.

        A worker that had no slice for a while, or has just come, uses the learning rates of the step at hand.
        """
        self._through()
        self._begun = True
        self._called.clear()
        self._stepped.clear()
        self._update = self._position()
        self._tell()
        self._learn()
        for schedule in self._by_optimizer.values():
            self._advance(schedule, self._until_end(schedule) if at_end else self._update, begun=not at_end)

    def _through(self) -> None:
        """The script may be through with the last slice that it has handed in, with all advances after it."""
        if not self._handed:
            return
        if self._regular:
            self._left_out = frozenset(self._own.per_step) - self._called
        self._shown, self._handed = True, False

    @property
    def _regular(self) -> bool:
        """Whether the script makes one optimizer step on a batch."""
        data = self._position.data
        return data is None or data.turns == 1

    # ---- inside

    def _known(self) -> Advances | None:
        """Which schedulers advance when, by this script and by others; None as long as no step shows it."""
        if not self._all:
            return self._own
        heard = decode(self._engine.weights.heard_advances)
        if heard is None and not self._shown and not self._own.per_step:
            return None
        per_step = self._own.per_step if self._shown or heard is None else _union(heard.per_step, self._own.per_step)
        between = _union(self._own.between, () if heard is None else heard.between)
        per_step, between = (tuple(n for n in part if n < len(self._all)) for part in (per_step, between))
        ways = {} if heard is None else dict(heard.ways)
        ways.update((number, self._own.way(number)) for number in self._own.per_step)
        return Advances(per_step, between, tuple(sorted(w for w in ways.items() if w[0] in per_step and w[1].number)))

    def _tell(self) -> None:
        known = self._known()
        self._engine.sender.advances("" if known is None else known.encode())

    def _learn(self) -> None:
        known = self._known()
        for schedule in self._by_optimizer.values():
            schedule.advance_in_steps(Advances() if known is None else known)

    def _advance(self, schedule: OptimizerSchedule, position: int, begun: bool = False) -> None:
        schedule.to(position, self._epochs_over, self._left_out, begun)

    @property
    def _epochs_over(self) -> int:
        """The calls after so many epochs count now. In a plain loop later ones count when the job is there again."""
        epoch = self._passes.epoch
        return epoch - self._back if self._passes.plain and self._position.data is not None else epoch + 1

    def _until_end(self, schedule: OptimizerSchedule) -> int:
        """Where the job stands, at most the end of the script's epoch. It is not before the place of the schedulers."""
        position = self._position()
        return max(schedule.line.updates, min(position, self._at_end(self._passes.epoch + 1)))

    def _at_end(self, epochs: int) -> int:
        """The position after so many epochs; without a loader there is no such place, and the position counts."""
        return self._position() if self._position.data is None else epochs * self._position.per_epoch


def _union(first: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    return first + tuple(one for one in others if one not in first)
