"""The work of ``ctx.prepare`` on a script's objects: a registered model, an optimizer, a loader, schedulers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.config.sections import Training
from paramserver.core.versions.consistency import Mode
from paramserver.core.work.passes import Passes
from paramserver.worker import alike
from paramserver.worker.data.described import describe_loader, is_stream, with_turns
from paramserver.worker.data.own_draws import OwnDraws
from paramserver.worker.data.streams import Stream
from paramserver.worker.engine import Engine
from paramserver.worker.later.left_out import compare
from paramserver.worker.later.thawing import Thawing
from paramserver.worker.models import sync_batch_norm
from paramserver.worker.models.clipping import Clipping
from paramserver.worker.models.joint import JointSteps
from paramserver.worker.models.prepared import Models, State, state_of
from paramserver.worker.models.steps import TurnSteps
from paramserver.worker.registered.objects import Objects
from paramserver.worker.schedulers.position import SchedulePosition
from paramserver.worker.schedulers.scheduler import StepScheduler
from paramserver.worker.schedulers.schedules import Schedules
from paramserver.worker.script.binding import ModelBinding
from paramserver.worker.script.compared import Compared
from paramserver.worker.script.draws import Draws
from paramserver.worker.script.given import (
    check_accumulate,
    check_loader,
    check_model,
    check_objects,
    check_rules,
    check_scheduler,
)
from paramserver.worker.script.guard import Guard
from paramserver.worker.script.loader import Batches, IndexedBatches, SliceLoader, StreamBatches
from paramserver.worker.script.optimizer import ServerOptimizer, told_of_steps
from paramserver.worker.script.position import Position
from paramserver.worker.script.state import bring, in_torch_format
from paramserver.worker.script.steps import Steps
from paramserver.worker.weights.reads import Reads

log = structlog.get_logger("paramserver.worker")


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of a context that the objects of the script are connected with."""

    engine: Engine
    training: Training
    device: torch.device
    passes: Passes
    position: SchedulePosition
    loop: Position
    schedules: Schedules
    draws: Draws
    objects: Objects
    compared: Compared
    own_draws: OwnDraws


