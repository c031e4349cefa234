"""An ``IterableDataset`` is read by all workers, and each computes its slices of it; or each reads its own stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from paramserver import errors
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, Died, inside, train
from tests.support.cluster.programs import dataset, network, sgd
from tests.support.cluster.reference import slice_by_slice

SAMPLES, BATCH, EPOCHS, SLICES = 46, 4, 2, 4


class Reader(IterableDataset[Any]):
    """Reads the samples from the epoch's place on. ``part``, ``of``: every so many of them."""

    def __init__(self, part: int = 0, of: int = 1) -> None:
        self.part, self.of, self.epoch = part, of, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        data = dataset(SAMPLES)
        return (data[index] for index in range(9 * self.epoch + self.part, SAMPLES, self.of))


class Sized(Reader):
    """Has a length."""

    def __len__(self) -> int:
        return SAMPLES


def program(
    make: Callable[[Context], DataLoader[Any]],
    seen: list[Any] | None = None,
    each: Callable[[Context, int], object] | None = None,
    **options: Any,
) -> Callable[[Context], None]:
    """``seen``: the first numbers of each batch. ``each``: called with the number of this worker's batches."""

    def script(ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        model, optimizer, loader = ctx.prepare(model, optimizer, make(ctx), **options)
        number = 0
        for _ in ctx.epochs(EPOCHS):
            for x, y in loader:
                if each is not None:
                    each(ctx, number)
                number += 1
                if seen is not None:
                    seen.append(tuple(x[:, 0].tolist()))
                loss: Any = F.cross_entropy(model(x), y)
                loss.backward()
                if ctx.step_due:
                    optimizer.step()
                    optimizer.zero_grad()

    return script


def sized(ctx: Context) -> DataLoader[Any]:
    return DataLoader(Sized(), batch_size=BATCH)


def endless(ctx: Context) -> DataLoader[Any]:
    return DataLoader(Reader(), batch_size=BATCH)


def test_the_bits_of_plain_torch_with_any_number_of_workers() -> None:
    """The second epoch is shorter than the first."""
    steps = []
    for epoch in range(EPOCHS):
        data = Sized()
        data.set_epoch(epoch)
        batches = list(DataLoader(data, batch_size=BATCH))
        steps += [batches[at : at + SLICES] for at in range(0, len(batches), SLICES)]
    model: Any = network()
    slice_by_slice(model, sgd(model.parameters()), steps, F.cross_entropy)
    one = train(program(sized), 1, 1, slices_per_step=SLICES)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(one.tensor(name), parameter.detach(), rtol=1e-5, atol=1e-7)
    for workers in (2, 4):
        assert train(program(sized), workers, 2, slices_per_step=SLICES).digests == one.digests
    assert train(program(endless, batches=12), 2, 1, slices_per_step=SLICES).digests == one.digests


def test_accumulation_and_a_worker_that_dies() -> None:
    def dies(ctx: Context, number: int) -> None:
        if ctx.rank == 0 and number == 3:
            raise Died

    one = train(program(sized, accumulate=2), 1, 1, slices_per_step=3)
    with Cluster(2, 1, slices_per_step=3, lease_s=1.0, grace_s=0.1) as cluster:
        two = cluster.train(program(sized, each=dies, accumulate=2))
    assert two.digests == one.digests
    assert two.summary["workers"] != one.summary["workers"]


def test_processes_that_read_give_the_batches_of_torchs_loader() -> None:
    """Each reads a part, and torch takes batches from them in turn."""

    class Parts(Reader):
        def __iter__(self) -> Iterator[Any]:
            info = get_worker_info()
            assert info is not None
            self.part, self.of = info.id, info.num_workers
            return super().__iter__()

    seen: list[Any] = []

    def make(ctx: Context) -> DataLoader[Any]:
        return DataLoader(Parts(), BATCH, num_workers=2)

    train(program(make, seen, batches=20), 1, 1, slices_per_step=1)
    wanted = []
    for epoch in range(EPOCHS):
        data = Parts()
        data.set_epoch(epoch)
        wanted += [tuple(x[:, 0].tolist()) for x, _ in DataLoader(data, BATCH, num_workers=2)]
    assert seen == wanted


def test_an_epoch_is_cut_at_the_number_of_batches() -> None:
    seen: list[Any] = []
    train(program(endless, seen, batches=3), 1, 1, slices_per_step=1)
    x, _ = dataset(SAMPLES).tensors
    assert seen == [tuple(x[at : at + BATCH, 0].tolist()) for first in (0, 9) for at in range(first, first + 12, BATCH)]


def test_own_streams_are_read_by_each_worker_with_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    """Each worker reads every second sample."""
    seen: list[Any] = []

    def make(ctx: Context) -> DataLoader[Any]:
        return DataLoader(Reader(ctx.rank, 2), batch_size=1)

    script = program(make, seen, batches=SAMPLES, own_streams=True)
    train(script, 2, 1, slices_per_step=2)
    assert "each worker reads its own stream" in capsys.readouterr().err
    x, _ = dataset(SAMPLES).tensors
    wanted = x[:, 0].tolist() + x[9:, 0].tolist()
    assert {number for batch in seen for number in batch} <= set(wanted)
    assert len(seen) > SAMPLES, "slices that a slow worker leaves take the samples of the other one"


def test_streams_that_differ_are_refused() -> None:
    def make(ctx: Context) -> DataLoader[Any]:
        return DataLoader(Reader(ctx.rank, 2), batch_size=1)

    with (
        Cluster(2, slices_per_step=2) as cluster,
        pytest.raises(errors.DataError, match="Reader gives another first batch in epoch 1"),
    ):
        cluster.train(program(make, batches=5))


class HuggingFace(Dataset[Any]):
    """The interface of a map-style data set of Hugging Face: columns, rows by index, and many rows at once."""

    def __init__(self) -> None:
        x, y = dataset(SAMPLES).tensors
        self.columns = {"x": x, "y": y}
        self.asked: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, key: int) -> dict[str, Any]:
        return {name: column[key] for name, column in self.columns.items()}

    def __getitems__(self, keys: list[int]) -> list[dict[str, Any]]:
        self.asked.append(len(keys))
        return [self[key] for key in keys]


