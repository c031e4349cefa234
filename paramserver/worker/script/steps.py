"""The optimizer steps of a script: the gradients of a slice are taken, checked and handed in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import structlog
import torch

from paramserver import errors
from paramserver.config.sections import Training
from paramserver.core.layout.lr_scaling import LrScaling
from paramserver.core.versions.names import AsyncName, SyncName
from paramserver.core.work.passes import Passes
from paramserver.core.work.slices import DataSpec, slice_seed
from paramserver.v1 import types_pb2
from paramserver.worker.engine import Engine
from paramserver.worker.flat import PartialSum
from paramserver.worker.pace import Item
from paramserver.worker.registered.objects import Objects
from paramserver.worker.schedulers.position import SchedulePosition
from paramserver.worker.schedulers.rates import Rates
from paramserver.worker.schedulers.schedules import Schedules
from paramserver.worker.script.binding import ModelBinding
from paramserver.worker.script.draws import Draws
from paramserver.worker.script.guard import Guard
from paramserver.worker.script.loader import of_batch

log = structlog.get_logger("paramserver.worker")


class Steps:
    """Steps of one model. The loader says which slice a step is for; without a loader a step takes the next slice."""

    def __init__(
        self,
        engine: Engine,
        training: Training,
        binding: ModelBinding,
        guard: Guard,
        passes: Passes,
        position: SchedulePosition,
        schedules: Schedules,
        draws: Draws,
        objects: Objects,
    ) -> None:
        self._engine, self._training, self._binding, self._guard = engine, training, binding, guard
        self._passes, self._position, self._schedules, self._draws = passes, position, schedules, draws
        self._objects = objects
        self.rates = Rates(schedules)
        self._scaling = LrScaling(training.lr_scaling, training.lr_base_slices, training.lr_warmup_steps)
        self.item: Item | None = None
        # Epoch and index of the slice that the script was given last.
        self._batch: tuple[int, int] | None = None
        # The batch of this slice that the script has, from 0, and how many batches the slice has.
        self._number, self._of = 0, 1
        # Of the slice that the script has; without a loader 1.
        self._samples = 1
        # The script has asked whether a step is due.
        self._asks = False
        # The global norm that the script has asked for in the present step, 0 if it has not.
        self._clip_norm = 0.0
        self._told_skip = False
        # A slice was computed to learn how the script clears gradients.
        self._rehearsed = False

    @property
    def has_batch(self) -> bool:
        """Whether the script has a batch of the loader that it has not stepped on."""
        return self.item is not None

    @property
    def _only(self) -> Collection[int] | None:
        """The parameters that the next step is about, by index; None: all."""
        return None

    @property
    def unfinished(self) -> str:
        """A sentence about a step of which only a part was made; empty: there is none."""
        return ""

    def take(self) -> Item | None:
        """The slice that the script has; the caller hands it in, instead of an optimizer step."""
        item, self.item = self.item, None
        return item

    # ---- slices of the loader

    @property
    def due(self) -> bool:
        """Whether the script has the last batch of its slice, so that the next optimizer step belongs after it."""
        self._asks = True
        return self._position.data is None or (self.item is not None and self._number + 1 == self._of)

    def begin(self, item: Item, number: int, of: int, samples: int) -> None:
        """Batch ``number`` (from 0) of the ``of`` batches of a slice is about to be handed to the script.

        ``samples``: of the whole slice.
        """
        self.item, self._number, self._of, self._samples = item, number, of, samples
        if self._batch is None or self._batch[0] != item.epoch:
            self._draws.begin_epoch()
        self._batch = item.epoch, item.index
        if number == 0:
            _check_autocast(self._binding.device.type)
            self._engine.summing.begin(item, samples)
            self._objects.look()
            self.has_slice(item)
            self._schedules.align()
            self._guard.buffers()
            self._binding.leftover.begin()
            self._schedules.batch()
        self._draws.seed_model(self.seed("model"))
        if number + 1 == of:  # gradients leave in the last backward pass, when they are complete
            self._begin_early(item)

    def has_slice(self, item: Item) -> None:
        """Values that the script logs from now on belong to this slice."""
        step = item.name.step if isinstance(item.name, SyncName) else self._engine.weights.version
        self._engine.records.has(self._engine.shards.timeline, step, (item.epoch, item.index, self._samples))

    def seed(self, purpose: str) -> int:
        """A seed of the batch that the script has; there must be one."""
        assert self._batch is not None
        data, (epoch, index) = self._position.data, self._batch
        batch = index if data is None else index // data.turns
        number = self._position.numbers.of(epoch)
        return slice_seed(self._training.seed, number, batch, of_batch(purpose, self._number))

    def _begin_early(self, item: Item) -> None:
        """Let gradients leave as the backward pass makes them, if earlier contributions show that this is possible."""
        if self._engine.sender.take_early() is not None:  # the script has not stepped on the previous slice
            self._binding.backward.end()
        begun = self._engine.loop.begin_early(item, self._samples, self._groups)
        if begun is not None:
            self._binding.backward.begin(*begun)

    def end(self, item: Item) -> None:
        """The script asks for the next batch: a slice without an optimizer step counts as a slice without samples."""
        if self.item is not item:
            return
        if not torch.is_grad_enabled():
            raise errors.UserError(
                "a batch of the prepared loader was taken where gradients are off, and without optimizer.step(): it "
                "gives only slices to train on, so evaluate over a DataLoader that was not prepared"
            )
        if self._binding.has_gradients(self._only):
            if self._of > 1:
                raise errors.UserError(
                    f"the script has all {self._of} batches of a slice, and asks for another batch without "
                    "optimizer.step(): call it after each batch where ctx.step_due is true"
                )
            raise errors.UserError(
                "the script asks for another batch without optimizer.step(), and has gradients of the present one: to "
                "add up gradients over k batches, say so with ctx.prepare(model, optimizer, loader, accumulate=k); to "
                "leave a batch out, clear its gradients (optimizer.zero_grad())"
            )
        if not self._told_skip:
            self._told_skip = True
            log.warning(
                "the script asks for another batch without optimizer.step(), and has no gradients: its slice counts "
                "without samples"
            )
        self._hand_in(item, self._engine.places.pool.take())

    def pass_over(self, item: Item) -> None:
        """A slice counts without samples: it has none, or it kills the workers that compute it."""
        self.item = item
        self._schedules.align()
        self._binding.reset_buffers()
        self._hand_in(item, self._engine.places.pool.take())

    # ---- the script steps

    def clip_to(self, max_norm: float) -> None:
        """This step's gradient is to be clipped to this global 2-norm."""
        self._clip_norm = max_norm

    def step(self, unscale: float, overflow: bool) -> None:
        """Contribute the gradients, times ``unscale``; ``overflow``: the script has found that they are not finite."""
        clip_norm = self._clip_norm
        if self._position.data is None:
            self._objects.look()
            self._draws.steps()
        while not self._step(unscale, overflow):
            # Without a loader: a worker joined or left, and another worker had this part of the step.
            self._engine.sender.handed.handed_in_again()
            self._schedules.hands_in_again()
            self._clip_norm = clip_norm
        if self._position.data is None:
            self._binding.reset_buffers()
            self._engine.rollback.goes_on()
            self._binding.leftover.begin()
            self._engine.records.has(self._engine.shards.timeline, self._engine.weights.version)
            self._draws.next()
            self._schedules.batch()

    def _step(self, unscale: float, overflow: bool) -> bool:
        """False: another worker's contribution of this name counts, so this contribution needs another name."""
        binding, sender, ever_used = self._binding, self._engine.sender, self._engine.weights.ever_used
        self.check_place()
        try:
            binding.steps(self._only)
        except errors.UserError:
            self._groups()  # a group that the script has taken out is not cleared: that is said first
            raise
        item, taken = self._item_to_step_on(unscale)
        samples = self._samples
        clipped_here = self._clip_norm > 0 and isinstance(item.name, AsyncName)
        plain = not (unscale != 1.0 or overflow or clipped_here)
        early = sender.take_early()
        lacking = binding.lacking(ever_used, self._only)
        if early is not None and binding.backward.end() and plain and not lacking:
            partial = early
            binding.gather_buffers(partial, samples)
        elif taken is not None:
            partial = taken
        else:
            partial = self._engine.places.pool.take()
            binding.gather(partial, samples, unscale, self._only, ever_used)
        if isinstance(item.name, SyncName) and item.name.lo:
            binding.leave_to_first(partial)
        if early is not None:
            sender.foresight.compare(partial.used, self._groups(), self._clip_norm, partial is early)
        sender.foresight.learn(frozenset(partial.used if plain else ()))
        bad = None if overflow else binding.non_finite(partial)
        if overflow or bad is not None:
            partial = self._without_gradient(partial, item, bad)
        elif clipped_here:
            binding.clip(partial, self._clip_norm)
        sender.clip_to(self._clip_norm)
        self._clip_norm = 0.0
        return self._hand_in(item, partial, again=lacking is None and self._rehearses())

    def _rehearses(self) -> bool:
        """Whether the present slice is to be computed again: then it is known how the script clears gradients.

        Without a loader, another slice would come.
        """
        if self._rehearsed or self._position.data is None:
            return False
        self._rehearsed = True
        log.info("the first slice is computed twice here: so far it is not known how the script clears gradients")
        return True

    def _item_to_step_on(self, unscale: float) -> tuple[Item, PartialSum | None]:
        """The slice of this step; and the gradients, where they had to be taken before the slice was known."""
        taken: PartialSum | None = None
        if self.item is None:
            self.item = self._draws.take()
            if self.item is None:
                # Weights that come with the slice reset the buffers. So the batch's changes are gathered before.
                taken = self._engine.places.pool.take()
                self._binding.gather(taken, 1, unscale, ever_used=self._engine.weights.ever_used)
                self.item = self._engine.loop.next_item(0, False)
            self._schedules.align()
            assert self.item is not None
        return self.item, taken

    def check_place(self) -> None:
        """Raises UserError if an optimizer step does not belong here, or will come at the wrong places."""
        data = self._position.data
        if self.item is None:
            if data is not None and not self._passes.iteration:
                raise errors.UserError(
                    "optimizer.step() comes before any iteration over the prepared loader. If the script loops over "
                    "the DataLoader that it gave to ctx.prepare, let it loop over the one that ctx.prepare has "
                    "returned: model, optimizer, loader = ctx.prepare(model, optimizer, loader)"
                )
            if data is not None:
                raise errors.UserError(
                    "optimizer.step() belongs once into each iteration over the prepared loader: to step several times "
                    'on a batch, say how often (ctx.prepare(model, optimizer, loader, name="model", turns=2))'
                )
            return
        if self._number + 1 < self._of:
            raise errors.UserError(
                f"optimizer.step() was called after batch {self._number + 1} of the {self._of} batches of a slice "
                "(accumulate): call it once for them, after the batch where ctx.step_due is true"
            )
        if data is not None and not data.even and not self._asks:
            raise errors.UserError(_uneven(data))

    def _without_gradient(self, partial: PartialSum, item: Item, bad: str | None) -> PartialSum:
        policy = self._training.nonfinite
        if bad is not None:
            text = f"the gradient of {bad!r} is not finite ({item.name})"
            if policy == "fail":
                raise errors.NonFiniteError(f"{text}; training.nonfinite = fail ends the run")
            log.warning(f"{text}: {'the step is skipped' if policy == 'skip' else 'the slice is left out'}")
        self._engine.sender.discard(partial)
        empty = self._engine.places.pool.take()
        # An overflow that GradScaler found is always a skipped step, as it is without a cluster.
        empty.overflow = bad is None or policy == "skip"
        return empty

    def _hand_in(self, item: Item, partial: PartialSum, again: bool = False) -> bool:
        self.item = None
        self._passes.steps()
        self._schedules.steps(*self._binding.optimizers)
        groups = self._groups()
        if partial.samples:
            self.rates.check(item, self._engine.shards.timeline, groups)
            self._schedules.handed_in()
        return self._engine.loop.contribute(item, partial, groups, again)

    def _groups(self) -> list[types_pb2.GroupHypers]:
        """The hyper-parameters for the present update."""
        engine = self._engine
        of_step = engine.member.session.view.slices_per_step
        factor = self._scaling.factor(engine.slices_of_update(), of_step, engine.weights.version)
        return self._binding.groups(factor, self._stepped_with())

    def _stepped_with(self) -> Sequence[dict[str, Any]] | None:
        """The parameter groups of the present step; None: those of the optimizers as they are now."""
        return None


def _check_autocast(device: str) -> None:
    """Raises UserError where the casts of weights would be kept from slice to slice: those of the first version."""
    if torch.is_autocast_enabled(device) and torch.is_autocast_cache_enabled():
        raise errors.UserError(
            "the loop over the prepared loader lies within torch.autocast, which keeps its casts of the weights until "
            "it ends, so each worker would compute on the weights of its first slice: put torch.autocast around the "
            "forward pass only, or say cache_enabled=False"
        )


def _uneven(data: DataSpec) -> str:
    batches, group = data.batches_per_epoch, data.slices_per_step * data.batches
    return (
        f"an epoch has {batches} batches, and {data.slices_per_step} slices of {data.batches} batches make a step "
        "(accumulate), so the slices of its last step have fewer batches, and a script cannot count them itself: call "
        f"optimizer.step() after each batch where ctx.step_due is true, or give an epoch a multiple of {group} batches"
    )
