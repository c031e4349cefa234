"""``ctx.evaluate``: batches of a second loader are shared out, and all workers have the results of all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Sampler

from paramserver import errors
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, Died, Outcome, inside, train, wait
from tests.support.cluster.programs import adamw, dataset, network, sgd

SAMPLES, BATCH, EPOCHS = 46, 4, 3
BATCHES = 12
# By worker and epoch, what it has gathered.
Found = dict[tuple[int, int], list[Any]]


class Script:
    """Trains, and evaluates after each epoch."""

    def __init__(self, each: Callable[[Context, int, int], object] | None = None, **loader: Any) -> None:
        """``each`` is called for each batch that is evaluated, with the epoch and this worker's number of batches."""
        self.each, self.loader = each, {"batch_size": BATCH, **loader}
        self.found: Found = {}
        # Which samples each worker evaluated.
        self.seen: dict[int, list[float]] = {}
        self.stop_above = 0.0

    def __call__(self, ctx: Context) -> None:
        model: Any = network(norm=True)
        optimizer: Any = adamw(model.parameters())
        loader: Any = DataLoader(dataset(64), batch_size=8, shuffle=True)
        test: Any = DataLoader(dataset(SAMPLES), **self.loader)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        for epoch in ctx.epochs(EPOCHS):
            model.train()
            for x, y in loader:
                loss: Any = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                for number, (x, y) in enumerate(ctx.evaluate(test)):
                    self.seen.setdefault(ctx.rank, []).extend(x[:, 0].tolist())
                    if self.each is not None:
                        self.each(ctx, epoch, number)
                    scores = model(x)
                    ctx.gather({"loss": F.cross_entropy(scores, y), "classes": scores.argmax(1), "of": len(x)})
            self.found[ctx.rank, epoch] = ctx.gathered
            if self.stop_above and sum(float(one["loss"]) for one in ctx.gathered) / BATCHES < self.stop_above:
                break


def results(workers: int, **options: Any) -> tuple[Outcome, Script]:
    script = Script(**options)
    return train(script, workers, 2, slices_per_step=4), script


def test_the_same_results_with_any_number_of_workers() -> None:
    one, alone = results(1)
    assert [sum(r["of"] for r in alone.found[0, epoch]) for epoch in range(EPOCHS)] == [SAMPLES] * EPOCHS
    assert [len(r["classes"]) for r in alone.found[0, 0]] == [4] * 11 + [2], "in the order of the loader"
    for workers in (2, 4):
        outcome, script = results(workers)
        assert outcome.digests == one.digests
        for (_, epoch), found in script.found.items():
            assert repr(found) == repr(alone.found[0, epoch])
        assert len(script.found) == workers * EPOCHS
        x, _ = dataset(SAMPLES).tensors
        seen = sorted(sample for mine in script.seen.values() for sample in mine)
        assert seen == sorted(x[:, 0].tolist() * EPOCHS), "each sample once per epoch"


def test_an_evaluation_changes_nothing_in_the_training() -> None:
    class Without(Script):
        def __call__(self, ctx: Context) -> None:
            ctx.evaluate = lambda loader: iter(())  # type: ignore[method-assign]
            ctx._evaluations.gathered = []
            super().__call__(ctx)

    assert train(Without(), 1, 2, slices_per_step=4).digests == results(2)[0].digests


def test_all_workers_stop_early_after_the_same_epoch() -> None:
    _, full = results(1)
    limit = sum(float(one["loss"]) for one in full.found[0, 1]) / BATCHES + 1e-6
    script = Script()
    script.stop_above = limit
    outcome = train(script, 3, 1, slices_per_step=4)
    assert sorted(script.found) == [(rank, epoch) for rank in range(3) for epoch in range(2)]
    assert outcome.summary["steps"] == 4, "two epochs of two steps"


def test_batches_of_a_dead_worker_are_evaluated_by_others() -> None:
    _, alone = results(1)
    died = threading.Event()

    def each(ctx: Context, epoch: int, number: int) -> None:
        if epoch != 1:
            return
        if ctx.rank == 1:
            wait(died, "the death of a worker that evaluates")
        elif number == 1:  # the first batch is done, and nobody has heard of it; more are leased
            died.set()
            raise Died

    script = Script(each)
    with Cluster(2, 1, slices_per_step=4, lease_s=1.0, grace_s=0.1) as cluster:
        cluster.train(script)
    assert died.is_set()
    for epoch in range(EPOCHS):
        assert repr(script.found[1, epoch]) == repr(alone.found[0, epoch])
    assert (0, 1) not in script.found


def test_a_loader_with_processes_and_a_sampler() -> None:
    class Backwards(Sampler[int]):
        def __len__(self) -> int:
            return 20

        def __iter__(self) -> Iterator[int]:
            return iter(range(13, -1, -1))

    script = Script(num_workers=2, sampler=Backwards())
    train(script, 1, 1, slices_per_step=4)
    x, _ = dataset(SAMPLES).tensors
    assert script.seen[0] == x[:14, 0].flip(0).tolist() * EPOCHS
    assert [one["of"] for one in script.found[0, 0]] == [4, 4, 4, 2], "batches without samples have no results"