def test_a_map_style_data_set_of_hugging_face_is_as_any_other() -> None:
    data = HuggingFace()

    def script(ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        model, optimizer, loader = ctx.prepare(model, optimizer, DataLoader(data, BATCH, shuffle=True))
        for _ in ctx.epochs(EPOCHS):
            for batch in loader:
                loss: Any = F.cross_entropy(model(batch["x"]), batch["y"])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    one = train(script, 1, 1, slices_per_step=SLICES)
    assert set(data.asked) == {BATCH, SAMPLES % BATCH}, "rows are asked for at once"
    plain = program(lambda ctx: DataLoader(dataset(SAMPLES), BATCH, shuffle=True))
    assert train(plain, 2, 1, slices_per_step=SLICES).digests == one.digests


class Stateful(DataLoader[Any]):
    """As torchdata's StatefulDataLoader: an ``__iter__`` of its own that gives what torch's gives, and a state."""

    def __iter__(self) -> Any:
        raise AssertionError("the job keeps the position")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_loader_with_a_state_is_as_torchs() -> None:
    def stateful(ctx: Context) -> DataLoader[Any]:
        return Stateful(dataset(SAMPLES), BATCH, shuffle=True)

    plain = program(lambda ctx: DataLoader(dataset(SAMPLES), BATCH, shuffle=True))
    wanted = train(plain, 1, 1, slices_per_step=2).digests
    assert train(program(stateful), 2, 1, slices_per_step=2).digests == wanted


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (lambda: DataLoader(Reader()), {}, "has no length: say how many batches"),
        (lambda: DataLoader(dataset(8)), {"batches": 3}, "batches is for an IterableDataset"),
        (lambda: DataLoader(dataset(8)), {"own_streams": True}, "own_streams is for an IterableDataset"),
    ],
)
def test_refused(make: Callable[[], DataLoader[Any]], options: dict[str, Any], text: str) -> None:
    def work(ctx: Context) -> None:
        with pytest.raises(errors.DataError, match=text):
            ctx.prepare(make(), **options)
        with pytest.raises(errors.DataError, match=r"ctx.evaluate takes no IterableDataset"):
            next(ctx.evaluate(DataLoader(Sized())))

    inside(work)
