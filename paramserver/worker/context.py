"""What a training script holds in its hand: ``ctx = ps.init()``."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import structlog
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.compress.options import PUSH_COMPRESSIONS, Wire
from paramserver.compress.registry import pull_cast
from paramserver.config import Settings
from paramserver.core.versions.consistency import Mode
from paramserver.core.versions.names import AsyncName
from paramserver.core.work.passes import Passes
from paramserver.core.work.slices import main_place, slice_samples, slice_seed
from paramserver.v1 import coordinator_pb2, shard_pb2
from paramserver.worker.engine import Engine
from paramserver.worker.flat import FlatSpace, PartialSum
from paramserver.worker.gradients.hooks import PushHook, of_script
from paramserver.worker.gradients.outgoing import Outgoing
from paramserver.worker.pace import Item
from paramserver.worker.script.binding import ModelBinding
from paramserver.worker.script.draws import Draws
from paramserver.worker.script.given import check_loader, check_model, check_objects, check_scheduler
from paramserver.worker.script.guard import Guard
from paramserver.worker.script.loaded import digest_of, put_weights, take_state
from paramserver.worker.script.loader import SliceLoader, describe_loader
from paramserver.worker.script.optimizer import ServerOptimizer, StepScheduler
from paramserver.worker.script.schedule import SchedulePosition
from paramserver.worker.script.seeding import seed_everything
from paramserver.worker.script.state import bring, in_torch_format
from paramserver.worker.weights.reads import Reads

log = structlog.get_logger("paramserver.worker")

# A script whose gradients are not what left early is not tried again for up to so many slices.
_MOST_REST = 1024


class Context:
    """One worker of a job, or the whole job if the script runs alone.

    The same loop runs in both: ``prepare`` replaces the objects of the script by ones that work on slices and
    contribute to the servers. Close it at the end (also a context manager).
    """

    def __init__(self, settings: Settings, engine: Engine, on_close: Callable[[Context], None]) -> None:
        self.settings = settings
        self.engine = engine
        engine.outgoing = Outgoing(wire_of(settings))
        engine.rounding = pull_cast(settings.training.pull_precision)
        self.device = _device(settings.training.device, engine.session.rank)
        self._on_close = on_close
        self._binding: ModelBinding | None = None
        self._guard: Guard | None = None
        self._optimizer: ServerOptimizer | None = None
        self._loader: SliceLoader | None = None
        self._schedulers: list[StepScheduler] = []
        self._position = SchedulePosition(engine)
        self._draws = Draws(engine, settings.training.seed)
        self.passes = Passes()
        # The job went back, and the present pass of a plain loop does earlier epochs again.
        self._again = False
        self._item: Item | None = None
        self._in_loop = False
        # The contribution that is leaving while it is computed, and what was said of it: of which tensors it is, the
        # hyper-parameters, the norm to clip to. What the one before consisted of, if one like it can leave so.
        self._early: PartialSum | None = None
        self._early_said: tuple[object, ...] = ()
        self._used: frozenset[int] = frozenset()
        # How often in a row it was not what was contributed in the end; so many slices are computed without now.
        self._early_misses = self._early_rest = 0
        # The model that was prepared; how often ctx.load was called in which epoch.
        self._model: nn.Module | None = None
        self._loads = (-1, 0)
        self._closed = False
        self._told_skip = False
        self._clip_norm = 0.0

    # ---- facts

    @property
    def rank(self) -> int:
        """This worker's number, from 0; given by the coordinator."""
        return self.engine.session.rank

    @property
    def world_size(self) -> int:
        """How many workers there are now; 1 alone."""
        return max(1, len(self.engine.session.view.workers))

    @property
    def is_main(self) -> bool:
        """True on exactly one worker: the live one of the lowest rank that has slices to compute.

        For printing and saving. In synchronous mode some workers have none if a step has fewer slices than workers.
        """
        view = self.engine.session.view
        if not view.workers:
            return True
        place = 0
        if self.engine.consistency.mode is Mode.SYNC:
            slices = view.slices_per_step
            if self._loader is not None:
                slices = min(slices, self._data.slices_per_epoch)
            place = main_place(slices, len(view.workers))
        return view.workers[place].member == self.engine.session.member

    @property
    def version(self) -> int:
        """The version of the weights at hand: the number of optimizer steps of the job."""
        return self.engine.version

    @property
    def seed(self) -> int:
        """``training.seed``: the same on all workers. For generators whose numbers they share."""
        return self.settings.training.seed

    def slice_seed(self, purpose: str = "batch") -> int:
        """A seed in [0, 2**63) of the slice that this worker computes now, or (without a loader) draws a batch for now.

        It is the same whoever computes the slice; each ``purpose`` has one of its own. For generators of the script's:
        ``generator.manual_seed(ctx.slice_seed())`` before each batch. Raises UserError before ``prepare`` of the model,
        and, with a loader, outside of the loop over it.
        """
        if self._binding is None:
            raise errors.UserError("ctx.slice_seed belongs after ctx.prepare of the model")
        if self._loader is None:
            return self._draws.seed(purpose)
        if self._item is None:
            raise errors.UserError("ctx.slice_seed belongs into the loop over the prepared loader, before the step")
        return slice_seed(self.seed, self._item.epoch, self._item.index, purpose)

    @property
    def closed(self) -> bool:
        """Whether this worker has left the job."""
        return self._closed

    @property
    def mode(self) -> str:
        """``"sync"`` or ``"async"``, as it is now."""
        return self.engine.consistency.mode.value

    # ---- prepare

    def prepare(self, *objects: Any) -> Any:
        """Replace a model, its optimizer, a DataLoader, a scheduler by ones that train on the cluster.

        Takes them in any order and returns them in the same one (a single object is returned as it is). The model keeps
        its class: it is moved to :attr:`device` and its weights become those of version 0. Model and optimizer must be
        given together, in one call; loader and scheduler may come later.

        Raises ModelError, DataError (both ValueErrors) for what cannot be trained.
        """
        check_objects(objects)
        model = next((o for o in objects if isinstance(o, nn.Module)), None)
        optimizer = next((o for o in objects if isinstance(o, torch.optim.Optimizer)), None)
        if (model is None) != (optimizer is None):
            raise errors.ModelError("give the model and its optimizer to ctx.prepare together, in one call")
        for thing in objects:
            if not isinstance(thing, nn.Module | torch.optim.Optimizer | DataLoader | LRScheduler):
                done = " again" if isinstance(thing, SliceLoader | StepScheduler) else ""
                raise errors.UserError(
                    "ctx.prepare takes a module, an optimizer, a DataLoader or a scheduler, "
                    f"not {type(thing).__name__}{done}"
                )
        self._check_schedulers([o for o in objects if isinstance(o, LRScheduler)], optimizer)
        if model is not None and optimizer is not None:
            self._prepare_model(model, optimizer)
        return_values = [self._prepare_one(o) for o in objects]
        if model is not None and self._loader is None:
            self._draws.first()
        return return_values[0] if len(return_values) == 1 else tuple(return_values)

    def _prepare_one(self, thing: Any) -> Any:
        if isinstance(thing, nn.Module):
            return thing
        if isinstance(thing, torch.optim.Optimizer):
            return self._optimizer
        if isinstance(thing, DataLoader):
            return self._prepare_loader(thing)
        assert isinstance(thing, LRScheduler)
        scheduler = StepScheduler(thing, self._position, self._steps_count)
        self._schedulers.append(scheduler)
        return scheduler

    def _check_schedulers(self, now: list[LRScheduler], optimizer: torch.optim.Optimizer | None) -> None:
        """Those given now, and earlier ones if the optimizer comes after them."""
        prepared = self._optimizer
        if optimizer is not None and prepared is None:
            for scheduler in (*now, *(earlier.wrapped for earlier in self._schedulers)):
                check_scheduler(scheduler, optimizer)
        elif optimizer is None and prepared is not None:
            for scheduler in now:
                check_scheduler(scheduler, prepared, prepared.wrapped)

    def _prepare_model(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self._binding is not None:
            raise errors.ModelError("ctx.prepare has a model already: one job trains one model")
        if isinstance(optimizer, ServerOptimizer):
            raise errors.ModelError("this optimizer has been prepared already: give ctx.prepare torch's own, once")
        if not any(True for _ in model.parameters()):
            raise errors.ModelError("the model has no parameters to train: give it at least one")
        check_model(model, optimizer)
        model.to(self.device)
        binding = ModelBinding(model, optimizer)

        guard = Guard(self.engine, binding)

        def on_weights(weights: FlatSpace) -> None:
            binding.load(weights)
            guard.came()

        message = binding.message(self.settings.training.chunk_bytes)
        plan = self.engine.register(message, binding.space, on_weights, bring(binding))
        self._model, self._binding, self._guard = model, binding, guard
        guard.outside()
        self.engine.before_next, self.engine.before_leaving = guard.check, guard.leaving

        def fetch() -> dict[torch.Tensor, dict[str, torch.Tensor]]:
            return in_torch_format(binding, plan.layout, self.engine.optimizer_state())

        self._optimizer = ServerOptimizer(optimizer, self._contribute, fetch)
        self.engine.reads = Reads(binding.parameters)

    def _prepare_loader(self, loader: DataLoader[Any]) -> SliceLoader:
        if self._loader is not None:
            raise errors.DataError("ctx.prepare has a training loader already; use others as they are")
        check_loader(loader)
        data = describe_loader(loader)
        self._draws.loader_comes()
        if data.samples < data.slice_size:
            log.warning(
                f"the data set has {data.samples} samples, fewer than the batch size of {data.slice_size}: "
                "every epoch is a single short slice, computed by one worker at a time"
            )
        self.engine.register_data(data)
        self._data = self._position.data = data

        def steps() -> int:
            return self._position.per_epoch

        self._loader = SliceLoader(loader, data, self.settings.training.seed, self.device, self, steps)
        return self._loader

    # ---- the loop

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs from where the job stands (0 at its start) up to ``count``.

        If the job goes back to a checkpoint, earlier epochs come again. Ends when the last version is safe. A plain
        loop over the loader, ``for epoch in range(count):``, trains the same epochs: see docs/training.md.
        """
        if count < 1:
            raise errors.UserError(f"ctx.epochs needs a number of epochs of at least 1, not {count}")
        try:
            yield from self._epochs(count)
        finally:
            self.passes.leave()
        self.passes.plan_ended(count)

    def _epochs(self, count: int) -> Iterator[int]:
        self.engine.epochs_planned = count
        self.engine.through = False
        epoch = min(self.engine.open_epoch(), count - 1)
        while True:
            while epoch < count:
                self.engine.epoch = epoch
                self.passes.plan(epoch, last=epoch == count - 1)
                self._loads = (epoch, 0)
                for scheduler in self._schedulers:
                    if self.engine.heard_schedule == shard_pb2.SCHEDULE_PER_STEP:
                        scheduler.per_step = True
                    scheduler.begin_epoch(epoch)
                yield epoch
                epoch = self.engine.next_epoch(epoch)
            if self.engine.finish():
                break
            epoch = min(self.engine.open_epoch(), count - 1)
        if self._guard is not None:
            self._guard.outside()
        # A script that leaves its last epoch in the middle wants no more of it, and does not promise the rest.
        self.engine.through = self._loader is None or not self.passes.left

    def begin_pass(self) -> int:
        """For the loader: an iteration over it begins; returns its number. Raises UserError if none may."""
        if self._closed:
            raise errors.UserError("this worker has left the job: iterate over the prepared loader before ctx.close()")
        if self._binding is None:
            raise errors.UserError("give the model and its optimizer to ctx.prepare before iterating over its loader")
        iteration = self.passes.begin()
        self.engine.epoch = self.passes.epoch
        return iteration

    def next_item(self, iteration: int) -> Item | None:
        """For the loader: the slice to compute now, None at the end of the epoch."""
        passes, engine = self.passes, self.engine
        passes.check(iteration)
        while True:
            item = engine.next_item(passes.epoch, passes.last, stay=passes.plain)
            self._in_loop = item is not None
            if item is None and passes.last and engine.consistency.mode is Mode.ASYNC:
                engine.pull_latest()
            elif item is None:
                engine.settle()
            if passes.plain and engine.went_back():
                self._again = True
                if item is None:  # what this pass was to see done is not
                    continue
            if item is None:  # a schedule is where the epoch's last update has brought it
                self._align_schedulers()
            passes.ended = item is None
            if item is not None and self._again:
                self._again = item.epoch < passes.epoch
                for scheduler in self._schedulers:
                    scheduler.set_back(passes.epoch - item.epoch)
            if item is not None and self._binding is not None and not engine.may_compute(item):
                self._hand_in_nothing(item)
                continue
            return item

    def _hand_in_nothing(self, item: Item) -> None:
        """This slice kills whoever computes it: it counts without its samples."""
        assert self._binding is not None
        self._item = item
        self._align_schedulers()
        self._binding.reset_buffers()
        self._hand_in(item, self.engine.pool.take())

    def leave_pass(self, iteration: int) -> None:
        """For the loader: that iteration is over, at its end or before (``break``)."""
        if iteration == self.passes.iteration:
            self._in_loop = False
            if self._guard is not None:
                self._guard.outside()

    def ahead(self) -> Iterator[Item]:
        """For the loader: the slices that are likely to come."""
        return (item for item in self.engine.ahead(self.passes.epoch) if not self.engine.poisoned(item))

    def begin(self, item: Item) -> None:
        """For the loader: the slice's batch is about to be handed to the script."""
        self._item = item
        self._align_schedulers()
        if self._guard is not None:
            self._guard.buffers()
        seed_everything(slice_seed(self.settings.training.seed, item.epoch, item.index, "model"))
        self._begin_early(item)

    def _begin_early(self, item: Item) -> None:
        """Let gradients leave as the backward pass makes them, if the one before was of a sort that can."""
        if self._early is not None and self._binding is not None:  # of a slice on which the script has not stepped
            self._binding.backward.end()
        self._early = None
        self._early_rest -= 1
        if self._binding is None or not self._used or self._early_rest >= 0:
            return
        samples = slice_samples(self._data, item.index)
        begun = self.engine.begin_early(item, samples, self._used, self._binding.groups)
        if begun is not None:
            self._early, chunks = begun
            self._early_said = self._used, self._binding.groups(), self.engine.clip_norm
            self._binding.backward.begin(self._early, chunks)

    def _align_schedulers(self) -> None:
        """A worker that had no slice for a while, or has just come, uses the learning rate of the step at hand."""
        for scheduler in self._schedulers:
            if scheduler.per_step is None and self.engine.heard_schedule == shard_pb2.SCHEDULE_PER_STEP:
                scheduler.per_step = True
            scheduler.catch_up()
        known = [scheduler.per_step for scheduler in self._schedulers]
        if True in known:
            self.engine.schedule = shard_pb2.SCHEDULE_PER_STEP
        elif None in known:
            self.engine.schedule = shard_pb2.SCHEDULE_UNSPECIFIED
        else:
            self.engine.schedule = shard_pb2.SCHEDULE_OTHER

    def end(self, item: Item) -> None:
        """For the loader: a slice the script took but did not step on counts as one without samples."""
        if self._item is not item or self._binding is None:
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
        self._hand_in(item, self.engine.pool.take())

    def _contribute(self, unscale: float, overflow: bool) -> None:
        clip_norm = self._clip_norm
        while not self._contribute_once(unscale, overflow):
            # Without a loader: somebody who joined or left had this part of the step, the next one is ours.
            self.engine.handed.handed_in_again()
            self._clip_norm = clip_norm
        if self._loader is None and self._binding is not None:
            self._binding.reset_buffers()
            self._draws.next()

    def _contribute_once(self, unscale: float, overflow: bool) -> bool:
        """False: another worker's contribution of this name counts instead, and this one under another name."""
        binding = self._binding
        assert binding is not None
        taken: PartialSum | None = None
        if self._item is None:
            if self._loader is not None:
                raise errors.UserError("optimizer.step() belongs once into each iteration over the prepared loader")
            self._item = self._draws.take()
            if self._item is None:
                # Weights that come with the slice put buffers back: what the batch has made of them is taken before.
                taken = self.engine.pool.take()
                binding.gather(taken, 1, unscale)
                self._item = self.engine.next_item(0, False)
                self._align_schedulers()
            assert self._item is not None
        item = self._item
        samples = slice_samples(self._data, item.index) if self._loader is not None else 1
        clipped_here = self._clip_norm > 0 and isinstance(item.name, AsyncName)
        plain = not (unscale != 1.0 or overflow or clipped_here)
        early, self._early = self._early, None
        if early is not None and binding.backward.end() and plain:
            partial = early
            binding.gather_buffers(partial, samples)
        elif taken is not None:
            partial = taken
        else:
            partial = self.engine.pool.take()
            binding.gather(partial, samples, unscale)
        if early is not None:
            right = partial is early and self._early_said == (partial.used, binding.groups(), self._clip_norm)
            # A script that changes its gradients mostly does so in each step.
            self._early_misses = 0 if right else self._early_misses + 1
            self._early_rest = 0 if right else min(2**self._early_misses, _MOST_REST)
        self._used = frozenset(partial.used if plain else ())
        bad = None if overflow else binding.non_finite(partial)
        if overflow or bad is not None:
            partial = self._without_gradient(partial, item, bad)
        elif clipped_here:
            binding.clip(partial, self._clip_norm)
        self.engine.clip_norm, self._clip_norm = self._clip_norm, 0.0
        return self._hand_in(item, partial)

    def _without_gradient(self, partial: PartialSum, item: Item, bad: str | None) -> PartialSum:
        policy = self.settings.training.nonfinite
        if bad is not None:
            text = f"the gradient of {bad!r} is not finite ({item.name})"
            if policy == "fail":
                raise errors.NonFiniteError(f"{text}; training.nonfinite = fail ends the run")
            log.warning(f"{text}: {'the step is skipped' if policy == 'skip' else 'the slice is left out'}")
        self.engine.discard(partial)
        empty = self.engine.pool.take()
        # An overflow that GradScaler found is always a skipped step, as it is without a cluster.
        empty.overflow = bad is None or policy == "skip"
        return empty

    def _hand_in(self, item: Item, partial: PartialSum) -> bool:
        assert self._binding is not None
        self._item = None
        self.passes.stepped = True
        return self.engine.contribute(item, partial, self._binding.groups())

    def _steps_count(self) -> bool:
        """True where the script's steps are the job's: inside the loop over the loader, or anywhere without one."""
        return self._in_loop or self._loader is None

    def clip_grad_norm(self, max_norm: float) -> None:
        """Clip this step's gradient to a global 2-norm; call it after ``backward`` and before ``optimizer.step``.

        Synchronous: the servers clip the combined gradient of all slices, over all shards, which is what clipping in a
        single process with the whole batch does. Asynchronous: the gradient of this slice is clipped.
        (``torch.nn.utils.clip_grad_norm_`` clips the slice in both modes.) Raises UserError unless max_norm is above 0.
        """
        if not 0 < max_norm < math.inf:
            raise errors.UserError(f"max_norm must be above 0, not {max_norm}")
        self._clip_norm = float(max_norm)

    def register_push_hook(self, state: Any, hook: PushHook) -> None:
        """Have ``hook(state, bucket)`` decide what is sent in place of a gradient, like DDP's ``register_comm_hook``.

        It is called on the CPU for every chunk (see `PushBucket`) of every slice, and returns as many numbers, as a
        tensor or a future of one: of the bucket's type, or bfloat16 or float16, which then is what travels. Call it
        once, after ``prepare`` of the model, in every worker alike. Raises UserError if ``hook`` is not a function, or
        if there is a hook or ``training.push_compression`` already; ``optimizer.step`` raises UserError if the hook
        fails or returns something else, NonFiniteError if that is not finite.

        >>> ctx.register_push_hook(None, lambda state, bucket: bucket.buffer().to(torch.bfloat16))
        """
        if not callable(hook):
            raise errors.UserError(
                f"a push hook is a function of a state and a bucket, not {hook!r}; for a compression by its name, set "
                f"training.push_compression to one of {', '.join(PUSH_COMPRESSIONS)}"
            )
        if self._binding is None:
            raise errors.UserError("register the push hook after ctx.prepare of the model")
        outgoing = self.engine.outgoing
        if outgoing.compressor is not None:
            raise errors.UserError(
                f'training.push_compression is "{outgoing.compressor.name}": use that, or a push hook, not both'
            )
        if outgoing.hook is not None:
            raise errors.UserError("there is a push hook already: register one, once")
        outgoing.hook = of_script(state, hook, self._binding.parameters)

    # ---- loading

    def load(self, *, model: Mapping[str, Any] | None = None, optimizer: Mapping[str, Any] | None = None) -> None:
        """Go on from these weights and buffers, this optimizer state, or both; all workers call it, with the same.

        ``model``: all of a ``model.state_dict()``. ``optimizer``: a ``state_dict()`` of torch's optimizer or of the one
        that ``prepare`` returned. Before the first epoch its hyper-parameters are taken over, later they must be the
        present ones; where a scheduler was prepared, they are as that has set them.
        The version, the position in the data and the schedule stay as they are. Call it after ``prepare`` of the model,
        between two optimizer steps, at the same place of the script in every worker, best between two epochs. It
        returns when the servers have it. A worker whose script comes to it later, or once more after the job was
        resumed, has what was loaded already.

        >>> model, optimizer = ctx.prepare(model, optimizer)
        >>> saved = torch.load("at.pt")
        >>> ctx.load(model=saved["model"], optimizer=saved["optimizer"])

        Raises UserError in the wrong place, ModelError (a ValueError) for what does not fit the model, and where
        workers do not agree.
        """
        binding, engine = self._binding, self.engine
        if binding is None or self._model is None:
            raise errors.UserError("ctx.load belongs after ctx.prepare of the model; before it, load into the model")
        if self._closed:
            raise errors.UserError("this worker has left the job: call ctx.load before ctx.close()")
        if model is None and optimizer is None:
            raise errors.UserError("ctx.load was given nothing: give it model=..., optimizer=..., or both")
        if self._in_loop and self._item is not None:
            raise errors.UserError(
                "ctx.load belongs between two steps: call it after optimizer.step(), or outside of the loop"
            )
        first = self.passes.epoch < 0 and engine.slices == 0
        fixed = not (first or self._schedulers)
        state, groups = (None, []) if optimizer is None else take_state(binding, optimizer, fixed)
        weights = None if model is None else engine.weights_now()
        put = "" if model is None or weights is None else put_weights(binding, self._model, model, weights)
        epoch, count = self._loads if self._loads[0] == self.passes.epoch else (self.passes.epoch, 0)
        self._loads = (epoch, count + 1)
        place = coordinator_pb2.LoadPlace(epoch=epoch + 1, count=count + 1, digest=digest_of(put, state, groups))
        if not engine.load(place, weights, state):
            if self.passes.planned and engine.open_epoch() < self.passes.epoch:
                return  # the script comes to this epoch once more, and to this call
            raise errors.JobFailedError(
                f"a server was lost, and the job went back to version {engine.version} before ctx.load was done: "
                "go on from there with --resume"
            )
        if first and not self._schedulers:
            for group, loaded in zip(binding.optimizer.param_groups, groups, strict=False):
                group.update({key: value for key, value in loaded.items() if key != "params"})
        if self._guard is not None and not self._in_loop:
            self._guard.outside()

    # ---- the rest

    def log(self, **metrics: float | torch.Tensor) -> None:
        """Report numbers: ``ctx.log(loss=loss)``. The last value of each name is shown, and ends in the summary."""
        numbers = {k: float(v.detach()) if isinstance(v, torch.Tensor) else float(v) for k, v in metrics.items()}
        # Replaced as a whole, since the background reads it.
        self.engine.metrics = {**self.engine.metrics, **numbers}

    def close(self) -> None:
        """Hand in what is left and leave the job. Calling it twice does nothing."""
        if not self._closed:
            self._closed = True
            if _failed():
                self.engine.before_leaving = lambda: None
            self._end_passes()
            self._on_close(self)

    def _end_passes(self) -> None:
        """A plain loop over the loader is known to be at its end when the script is."""
        passes = self.passes
        if passes.left and self._loader is not None:
            log.warning(
                f"the script ends in the middle of epoch {passes.epoch + 1}: what is left of that epoch is not "
                "trained, unless other workers do it"
            )
        if not passes.plain:
            return
        self.engine.epochs_planned = max(self.engine.epochs_planned, passes.epoch + 1)
        self.engine.through = self.engine.through or (passes.ended and not _failed())

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _failed() -> bool:
    """Whether the script ends with an error."""
    return sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None


def _device(wish: str, rank: int) -> torch.device:
    """The device of the worker of this rank; "auto" is a GPU if there is one (several are shared out by rank)."""
    if wish != "auto":
        try:
            device = torch.device(wish)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise errors.ConfigError(f"training.device = {wish} cannot be used here: {error}") from error
        return device
    if torch.cuda.is_available():
        return torch.device("cuda", rank % torch.cuda.device_count())
    return torch.device("cpu")


def wire_of(settings: Settings) -> Wire:
    """How weights and gradients travel."""
    training = settings.training
    return Wire(training.push_compression, training.topk_ratio, settings.flush_every)


def seed_and_threads(settings: Settings) -> None:
    """Make the process's random numbers and thread count those of the settings, before any model is built."""
    torch.set_num_threads(settings.training.threads_per_worker)
    # On GPUs, cuDNN may choose among algorithms of other bits, by measuring or by itself.
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    seed_everything(settings.training.seed)
    torch.manual_seed(settings.training.seed)  # also for devices that will be used only later
