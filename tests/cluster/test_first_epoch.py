"""Scripts that go on from a checkpoint of their own: the job's first epoch has the number that the script says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from structlog.testing import capture_logs
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from paramserver import errors
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, train, wait
from tests.support.cluster.programs import dataset, network, sgd

SAMPLES, EPOCHS, DONE = 24, 4, 2
# The numbers of the script's epochs; tells the loader before each.
Loop = Callable[[Context, Any, int], Iterable[int]]


class Turned(Sampler[int]):
    """Another order in each epoch."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        return iter([(index + 5 * self.epoch) % SAMPLES for index in range(SAMPLES)])


def shuffled() -> DataLoader[Any]:
    return DataLoader(dataset(SAMPLES), batch_size=4, shuffle=True)


def with_a_sampler() -> DataLoader[Any]:
    return DataLoader(dataset(SAMPLES), batch_size=4, sampler=Turned())


def with_a_distributed_sampler() -> DataLoader[Any]:
    data = dataset(SAMPLES)
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=1, rank=0))


def planned(ctx: Context, loader: Any, start: int) -> Iterable[int]:
    return ctx.epochs(EPOCHS, start=start)


def told_each_time(ctx: Context, loader: Any, start: int) -> Iterable[int]:
    for epoch in range(start, EPOCHS):
        loader.set_epoch(epoch)
        yield epoch


def told_once(ctx: Context, loader: Any, start: int) -> Iterable[int]:
    loader.set_epoch(start)
    return range(start, EPOCHS)


def told_to_the_sampler(ctx: Context, loader: Any, start: int) -> Iterable[int]:
    for epoch in range(start, EPOCHS):
        loader.sampler.set_epoch(epoch)
        yield epoch


class Script:
    """Begins with what the script before has left, as from a file."""

    def __init__(self, make: Callable[[], DataLoader[Any]], loop: Loop, until: int, saved: Any = None) -> None:
        self.make, self.loop, self.until, self.saved = make, loop, until, saved
        self.numbers: list[int] = []

    def __call__(self, ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        start = 0
        if self.saved is not None:
            start = self.saved["epoch"]
            model.load_state_dict(self.saved["model"])
            optimizer.load_state_dict(self.saved["optimizer"])
        model, optimizer, loader = ctx.prepare(model, optimizer, self.make())
        for epoch in self.loop(ctx, loader, start):
            if epoch == self.until:
                break
            self.numbers.append(epoch)
            for x, y in loader:
                noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(ctx.slice_seed()))
                loss: Any = F.cross_entropy(model(x + noise), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        self.left = {**ctx.state_dict(), "epoch": self.until}


CASES = [
    (shuffled, planned),
    (shuffled, told_each_time),
    (shuffled, told_once),
    (with_a_sampler, planned),
    (with_a_sampler, told_each_time),
    (with_a_distributed_sampler, told_to_the_sampler),
]


@pytest.mark.parametrize(("make", "loop"), CASES)
def test_a_script_that_goes_on_ends_with_the_bits_of_one_that_never_stopped(
    make: Callable[[], DataLoader[Any]], loop: Loop
) -> None:
    whole = train(Script(make, loop, EPOCHS), slices_per_step=2).digests
    first = Script(make, loop, DONE)
    train(first, slices_per_step=2)
    rest = Script(make, loop, EPOCHS, first.left)
    assert train(rest, slices_per_step=2).digests == whole
    assert (first.numbers, rest.numbers) == ([0, 1], [2, 3])


@pytest.mark.parametrize("loop", [planned, told_each_time])
def test_a_worker_that_is_started_again_goes_on_where_the_job_stands(loop: Loop) -> None:
    """Its own checkpoint is of a later epoch than that with which the job has begun."""
    begun, ready = threading.Event(), threading.Event()
    seen: dict[int, list[tuple[int, float]]] = {0: [], 1: []}

    def script(ctx: Context) -> None:
        model: Any = network()
        model, optimizer, loader = ctx.prepare(model, sgd(model.parameters()), shuffled())
        for epoch in loop(ctx, loader, DONE + ctx.rank):
            for x, y in loader:
                seen[ctx.rank].append((epoch, round(float(x.sum()), 3)))
                loss: Any = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if not begun.is_set():
                    begun.set()
                    wait(ready, "the other worker is there")

    def late(ctx: Context) -> None:
        ready.set()
        script(ctx)

    with Cluster(workers=1, slices_per_step=2) as cluster:
        cluster.start(script)
        wait(begun, "the first slice")
        cluster.start(late)
        cluster.join()
        assert cluster.outcome().summary["samples"] == SAMPLES * (EPOCHS - DONE)
    # A pass of a plain loop gives what is left of earlier epochs, too.
    expected = batches_of(DONE) | batches_of(DONE + 1)
    assert {total for _, total in seen[0] + seen[1]} == expected
    assert {epoch for epoch, _ in seen[0]} == {DONE, DONE + 1}


def batches_of(epoch: int) -> set[float]:
    """The sums of the batches of an epoch, of any number."""
    from paramserver.core.work.slices import DataSpec, slice_indices

    data, x = DataSpec(SAMPLES, 4), dataset(SAMPLES).tensors[0]
    return {round(float(x[slice_indices(data, 0, epoch, index)].sum()), 3) for index in range(6)}


def test_nothing_is_left_to_train() -> None:
    saved = Script(shuffled, planned, DONE)
    train(saved)
    done = Script(shuffled, planned, EPOCHS, {**saved.left, "epoch": EPOCHS})
    assert train(done).summary["samples"] == 0
    assert done.numbers == []


def test_another_number_than_the_next_one_is_refused() -> None:
    def twice(ctx: Context, loader: Any, start: int) -> Iterable[int]:
        for epoch in range(0, EPOCHS, 2):
            loader.set_epoch(epoch)
            yield epoch

    with pytest.raises(errors.UserError, match=r"loader.set_epoch\(2\) was called, and the epoch that begins is 1"):
        train(Script(shuffled, twice, EPOCHS))

    def beside(ctx: Context, loader: Any, start: int) -> Iterable[int]:
        for epoch in ctx.epochs(EPOCHS):
            loader.set_epoch(epoch + 1)
            yield epoch

    with pytest.raises(errors.UserError, match=r"loader.set_epoch\(1\) was called, and the epoch that begins is 0"):
        train(Script(shuffled, beside, EPOCHS))


def test_the_first_epoch_is_said_with_advice_where_the_optimizer_was_trained_before() -> None:
    def untold(ctx: Context, loader: Any, start: int) -> Iterable[int]:
        return range(start, EPOCHS)

    first = Script(shuffled, untold, DONE)
    with capture_logs() as logs:
        train(first, workers=2)
    begin = "the first loop over the prepared loader is epoch"
    assert not [one for one in logs if "counted from 0" in one["event"]]
    with capture_logs() as logs:
        train(Script(shuffled, told_each_time, EPOCHS, first.left), workers=2)
    (said,) = [one for one in logs if one["event"].startswith(begin)]
    assert said["log_level"] == "info"
    assert said["event"].startswith(f"{begin} {DONE}, counted from 0")
    with capture_logs() as logs:
        train(Script(shuffled, untold, EPOCHS, first.left), workers=2)
    (said,) = [one for one in logs if one["event"].startswith(begin)]
    assert said["log_level"] == "warning"
    assert said["event"].startswith(f"{begin} 0, counted from 0")
    assert "call loader.set_epoch(epoch) before the loop" in said["event"]
