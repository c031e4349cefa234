"""Random draws of a script without a loader: every slice has its own seed, set before its batch is drawn."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from torch import nn

from paramserver import errors
from paramserver.core.versions.consistency import Mode
from paramserver.core.work.slices import assign, slice_seed
from paramserver.worker.data.generators import OwnGenerators, generators_of_module
from paramserver.worker.data.own_draws import OwnLoops
from paramserver.worker.data.seeding import restore, seed_everything, states
from paramserver.worker.engine import Engine
from paramserver.worker.pace import Item


class Draws:
    """Seeds torch, NumPy and Python for the slice that this worker computes next, and keeps the slice for the worker.

    The script draws its batch and then steps, so the next slice has to be known when a step is over, and the first one
    when the model is prepared. It stays this worker's even if others join before the step.
    """

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine, self._seed = engine, seed
        self._of_model: OwnGenerators | None = None
        # The slice of the next batch, if that is known.
        self._item: Item | None = None
        # (epoch, index, prefix of the purpose) of the seeds of the next batch.
        self._named = (0, 0, "")
        # The state of all generators before and after the first seed, until the first step.
        self._before: Any = None
        self._after: Any = None
        self._loops = OwnLoops()

    def model_comes(self, model: nn.Module) -> None:
        """Generators that modules of this model own are seeded for each batch, too."""
        self._of_model = OwnGenerators(partial(generators_of_module, model))

    def seeded(self) -> list[Any]:
        """The generators of modules that are seeded for each batch."""
        return self._of_model.found if self._of_model is not None else []

    def begin_epoch(self) -> None:
        """A slice of another epoch comes: modules may have got other generators."""
        if self._of_model is not None:
            self._of_model.begin_round()

    def seed_model(self, seed: int) -> None:
        """Seed all from which the model draws for a batch: the generators of the process, and those of its modules."""
        seed_everything(seed)
        if self._of_model is not None:
            self._of_model.seed(seed)

    def first(self) -> None:
        """The model is prepared, and there is no loader so far: seed for the first batch."""
        engine = self._engine
        rank, workers = engine.member.place()
        lo, hi = assign(engine.member.session.view.slices_per_step, workers)[rank] if rank >= 0 else (0, 0)
        if engine.modes.present.mode is Mode.SYNC and lo < hi:
            self._named = 0, engine.weights.version * engine.member.session.view.slices_per_step + lo, ""
        else:  # no slice is known for this worker: its batch differs from those of all other workers
            self._named = engine.weights.version, engine.member.session.rank, "worker "
        self._before = states()
        self.seed_model(self.seed("model"))
        self._after = states()

    def loader_comes(self) -> None:
        """There is a loader after all: all generators are as if nothing had been seeded.

        Raises DataError if something was drawn meanwhile, since it differs from worker to worker.
        """
        if self._after is None:
            return
        if self._after != states():
            raise errors.DataError(
                "random numbers were drawn between ctx.prepare(model, optimizer) and ctx.prepare(loader), where each "
                "worker draws others: prepare the loader before, or together with the model"
            )
        restore(self._before)
        self._before = self._after = None

    def steps(self) -> None:
        """The script steps on a batch that it has drawn. The first worker says if all workers draw the same."""
        member = self._engine.member
        if member.session.rank == 0 and member.place()[1] > 1:
            self._loops.steps(sys._getframe())

    def take(self) -> Item | None:
        """The slice that the batch was drawn for, if this worker can still hand it in. Once."""
        item, self._item = self._item, None
        self._before = self._after = None
        return item if item is not None and self._engine.loop.still(item) else None

    def next(self) -> None:
        """A slice is handed in: seed for the next slice."""
        self._item = item = self._engine.loop.coming()
        if item is not None:  # else the worker has no slice, and its generators go on
            self._named = item.epoch, item.index, ""
            self.seed_model(self.seed("model"))

    def seed(self, purpose: str) -> int:
        """A seed of the slice that the next batch belongs to."""
        epoch, index, prefix = self._named
        return slice_seed(self._seed, epoch, index, prefix + purpose)