class Prepared:
    """The objects that were prepared so far."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        # Of several models with names.
        self.models = Models()
        self.model: nn.Module | None = None
        self.binding: ModelBinding | None = None
        self.guard: Guard | None = None
        self.steps: Steps | None = None
        # Of a model without a name: its optimizers, in the order of their `prepare`.
        self.optimizers: list[ServerOptimizer] = []
        self.loader: SliceLoader | None = None
        # Of the first worker.
        self.clipping: Clipping | None = None

    def prepare(
        self,
        objects: Sequence[Any],
        accumulate: int,
        name: str,
        turns: int,
        later: Sequence[Any],
        only_trained: bool,
        batches: int,
        own_streams: bool,
        buffers: object,
    ) -> Any:
        """See `Context.prepare`."""
        check_objects(objects)
        _check_types(objects)
        check_accumulate(accumulate, objects)
        model = next((o for o in objects if isinstance(o, nn.Module)), None)
        optimizers = list(dict.fromkeys(o for o in objects if isinstance(o, torch.optim.Optimizer)))
        if (model is None) != (not optimizers):
            raise errors.ModelError("give the model and its optimizer to ctx.prepare together, in one call")
        several = len(optimizers) > 1
        rules = check_rules(buffers, model)
        if several and (name or self.models or later):
            raise errors.ModelError(
                "several optimizers were given to ctx.prepare: that is for a job with one model (without name=...) and "
                "without groups that are added later (later=...)"
            )

        def one(thing: Any) -> Any:
            return self._prepare_one(thing, accumulate, batches, own_streams)

        if name or self.models:
            if later or only_trained or rules:
                raise errors.UserError(
                    "later, only_trained and buffers are for a job with one model, and this one has several (name=...)"
                )
            return self._prepare_named(objects, model, optimizers[0] if optimizers else None, name, turns, one)
        if turns != 1:
            raise errors.UserError("turns belongs to a model with a name: ctx.prepare(model, optimizer, name=...)")
        self._parts.schedules.check([o for o in objects if isinstance(o, LRScheduler)], optimizers, self.optimizers)
        if model is not None:
            self._prepare_model(model, optimizers, later, only_trained, rules)
        elif later or only_trained:
            raise errors.UserError(
                "later and only_trained belong into the call of ctx.prepare that gets the model and its optimizer"
            )
        return_values = [one(o) for o in objects]
        if any(isinstance(o, DataLoader) for o in objects):
            self._parts.schedules.loader_came()
        self._check_slices()
        if model is not None and self.loader is None:
            self._parts.draws.first()
        return return_values[0] if len(return_values) == 1 else tuple(return_values)

    def _check_slices(self) -> None:
        """Raises DataError if the model needs slices that the loader does not promise."""
        data, loader = self._parts.position.data, self.loader
        slices = self._parts.engine.member.session.view.slices_per_step
        if self.model is None or data is None or loader is None or slices == 1:
            return
        if sync_batch_norm.layers_of(self.model):
            sync_batch_norm.check_data(data, is_stream(loader.loader))

    def _prepare_named(
        self,
        objects: Sequence[Any],
        model: nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        name: str,
        turns: int,
        prepare: Callable[[Any], Any],
    ) -> Any:
        """One of several models, or the loader or a scheduler beside them."""
        if model is not None and optimizer is not None:
            if self.binding is not None and not self.models:
                raise errors.ModelError("ctx.prepare has a model without a name already: give each model a name")
            if self.loader is not None:
                raise errors.ModelError("prepare every model before the loader, or the last one together with it")
            self._check_model(model, [optimizer], several=True)
            model.to(self._parts.device)
            self.models.add(name, model, optimizer, turns)
        elif name:
            raise errors.UserError("name belongs into the call of ctx.prepare that gets the model and its optimizer")
        known = [one for made in self.models.optimizers.values() for one in (made, made.wrapped)]
        for scheduler in objects:
            if isinstance(scheduler, LRScheduler):
                check_scheduler(scheduler, *known)
        if any(isinstance(one, DataLoader) for one in objects) and self.binding is None:
            self._begin_together()
        made = [
            self.models.optimizers[name] if isinstance(one, torch.optim.Optimizer) else prepare(one) for one in objects
        ]
        return made[0] if len(made) == 1 else tuple(made)

    def _begin_together(self) -> None:
        """The loader comes, so all models are known: register them as one."""
        model, optimizers, state = self.models.joint()
        check_model(model, optimizers)
        binding = ModelBinding(model, optimizers)

        def make(*parts: Any) -> TurnSteps:
            order, of_part = self.models.order(), self.models.trained(binding)
            return TurnSteps(*parts, order=order, of_part=of_part, next_turn=self._parts.loop.next_turn)

        steps, fetch, _ = self._begin(model, binding, state, make)
        assert isinstance(steps, TurnSteps)
        self.models.begin(steps, fetch)
        for optimizer in self.models.optimizers.values():
            self._connect(optimizer, steps)

    def _connect(self, optimizer: ServerOptimizer, steps: Steps) -> None:
        """The optimizer makes these steps. Schedulers of a worker that comes late do not warn that it has made none."""
        steps.rates.watch(optimizer)
        if self._parts.engine.weights.version > 0:
            told_of_steps(optimizer, optimizer.wrapped)

    def _prepare_one(self, thing: Any, accumulate: int, batches: int, own_streams: bool) -> Any:
        if isinstance(thing, nn.Module):
            return thing
        if isinstance(thing, torch.optim.Optimizer):
            return next(one for one in self.optimizers if one.wrapped is thing)
        if isinstance(thing, DataLoader):
            return self._prepare_loader(thing, accumulate, batches, own_streams)
        if isinstance(thing, GradScaler):
            self._parts.objects.register("GradScaler", thing)
            return thing
        assert isinstance(thing, LRScheduler)
        return self._parts.schedules.prepare(thing)

    def _prepare_model(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        later: Sequence[Any],
        only_trained: bool,
        rules: Mapping[str, str],
    ) -> None:
        if self.binding is not None:
            raise errors.ModelError(
                "ctx.prepare has this model already, and a job trains it with one optimizer: change learning rates and "
                "freeze parameters between epochs, or begin a job for each phase, which loads the weights before "
                "ctx.prepare"
                if model is self.model
                else "ctx.prepare has a model already: to train several at once, give each one a name "
                "(ctx.prepare(..., name=...)); to train one after another, begin a job for each"
            )
        self._check_model(model, optimizers)
        model.to(self._parts.device)
        binding = ModelBinding(model, optimizers, later, only_trained, rules)
        if "first" in rules.values() and self._parts.engine.modes.present.mode is Mode.ASYNC:
            log.warning(
                "in asynchronous mode each slice is a step of its own, so the changes of all slices are added to the "
                "buffers that have the rule 'first': a pointer that begins anew at the end of its queue may leave its "
                "range"
            )
        if only_trained:
            compare(self._parts.engine.agreeing, binding.left_out)
        state = {parameter: found for one in optimizers for parameter, found in one.state.items()}
        if len(optimizers) > 1:
            self._take_several(model, binding, state)
            return
        steps, fetch, thawing = self._begin(model, binding, state, Steps)
        self.optimizers = [ServerOptimizer(optimizers[0], steps.step, fetch, thawing.add)]
        self._connect(self.optimizers[0], steps)

    def _take_several(self, model: nn.Module, binding: ModelBinding, state: State) -> None:
        """Register a model that has several optimizers."""

        def make(*parts: Any) -> JointSteps:
            return JointSteps(*parts, optimizers=binding.optimizers)

        steps, fetch, _ = self._begin(model, binding, state, make)
        assert isinstance(steps, JointSteps)

        def add_group(group: dict[str, Any]) -> None:
            raise errors.ModelError("parameter groups cannot be added where a model has several optimizers")

        self.optimizers = [
            ServerOptimizer(optimizer, partial(steps.step_of, number), partial(state_of, optimizer, fetch), add_group)
            for number, optimizer in enumerate(binding.optimizers)
        ]
        for optimizer in self.optimizers:
            self._connect(optimizer, steps)

    def _check_model(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], several: bool = False
    ) -> None:
        if any(isinstance(optimizer, ServerOptimizer) for optimizer in optimizers):
            raise errors.ModelError("this optimizer has been prepared already: give ctx.prepare torch's own, once")
        if not any(True for _ in model.parameters()):
            raise errors.ModelError("the model has no parameters to train: give it at least one")
        check_model(model, optimizers)
        together = self._parts.engine.modes.present.mode is Mode.SYNC
        layers = sync_batch_norm.layers_of(model)
        sync_batch_norm.check(layers, self._parts.training.sync_batchnorm, several, together)

    def _begin(
        self, model: nn.Module, binding: ModelBinding, state: State, make: Callable[..., Steps]
    ) -> tuple[Steps, Callable[[], State], Thawing]:
        """Register the model and get the weights. ``make`` makes the object that takes the script's steps.

        ``state``: of the optimizers.
        """
        guard = Guard(self._parts.engine.weights, binding, model)
        message = binding.message(self._parts.training.chunk_bytes)
        run = f"{self._parts.engine.member.session.view.beginning:x}"
        alike.compare(self._parts.engine.agreeing, run, self._parts.training.same_script)
        plan = self._parts.engine.entry.register(message, binding.space, bring(binding, state), guard, script=True)
        self.model, self.binding, self.guard = model, binding, guard
        self._parts.draws.model_comes(model)
        guard.outside()
        binding.leftover.begin()

        def fetch() -> State:
            return in_torch_format(binding, plan.layout, self._parts.engine.reading.optimizer_state())

        self.steps = steps = make(
            self._parts.engine,
            self._parts.training,
            binding,
            guard,
            self._parts.passes,
            self._parts.position,
            self._parts.schedules,
            self._parts.draws,
            self._parts.objects,
        )
        thawing = Thawing(self._parts.engine, self._parts.passes, binding, self._parts.schedules)
        self._parts.loop.model_comes(steps, guard, thawing, trained_before=bool(state))
        self._parts.engine.weights.listen(Reads(binding.parameters))
        sync_batch_norm.use(sync_batch_norm.layers_of(model), self._parts.engine.summing)
        if self._parts.engine.member.session.rank == 0:
            self.clipping = Clipping(binding.parameters, self._parts.engine.slices_of_update)
        return steps, fetch, thawing

    def _prepare_loader(self, loader: DataLoader[Any], accumulate: int, batches: int, own_streams: bool) -> SliceLoader:
        if self.loader is not None:
            raise errors.DataError(
                "ctx.prepare has a training loader already: use loaders for evaluation as they are; to train on other "
                "data later, give one loader all data and a sampler that chooses by epoch (set_epoch), or begin "
                "another job"
            )
        check_loader(loader, own_streams)
        slices = self._parts.engine.member.session.view.slices_per_step
        data = describe_loader(loader, accumulate, slices, batches)
        if self.models:
            data = with_turns(data, self.models.turns)
        self._parts.draws.loader_comes()
        if data.samples < data.batch_size:
            log.warning(
                f"the data set has {data.samples} samples, fewer than the batch size of {data.batch_size}: "
                "every epoch is a single short slice, computed by one worker at a time"
            )
        self._parts.engine.slices.register(data)
        self._parts.position.loader_comes(data)
        self._parts.loop.loader_comes(loader)
        self._parts.compared.trained(loader)

        def length() -> int:
            return self._parts.position.batches_per_epoch

        def agree(epoch: int, digest: float) -> float:
            return self._parts.engine.agreeing.agree("order of samples", (epoch + 1, 1), digest)

        seed = self._parts.training.seed
        if is_stream(loader):
            stream = Stream(
                loader, seed, agree, 2 * slices * accumulate, own_streams, self._parts.engine.member.session.rank
            )
            source: Batches = StreamBatches(data, stream, loader, self._parts.position.numbers.of)
        else:
            source = IndexedBatches(loader, data, seed, self._parts.loop, agree, self._parts.position.numbers.of)
        self.loader = SliceLoader(loader, source, self._parts.device, self._parts.loop, length, self._parts.own_draws)
        return self.loader


def _check_types(objects: Sequence[Any]) -> None:
    """Raises UserError for an object that ``ctx.prepare`` does not take."""
    for thing in objects:
        if isinstance(thing, nn.Module | torch.optim.Optimizer | DataLoader | LRScheduler | GradScaler):
            continue
        how = " again" if isinstance(thing, SliceLoader | StepScheduler) else ""
        if isinstance(thing, list | tuple):
            how = ": give it each object as an argument of its own (*objects)"
        raise errors.UserError(
            "ctx.prepare takes a module, an optimizer, a DataLoader, a scheduler or a GradScaler, "
            f"not {type(thing).__name__}{how}"
        )
