"""Work that the workers of a script share beside training: evaluating, gathering results, agreeing on numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.config import Settings
from paramserver.core.work.passes import Passes
from paramserver.worker.engine import Engine
from paramserver.worker.engine.evaluating import Dealt
from paramserver.worker.facts import Facts
from paramserver.worker.script.compared import Compared
from paramserver.worker.script.draws import Draws
from paramserver.worker.script.evaluation import Evaluations
from paramserver.worker.script.given import as_numbers
from paramserver.worker.script.loader import SliceLoader


class Together(Facts):
    """A part of a script's :class:`Context`."""

    def __init__(self, settings: Settings, engine: Engine, passes: Passes) -> None:
        super().__init__(settings, engine)
        self._places = passes
        self._draws = Draws(engine, settings.training.seed)
        self._compared = Compared(engine.agreeing, engine.member.session.rank, settings)
        self._evaluations = Evaluations(
            settings.training.seed, self.device, self._begin_evaluation, self._compared, self._draws.seed_model
        )

    @property
    def steps_past_epoch(self) -> int:
        """By how many steps the weights at hand are newer than the end of the epoch that the script has been through.

        0 with one worker, in asynchronous mode, and until another pass ends. In synchronous mode it is above 0 where
        the others did not need this worker for the last steps of the epoch, since it had no slice in them or was slow.
        They go on meanwhile, so what such a worker measures by itself is not of the epoch's end. The results of
        ``ctx.evaluate`` are.

        >>> ctx.steps_past_epoch
        0
        """
        return self._places.steps_past

    def evaluate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Batches of a loader that is not trained on, shared out to all workers: each is evaluated by one of them.

        All workers call it at the same place of the script, outside of the loop over the prepared loader. The result of
        each batch is given with :meth:`gather`. The loop ends when all batches have been evaluated; a worker that
        comes last may get none. If a worker dies, others evaluate its batches. Each batch counts once. After the loop
        :attr:`gathered` has the results of all batches. Tensors of batches are on :attr:`device`.

        ``loader``: a DataLoader that was not prepared, with any sampler. Raises UserError inside the loop over the
        prepared loader or over another evaluation, DataError for data that cannot be cut into slices, and where
        workers have other numbers of batches.

        >>> model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        >>> for epoch in ctx.epochs(1):
        ...     for x, y in loader:
        ...         F.mse_loss(model(x), y).backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...     with torch.no_grad():
        ...         for x, y in ctx.evaluate(test_loader):
        ...             ctx.gather({"loss": F.mse_loss(model(x), y, reduction="sum"), "samples": len(x)})
        ...     samples = sum(one["samples"] for one in ctx.gathered)
        >>> samples
        32
        """
        if isinstance(loader, SliceLoader) or not isinstance(loader, DataLoader):
            raise errors.UserError("ctx.evaluate takes a DataLoader that was not prepared")
        return self._evaluations.evaluate(loader)

    def gather(self, value: Any) -> None:
        """The result of the batch at hand, in a loop over :meth:`evaluate`; once for each batch.

        ``value``: a number, a text, a tensor or an array, or a list, tuple or dict (with texts as keys) of these, of
        up to 1 MiB. Raises UserError for anything else, and outside of such a loop.

        >>> for x, y in ctx.evaluate(test_loader):
        ...     ctx.gather(float(y.sum()))
        >>> len(ctx.gathered)
        4
        """
        self._evaluations.gather(value)

    @property
    def gathered(self) -> list[Any]:
        """After a loop over :meth:`evaluate`: what was gathered, by batch in the loader's order, in all workers alike.

        None for a batch without :meth:`gather`. Tensors are on the CPU. Raises UserError before the end of the loop.

        >>> for x, y in ctx.evaluate(test_loader):
        ...     ctx.gather(len(x))
        >>> ctx.gathered
        [8, 8, 8, 8]
        """
        if self._evaluations.gathered is None:
            raise errors.UserError(
                "ctx.gathered belongs after a loop over ctx.evaluate(loader) that has come to its end"
            )
        return self._evaluations.gathered

    def _begin_evaluation(self, batches: int) -> tuple[Dealt, int, int]:
        if self._places.in_loop:
            raise errors.UserError(
                "ctx.evaluate belongs outside of the loop over the prepared loader, where all workers have the same "
                "weights: call it after that loop"
            )
        epoch, count = self._places.call("evaluate")
        return self.engine.evaluating.begin(epoch, count, batches), self._position.numbers.of(epoch), count

    def barrier(self, timeout_s: float = 0.0) -> None:
        """Wait until all workers of the job have come to this place of the script, before the first epoch.

        At the start of the job it waits for all workers that the job was started with. Later it waits for the workers
        that live and have not been here. For work of one worker that others need, :meth:`once` survives a death.

        ``timeout_s``: how long, in seconds; 0: ``cluster.wait_timeout_s``. Raises DeadlineError that names the missing
        workers, and UserError from the first epoch on, where a worker may leave out epochs that others have trained.

        >>> ctx.barrier()
        """
        if self._places.epoch >= 0 and not self._places.in_loop:
            raise errors.UserError(
                "ctx.barrier() is called after training has begun, where workers may leave out epochs that others have "
                "trained, so some would never come: call it before the first epoch, or let ctx.once(work) do the work"
            )
        self.engine.agreeing.meet(self._place("barrier"), timeout_s)

    def once(self, work: Callable[[], object], timeout_s: float = 0.0) -> None:
        """Have the main worker do something before any worker goes on: download data, write a file for the others.

        All workers call it at the same place of the script, before or after ``prepare``. If the main worker dies before
        the work is done, the next main worker does it from the start. A worker that comes later goes on at once, so
        the result has to lie where each worker finds it. ``work`` has no arguments, and its result is not used.

        ``timeout_s``: how long workers wait, in seconds; 0: ``cluster.wait_timeout_s``. Raises DeadlineError that names
        the main worker, and UserError in the loop over the prepared loader.

        >>> ctx.once(lambda: torch.save(torch.randn(8, 4), "data.pt"))
        >>> torch.load("data.pt").shape
        torch.Size([8, 4])
        """
        self.engine.agreeing.once(self._place("once"), work, timeout_s)

    def _place(self, what: str) -> str:
        if self._places.in_loop:
            raise errors.UserError(
                f"ctx.{what} belongs outside of the loop over the prepared loader: in the loop workers have different "
                "numbers of batches, so some would wait for ever"
            )
        epoch, count = self._places.call(what)
        return f"{what} {epoch + 1} {count + 1}"

    def agree(self, value: float, name: str = "value") -> float:
        """A number on which all workers agree: the one of the worker that comes here first.

        For decisions by what each worker measures for itself, such as the time: all workers call it at the same place
        of the script. It is also the number of workers that come here later, or once more after the job went back.
        ``name``: of up to 100 characters, if there are several. Raises UserError for what is no number.

        >>> stop = ctx.agree(time.monotonic() > 1e12, "stop")
        >>> bool(stop)
        False
        """
        number = as_numbers({name: value}, {})[name]
        epoch, count = self._places.call(f"agree {name}")
        place = epoch + 1, count + 1
        return self.engine.agreeing.agree_on_measured(_asked(name), place, number, self._places.planned)

    def agreed(self, name: str = "value") -> list[float]:
        """The numbers of :meth:`agree` of this name so far, in order, also those from before this worker came.

        For decisions that look back, such as early stopping: a worker that comes late, or begins again, decides as the
        others do. All workers have the same numbers at the same place of the script. If the job went back, those of
        epochs that come again are left out until then.

        >>> for epoch in ctx.epochs(2):
        ...     if ctx.agreed("loss") and min(ctx.agreed("loss")) < 0.1:
        ...         break
        ...     loss = ctx.agree(1.0 / (epoch + 1), "loss")
        >>> ctx.agreed("loss")
        [1.0, 0.5]
        """
        epoch, count = self._places.called(f"agree {name}")
        numbers = self.engine.agreeing.so_far(_asked(name), 0)
        return [value for place, value in sorted(numbers.items()) if place <= (epoch + 1, count)]


def _asked(name: str) -> str:
    """A script's name for a number, as the coordinator hears of it."""
    return f"script {name[:100]}"
