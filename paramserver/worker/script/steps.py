"""The optimizer steps of a script: the gradients of a slice are taken, checked and handed in."""

from __future__ import annotations

import structlog
import torch

from paramserver import errors
from paramserver.config.sections import Training
from paramserver.core.versions.names import AsyncName, SyncName
from paramserver.core.work.passes import Passes
from paramserver.core.work.slices import slice_samples, slice_seed
from paramserver.worker.engine import Engine
from paramserver.worker.flat import PartialSum
from paramserver.worker.pace import Item
from paramserver.worker.script.binding import ModelBinding
from paramserver.worker.script.draws import Draws
from paramserver.worker.script.guard import Guard
from paramserver.worker.script.schedule import SchedulePosition, Schedules
from paramserver.worker.script.seeding import seed_everything

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
    ) -> None:
        self._engine, self._training, self._binding, self._guard = engine, training, binding, guard
        self._passes, self._position, self._schedules, self._draws = passes, position, schedules, draws
        self.item: Item | None = None
        # The global norm that the script has asked for in the present step, 0 if it has not.
        self._clip_norm = 0.0
        self._told_skip = False

    def take(self) -> Item | None:
        """The slice that the script has; the caller hands it in, instead of an optimizer step."""
        item, self.item = self.item, None
        return item

    # ---- slices of the loader

    def begin(self, item: Item) -> None:
        """The slice's batch is about to be handed to the script."""
        self.item = item
        step = item.name.step if isinstance(item.name, SyncName) else self._engine.weights.version
        slice_ = item.epoch, item.index, self._samples(item)
        self._engine.records.has(self._engine.shards.timeline, step, slice_)
        self._schedules.align()
        self._guard.buffers()
        seed_everything(slice_seed(self._training.seed, item.epoch, item.index, "model"))
        self._begin_early(item)

    def _begin_early(self, item: Item) -> None:
        """Let gradients leave as the backward pass makes them, if earlier contributions show that this is possible."""
        if self._engine.sender.take_early() is not None:  # the script has not stepped on the previous slice
            self._binding.backward.end()
        begun = self._engine.loop.begin_early(item, self._samples(item), self._binding.groups)
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
        if not self._told_skip:
            self._told_skip = True
            log.warning(
                "a batch was taken without optimizer.step(); it counts as a slice without samples "
                "(to accumulate gradients, raise training.slices_per_step instead)"
            )
        self._hand_in(item, self._engine.places.pool.take())

    def pass_over(self, item: Item) -> None:
        """This slice kills the workers that compute it: it counts without its samples."""
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
        while not self._step(unscale, overflow):
            # Without a loader: a worker joined or left, and another worker had this part of the step.
            self._engine.sender.handed.handed_in_again()
            self._clip_norm = clip_norm
        if self._position.data is None:
            self._binding.reset_buffers()
            self._engine.records.has(self._engine.shards.timeline, self._engine.weights.version)
            self._draws.next()

    def _step(self, unscale: float, overflow: bool) -> bool:
        """False: another worker's contribution of this name counts, so this contribution needs another name."""
        binding, sender = self._binding, self._engine.sender
        item, taken = self._item_to_step_on(unscale)
        samples = self._samples(item)
        clipped_here = self._clip_norm > 0 and isinstance(item.name, AsyncName)
        plain = not (unscale != 1.0 or overflow or clipped_here)
        early = sender.take_early()
        if early is not None and binding.backward.end() and plain:
            partial = early
            binding.gather_buffers(partial, samples)
        elif taken is not None:
            partial = taken
        else:
            partial = self._engine.places.pool.take()
            binding.gather(partial, samples, unscale)
        if early is not None:
            sender.foresight.compare(partial.used, binding.groups(), self._clip_norm, partial is early)
        sender.foresight.learn(frozenset(partial.used if plain else ()))
        bad = None if overflow else binding.non_finite(partial)
        if overflow or bad is not None:
            partial = self._without_gradient(partial, item, bad)
        elif clipped_here:
            binding.clip(partial, self._clip_norm)
        sender.clip_to(self._clip_norm)
        self._clip_norm = 0.0
        return self._hand_in(item, partial)

    def _item_to_step_on(self, unscale: float) -> tuple[Item, PartialSum | None]:
        """The slice of this step; and the gradients, where they had to be taken before the slice was known."""
        taken: PartialSum | None = None
        if self.item is None:
            if self._position.data is not None:
                raise errors.UserError("optimizer.step() belongs once into each iteration over the prepared loader")
            self.item = self._draws.take()
            if self.item is None:
                # Weights that come with the slice reset the buffers. So the batch's changes are gathered before.
                taken = self._engine.places.pool.take()
                self._binding.gather(taken, 1, unscale)
                self.item = self._engine.loop.next_item(0, False)
                self._schedules.align()
            assert self.item is not None
        return self.item, taken

    def _samples(self, item: Item) -> int:
        return slice_samples(self._position.data, item.index) if self._position.data is not None else 1

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

    def _hand_in(self, item: Item, partial: PartialSum) -> bool:
        self.item = None
        self._passes.steps()
        return self._engine.loop.contribute(item, partial, self._binding.groups())
