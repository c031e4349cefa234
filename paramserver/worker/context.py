"""The object of a training script: ``ctx = ps.init()``."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import structlog

from paramserver import errors
from paramserver.compress.options import PUSH_COMPRESSIONS
from paramserver.compress.registry import pull_cast
from paramserver.config import Settings
from paramserver.core.work.passes import Passes
from paramserver.worker.chosen import wire_of
from paramserver.worker.data.own_draws import OwnDraws
from paramserver.worker.engine import Engine
from paramserver.worker.gradients.hooks import PushHook, of_script
from paramserver.worker.models.preparing import Parts, Prepared
from paramserver.worker.registered.objects import Objects
from paramserver.worker.schedulers.schedules import Schedules
from paramserver.worker.script.given import as_numbers
from paramserver.worker.script.loaded import load, parts_of, read_weights
from paramserver.worker.script.position import Position
from paramserver.worker.together import Together

log = structlog.get_logger("paramserver.worker")


class Context(Together):
    """One worker of a job, or the whole job if the script runs alone.

    :func:`paramserver.init` makes it. The same loop runs in both cases: :meth:`prepare` replaces the objects of the
    script by objects that work on slices and contribute to the servers. Close the context at the end, or use ``with``.

    >>> with ps.init() as ctx:
    ...     model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    ...     for epoch in ctx.epochs(2):
    ...         for x, y in loader:
    ...             loss = F.mse_loss(model(x), y)
    ...             loss.backward()
    ...             optimizer.step()
    ...             optimizer.zero_grad()
    """

    def __init__(self, settings: Settings, engine: Engine, on_close: Callable[[Context], None]) -> None:
        self._passes = Passes()
        super().__init__(settings, engine, self._passes)
        engine.configure(wire_of(settings), pull_cast(settings.training.pull_precision))
        engine.audited.choose(settings.training.audit, settings.training.seed)
        self._on_close = on_close
        self._schedules = Schedules(engine, self._position, self._passes)
        self._objects = Objects(engine)
        self._own_draws = OwnDraws(bool(settings.cluster.coordinator), self._draws.seeded)
        saves_best = bool(settings.checkpoint.best_metric)
        numbers = self._position.numbers
        self._loop = Position(engine, self._passes, self._schedules, self._objects, numbers, saves_best)
        rule, base = settings.lr_rule
        self.prepared = Prepared(
            Parts(
                engine,
                settings.training.model_copy(update={"lr_scaling": rule, "lr_base_slices": base}),
                self.device,
                self._passes,
                self._position,
                self._loop,
                self._schedules,
                self._draws,
                self._objects,
                self._compared,
                self._own_draws,
            )
        )
        self._closed = False

    # ---- facts that follow from the slice

    def slice_seed(self, purpose: str = "batch") -> int:
        """A seed in [0, 2**63) of the slice that this worker computes now, or (without a loader) draws a batch for now.

        The seed follows from ``training.seed``, the slice and ``purpose``, so it is the same on every worker that
        computes the slice. With ``accumulate`` each batch of the slice has another one. For generators of your own:
        seed them before each batch. Raises UserError before ``prepare`` of the model, and, with a loader, outside of
        the loop over it.

        >>> model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        >>> generator = torch.Generator()
        >>> for x, y in loader:
        ...     _ = generator.manual_seed(ctx.slice_seed("noise"))
        ...     F.mse_loss(model(x + torch.randn(x.shape, generator=generator)), y).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        """
        if self.prepared.steps is None:
            raise errors.UserError("ctx.slice_seed belongs after ctx.prepare of the model")
        if self.prepared.loader is None:
            return self._draws.seed(purpose)
        if not self.prepared.steps.has_batch:
            raise errors.UserError("ctx.slice_seed belongs into the loop over the prepared loader, before the step")
        self._own_draws.seeds()
        return self.prepared.steps.seed(purpose)

    @property
    def closed(self) -> bool:
        """True after :meth:`close`: this worker has left the job.

        >>> ctx.closed
        False
        """
        return self._closed

    # ---- prepare

    def prepare(
        self,
        *objects: Any,
        accumulate: int = 1,
        later: Sequence[Any] = (),
        only_trained: bool = False,
        buffers: Mapping[str, str] | None = None,
        batches: int = 0,
        own_streams: bool = False,
        name: str = "",
        turns: int = 1,
    ) -> Any:
        """Replace a model, its optimizer, a DataLoader, a scheduler by ones that train on the cluster.

        Takes them in any order and returns them in the same order: one object as it is, several as a tuple. A model may
        have several optimizers, each of which then steps once on each batch. A
        GradScaler stays the same object, and is registered (see :meth:`register`). The model keeps its class.
        It is moved to :attr:`device`, and its weights become those of version 0, or of the job's present
        version. Model and optimizer must be given together, in one call. Loader and scheduler may come before
        or later. Returns when the weights are there, which may take as long as the other members need to come.

        ``accumulate``: goes with the loader. The script adds up the gradients of so many batches before each
        ``optimizer.step()``, see :attr:`step_due`. Such a group of batches is a slice: one worker computes all of it.
        ``later``: goes with the model. The parameters (or the module) of each group that the script is going to add
        with ``optimizer.add_param_group`` while training runs.
        ``only_trained``: goes with the model. Servers keep only parameters that the optimizer (or ``later``) has, and
        buffers. All workers must bring the same frozen parameters, which are compared and do not travel.
        ``buffers``: goes with the model. How the changes that the slices of a step make to buffers count, by pattern of
        names: ``"mean"`` (the default), ``"first"`` (that of slice 0, as with DDP), ``"sum"``. See docs/training.md.
        ``batches``, ``own_streams``: go with a loader over an ``IterableDataset``. The largest number of batches in an
        epoch, if the data has no length; whether each worker reads samples of its own, see docs/training.md.
        ``name``, ``turns``: for several models in one job. Each comes in a call of its own, with its optimizer and its
        name, before the loader or (the last one) together with it. On each batch the optimizers step in the order of
        these calls, each ``turns`` times. Weights are there when the loader has come.

        Raises ModelError or DataError (both are ValueErrors) for what cannot be trained, UserError for other objects,
        DeadlineError if the others do not come in time.

        >>> model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        >>> len(loader)  # updates in an epoch of the whole job
        4
        """
        return self.prepared.prepare(
            objects, accumulate, name, turns, later, only_trained, batches, own_streams, buffers
        )

    # ---- the loop

    def epochs(self, count: int, start: int | None = None) -> Iterator[int]:
        """The numbers of the epochs from where the job stands (0 at its start) up to ``count``, without ``count``.

        ``start``: the number of the first epoch, for a script that goes on from a checkpoint of its own. The order of
        samples and random numbers of an epoch follow from its number. If all epochs were trained, none come.
        If the job goes back to a checkpoint, earlier epochs come again. Ends when the last version is safe. A plain
        loop over the loader, ``for epoch in range(count):``, trains the same epochs: see docs/training.md. Raises
        UserError if ``count`` is below 1, and ``start`` below 0.

        >>> model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        >>> for epoch in ctx.epochs(2):
        ...     for x, y in loader:
        ...         F.mse_loss(model(x), y).backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> ctx.version
        8
        """
        if count < 1:
            raise errors.UserError(f"ctx.epochs needs a number of epochs of at least 1, not {count}")
        if start is not None and start < 0:
            raise errors.UserError(f"ctx.epochs begins with the number of an epoch, 0 or more, not {start}")
        try:
            yield from self._loop.epochs(count, self.prepared.loader is not None, start)
        finally:
            self._passes.leave()
        self._passes.plan_ended(count)

    @property
    def step_due(self) -> bool:
        """Whether ``optimizer.step()`` belongs after the batch at hand: it is the last one of its slice.

        Always true without ``accumulate`` in the loop. A slice has ``accumulate`` batches, and fewer in the last step
        of an epoch if its batches do not come out even.

        >>> model, optimizer, loader = ctx.prepare(model, optimizer, loader, accumulate=2)
        >>> for x, y in loader:
        ...     (F.mse_loss(model(x), y) / 2).backward()
        ...     if ctx.step_due:
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> ctx.version
        2
        """
        return self.prepared.steps is not None and self.prepared.steps.due

    def no_sync(self) -> AbstractContextManager[None]:
        """Context for backward passes that are not the last one before ``optimizer.step()``, as DDP's ``no_sync``.

        No gradient leaves before ``optimizer.step()`` is certain to come. With ``accumulate`` this is known without
        ``no_sync``, which then changes nothing. With several backward passes of one batch it saves a worker from
        sending gradients that change. Raises UserError before ``prepare`` of the model.

        >>> model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        >>> for x, y in loader:
        ...     with ctx.no_sync():
        ...         F.mse_loss(model(x), y).backward()
        ...     F.l1_loss(model(x), y).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        """
        if self.prepared.binding is None:
            raise errors.UserError("ctx.no_sync belongs after ctx.prepare of the model")
        return self.prepared.binding.held_back()

    def clip_grad_norm(self, max_norm: float) -> None:
        """Clip this step's gradient to a global 2-norm; call it after ``backward`` and before ``optimizer.step``.

        Synchronous: the servers clip the combined gradient of all slices, over all shards, which is what clipping in a
        single process with the whole batch does. Asynchronous: the gradient of this slice is clipped.
        (``torch.nn.utils.clip_grad_norm_`` clips the slice in both modes.) ``max_norm`` has the unit of the gradient.
        Raises UserError unless it is above 0 and finite, and before ``prepare`` of the model.

        >>> model, optimizer = ctx.prepare(model, optimizer)
        >>> x, y = next(iter(loader))
        >>> F.mse_loss(model(x), y).backward()
        >>> ctx.clip_grad_norm(1.0)
        >>> optimizer.step()
        """
        if not 0 < max_norm < math.inf:
            raise errors.UserError(f"max_norm must be above 0, not {max_norm}")
        if self.prepared.steps is None:
            raise errors.UserError("ctx.clip_grad_norm belongs after ctx.prepare of the model")
        self.prepared.steps.clip_to(float(max_norm))

    def register_push_hook(self, state: Any, hook: PushHook) -> None:
        """Have ``hook(state, bucket)`` decide what is sent in place of a gradient, like DDP's ``register_comm_hook``.

        The hook is called on the CPU for every chunk (see `PushBucket`) of every slice. It returns as many numbers as
        the bucket has, as a tensor or a future of a tensor: of the bucket's type, or bfloat16 or float16, which then is
        what travels. Register it once, after ``prepare`` of the model, in every worker alike. Raises UserError if
        ``hook`` is not a function, or if there is a hook or ``training.push_compression`` already. ``optimizer.step``
        raises UserError if the hook fails or returns something else, NonFiniteError if the numbers are not finite.

        >>> model, optimizer = ctx.prepare(model, optimizer)
        >>> ctx.register_push_hook(None, lambda state, bucket: bucket.buffer().to(torch.bfloat16))
        """
        if not callable(hook):
            raise errors.UserError(
                f"a push hook is a function of a state and a bucket, not {hook!r}; for a compression by its name, set "
                f"training.push_compression to one of {', '.join(PUSH_COMPRESSIONS)}"
            )
        if self.prepared.binding is None:
            raise errors.UserError("register the push hook after ctx.prepare of the model")
        self.engine.sender.outgoing.use(of_script(state, hook, self.prepared.binding.parameters))

    # ---- saving and loading

    def register(self, name: str, thing: Any) -> None:
        """Have the state of an object travel in checkpoints: averaged weights, a curriculum, a GradScaler, a count.

        ``thing`` has ``state_dict()`` and ``load_state_dict(state)``. The state may hold tensors, numbers, texts, true,
        false and None, and lists, tuples and dicts of these. If the job goes back to a checkpoint, or goes on from one
        with ``--resume``, the object gets the state that it had at that version. A worker that comes late begins with
        the newest state that is known. In synchronous mode the state at a version is that when the script asks for the
        next batch. In asynchronous mode it is that of some worker, and up to 50 versions older.

        Call it after ``prepare`` of the model, once for each object, in every worker alike. Raises UserError for other
        objects and values, for a name that is taken, and for more than 512 MiB.

        >>> model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        >>> scaler = torch.amp.GradScaler("cpu")
        >>> ctx.register("scaler", scaler)
        """
        if self.prepared.binding is None:
            raise errors.UserError("ctx.register belongs after ctx.prepare of the model")
        self._objects.register(name, thing)

    def state_dict(self) -> dict[str, Any]:
        """Weights and buffers (``"model"``) and the optimizer's state (``"optimizer"``), as plain torch has them.

        The names of a compiled model are those of the model inside (without ``_orig_mod.``). With several optimizers
        ``"optimizer"`` is a list of their states, in the order of :meth:`prepare`.

        Copies in main memory, of the version of the weights at hand, read from the servers: the same on all workers at
        the same version, whatever this worker has computed since. Any worker may call it alone, at any time. In
        asynchronous mode each server gives its present state of the optimizer. Raises UserError before ``prepare`` of
        the model.

        >>> model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        >>> torch.save(ctx.state_dict(), "all.pt")
        >>> saved = torch.load("all.pt")
        >>> plain = torch.nn.Linear(4, 1)
        >>> plain.load_state_dict(saved["model"])
        <All keys matched successfully>
        >>> torch.optim.SGD(plain.parameters(), lr=0.1).load_state_dict(saved["optimizer"])
        """
        prepared, binding, model = self.prepared, self.prepared.binding, self.prepared.model
        if model is None or binding is None:
            raise errors.UserError("ctx.state_dict belongs after ctx.prepare of the model")
        if self.engine.rollback.aborted:
            self.engine.rollback.say("what ctx.state_dict gives")
        if prepared.models:
            return prepared.models.by_name(read_weights(binding, model, self.engine.reading.weights_now()))
        # First, since it may take in a newer version.
        states = [one.state_dict() for one in prepared.optimizers]
        weights = read_weights(binding, model, self.engine.reading.weights_now())
        return {"model": weights, "optimizer": states[0] if len(states) == 1 else states}

    def load(
        self,
        state: Mapping[str, Any] | None = None,
        /,
        *,
        model: Mapping[str, Any] | None = None,
        optimizer: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Go on from these weights and buffers, this optimizer state, or both; all workers call it, with the same.

        ``state``: both as :meth:`state_dict` gives them. ``model``: all of ``model.state_dict()``. ``optimizer``: a
        ``state_dict()`` of torch's optimizer or of the one that ``prepare`` returned; a list of these with several
        optimizers. Before the first epoch its hyper-parameters are taken over, later they must be the present ones;
        where a scheduler was prepared, they are as that has set them.
        The version, the position in the data and the schedule stay as they are. Call it after ``prepare`` of the model,
        between two optimizer steps, at the same place of the script in every worker, best between two epochs. It
        returns when the servers have it. A worker whose script comes to it later, or once more after the job was
        resumed, has what was loaded already.

        >>> model, optimizer = ctx.prepare(model, optimizer)
        >>> saved = torch.load("at.pt")
        >>> ctx.load(model=saved["model"], optimizer=saved["optimizer"])
        >>> ctx.load(ctx.state_dict())

        Raises UserError in the wrong place, ModelError (a ValueError) for what does not fit the model, and where
        workers do not agree.
        """
        binding, engine = self.prepared.binding, self.engine
        if binding is None or self.prepared.model is None:
            raise errors.UserError("ctx.load belongs after ctx.prepare of the model; before it, load into the model")
        if self._closed:
            raise errors.UserError("this worker has left the job: call ctx.load before ctx.close()")
        optimizers: Sequence[Mapping[str, Any]] | None
        if self.prepared.models:
            if model is not None or optimizer is not None:
                raise errors.UserError("with several models give ctx.load one state, as ctx.state_dict() gives it")
            model, optimizers = self.prepared.models.joint_states(state)
        else:
            model, optimizers = parts_of(state, model, optimizer, len(self.prepared.optimizers))
        if self._passes.in_loop and self.prepared.steps is not None and self.prepared.steps.item is not None:
            raise errors.UserError(
                "ctx.load belongs between two steps: call it after optimizer.step(), or outside of the loop"
            )
        self._objects.settle()
        done = load(engine, self._passes, binding, self.prepared.model, bool(self._schedules), model, optimizers)
        if done and self.prepared.guard is not None and not self._passes.in_loop:
            self.prepared.guard.outside()

    # ---- the rest

    def log(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Record numbers: ``ctx.log(loss=loss)`` or ``ctx.log({"train/loss": loss})``.

        In the loop over the prepared loader a value belongs to the slice that the script has, or has just stepped on;
        elsewhere it belongs to the version of the weights at hand. Each name has one value per step: the mean over the
        slices of the step, by samples. Numbers, and tensors or arrays of one element, are taken; NaN is a number.

        Raises UserError for anything else.

        >>> ctx.log(loss=torch.tensor(0.5), accuracy=0.9)
        >>> ctx.log({"train/loss": 0.5})
        """
        numbers = as_numbers(values, named)
        if self._closed:
            log.warning("ctx.log was called after ctx.close(): this worker has left the job, and the values are lost")
            return
        outside = None
        if self.prepared.loader is not None and not self._passes.in_loop:
            outside = self.engine.loop.saved or (self.engine.shards.timeline, self.engine.weights.version)
            if self.engine.rollback.aborted:
                self.engine.rollback.say("what ctx.log is given")
                return
        self.engine.progress.log(numbers)
        self.engine.records.log(numbers, outside)

    def close(self) -> None:
        """Hand in what is left and leave the job. A second call does nothing.

        Raises the errors of the last contributions and of the job: JobFailedError if the job has failed. A script that
        ends without ``close`` is closed at its exit. In a process that the script has forked, ``close`` does nothing.

        >>> ctx.close()
        >>> ctx.closed
        True
        """
        if not (self._closed or self.engine.background.elsewhere):
            self._closed = True
            if self.prepared.clipping is not None:
                self.prepared.clipping.end()
            failed = sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None
            if failed and self.prepared.guard is not None:
                self.prepared.guard.script_failed()
            self._loop.leave(self.prepared.loader is not None, failed)
            undone = None if failed or self.engine.progress.safe else self.engine.rollback.ended_too_early()
            self._on_close(self)
            if undone is not None:
                raise undone

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