def test_a_worker_that_leaves_the_loop_gives_its_batches_to_others() -> None:
    found: dict[int, list[int]] = {}
    left = threading.Event()

    def script(ctx: Context) -> None:
        model: Any = network()
        model, _ = ctx.prepare(model, sgd(model.parameters()))
        test: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH)
        evaluation: Any = ctx.evaluate(test)
        if ctx.rank == 0:
            next(evaluation)
            evaluation.close()
            with pytest.raises(errors.UserError, match="come to its end"):
                _ = ctx.gathered
            left.set()
            return
        wait(left, "the other worker's leave")
        for x, _ in evaluation:
            ctx.gather(len(x))
        found[ctx.rank] = ctx.gathered

    with Cluster(2) as cluster:
        for _ in range(2):
            cluster.start(script)
        cluster.join()
    assert found == {1: [4] * 11 + [2]}


def test_results_of_many_pages_and_a_batch_without_one() -> None:
    def work(ctx: Context) -> None:
        model: Any = network()
        ctx.prepare(model, sgd(model.parameters()))
        big: Any = list(range(9))
        for one in ctx.evaluate(DataLoader(big, batch_size=1)):
            if int(one) != 4:
                ctx.gather(torch.full((70_000,), float(one)))
        assert [None if one is None else float(one[-1]) for one in ctx.gathered] == [0, 1, 2, 3, None, 5, 6, 7, 8]

    inside(work)


def test_agree_gives_the_number_of_whoever_comes_first() -> None:
    found: dict[int, tuple[float, ...]] = {}
    first = threading.Event()

    def script(ctx: Context) -> None:
        if ctx.rank == 1:
            wait(first, "the first number")
        found[ctx.rank] = ctx.agree(ctx.rank + 5), ctx.agree(ctx.rank == 0, "stop")
        first.set()
        found[ctx.rank] += (ctx.agree(7),)

    with Cluster(2) as cluster:
        for _ in range(2):
            cluster.start(script)
        cluster.join()
    assert found == {0: (5, 1, 7), 1: (5, 1, 7)}


def test_a_worker_that_comes_late_stops_early_with_the_others() -> None:
    """It decides by the losses of all epochs, also of those before it came; and at the same place as the others."""
    losses, patience = (3.0, 2.0, 2.5, 2.6, 2.7, 2.8), 2
    come, trains = threading.Event(), threading.Event()
    last: dict[int, tuple[int, list[float]]] = {}

    def script(ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = adamw(model.parameters())
        loader: Any = DataLoader(dataset(32), batch_size=8)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        for epoch in ctx.epochs(len(losses)):
            known = ctx.agreed("loss")
            assert known == list(losses[:epoch])
            last[ctx.rank] = epoch, known
            if known and len(known) - known.index(min(known)) > patience:
                break
            for x, y in loader:
                if ctx.rank:
                    trains.set()
                elif epoch == 2 and not come.is_set():
                    come.set()
                    wait(trains, "a batch of the other worker", 60.0)
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            ctx.agree(losses[epoch], "loss")
            assert ctx.agreed("loss") == list(losses[: epoch + 1])

    with Cluster(1, 1, slices_per_step=2) as cluster:
        cluster.start(script)
        wait(come, "the third epoch", 60.0)
        cluster.start(script)
        cluster.join()
        assert cluster.outcome().result.version == 4 * 2
    assert last == dict.fromkeys((0, 1), (4, list(losses[:4])))


def test_numbers_of_epochs_that_come_again_are_left_out_until_then() -> None:
    def script(ctx: Context) -> None:
        for epoch in range(2):
            ctx._places.plan(epoch, last=epoch == 1)
            ctx.agree(epoch, "loss")
            ctx.agree(epoch + 0.5, "loss")
        ctx._places.plan(0, last=False)
        assert ctx.agreed("loss") == []
        assert ctx.agree(7, "loss") == 0
        assert ctx.agreed("loss") == [0]
        ctx._places.plan(1, last=True)
        assert ctx.agreed("loss") == [0, 0.5]
        assert ctx.agreed("other") == []

    inside(script)


def test_refused() -> None:
    numbers: Any = list(range(8))

    def work(ctx: Context) -> None:
        model: Any = network()
        test: Any = DataLoader(numbers, batch_size=2)
        with pytest.raises(errors.UserError, match=r"ctx.gather belongs into a loop"):
            ctx.gather(1)
        with pytest.raises(errors.UserError, match=r"ctx.gathered belongs after a loop"):
            _ = ctx.gathered
        model, _, loader = ctx.prepare(model, sgd(model.parameters()), DataLoader(dataset(8), 4))
        with pytest.raises(errors.UserError, match="takes a DataLoader that was not prepared"):
            ctx.evaluate(loader)
        for _ in loader:
            with pytest.raises(errors.UserError, match="outside of the loop over the prepared loader"):
                next(ctx.evaluate(test))
            break
        evaluation: Any = ctx.evaluate(test)
        next(evaluation)
        ctx.gather(1)
        with pytest.raises(errors.UserError, match="twice for a batch"):
            ctx.gather(2)
        with pytest.raises(errors.UserError, match="one loader at a time"):
            next(ctx.evaluate(test))
        evaluation.close()
        with pytest.raises(errors.UserError, match="takes a number"):
            ctx.agree("x")  # type: ignore[arg-type]

    inside(work)


def test_loaders_of_other_lengths_are_refused() -> None:
    def script(ctx: Context) -> None:
        for _ in ctx.evaluate(DataLoader(dataset(8 + 4 * ctx.rank), 4)):
            ctx.gather(1)

    with Cluster(2) as cluster, pytest.raises(errors.DataError, match="must evaluate the same data"):
        cluster.train(script)
