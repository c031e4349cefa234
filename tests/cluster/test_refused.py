"""Models, optimizers and data of all kinds: what is refused, with one clear sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paramserver import errors
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, inside, until
from tests.support.cluster.programs import dataset, minimise, network, plain, sgd


class Empty(nn.Module):
    """No parameters."""


class MySGD(torch.optim.SGD):
    """Might do anything."""


def lazy() -> nn.Module:
    return nn.LazyLinear(3)


def unusual() -> nn.Module:
    model = nn.Linear(1, 1)
    model.weight = nn.Parameter(torch.zeros(1, 1, dtype=torch.complex64))
    return model


def large_integers() -> nn.Module:
    model = nn.Linear(1, 1)
    model.register_buffer("count", torch.tensor(2**60))
    return model


def most_negative_integers() -> nn.Module:
    model = nn.Linear(1, 1)
    model.register_buffer("count", torch.tensor([0, -(2**63)]))
    return model


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters)


def of_nothing_here(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1)], lr=1.0)


def negative(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    optimizer.param_groups[0]["lr"] = -1.0
    return optimizer


def with_weight(weight: Tensor) -> Callable[[], nn.Module]:
    """A layer with this parameter."""

    def build() -> nn.Module:
        model = nn.Linear(3, 4)
        model.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
        return model

    return build


def views(first: slice, second: slice) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        memory, model = torch.zeros(8), nn.Module()
        model.first, model.second = nn.Parameter(memory[first]), nn.Parameter(memory[second])
        return model

    return build


def same_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(model.get_parameter("0.weight").data)
    return model


def buffer_view() -> nn.Module:
    model = nn.Linear(3, 3)
    model.register_buffer("row", model.weight.detach()[1])
    return model


def expanded_buffer() -> nn.Module:
    model = nn.Linear(3, 3)
    model.register_buffer("mask", torch.zeros(1, 3).expand(4, 3))
    return model


def wrapped() -> nn.Module:
    model = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(model)
    model.module = network()
    return model


def lent_to_others() -> nn.Module:
    return network().share_memory()


def lazy_buffers() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False))


class Odd(Tensor):
    """Stands for a DTensor, and for what quantises by a type of its own."""

    __tensor_flatten__ = None


def subclass() -> nn.Module:
    model = nn.Linear(3, 4)
    model.weight = nn.Parameter(torch.zeros(4, 3).as_subclass(Odd))
    return model


def of_another_model(parameters: Any) -> torch.optim.Optimizer:
    return sgd(network().parameters())


def twice(parameters: Any) -> torch.optim.Optimizer:
    optimizer = plain(parameters)
    optimizer.param_groups[0]["params"] *= 2
    return optimizer


def differentiable(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, differentiable=True)


Make = Callable[[Any], torch.optim.Optimizer]
REFUSED: dict[str, tuple[Callable[[], nn.Module], Make, str]] = {
    "no parameters": (Empty, of_nothing_here, "the model has no parameters to train"),
    "LBFGS": (network, lbfgs, r"LBFGS is not supported: it calls its closure several times in a step"),
    "SparseAdam": (
        network,
        lambda p: torch.optim.SparseAdam(list(p)),
        r"SparseAdam is not supported: it takes sparse gradients only",
    ),
    "a subclass": (network, MySGD, r"MySGD is not supported; supported: SGD"),
    "no shape yet": (lazy, plain, "parameter 'weight' has no shape yet: run the model once"),
    "buffers without a shape": (lazy_buffers, plain, r"buffer '1\.running_mean' has no shape yet: run the model once"),
    "complex numbers": (unusual, plain, "'weight' is of type complex64, which is not supported"),
    "large integers": (large_integers, plain, r"buffer 'count' holds integers beyond 2\*\*53"),
    "negative integers": (most_negative_integers, plain, r"buffer 'count' holds integers beyond 2\*\*53"),
    "negative lr": (network, negative, "lr is -1.0 and must be at least 0"),
    "meta": (lambda: nn.Linear(3, 3, device="meta"), plain, "'weight' is on the meta device, without values: make it"),
    "expanded": (with_weight(torch.zeros(3).expand(4, 3)), plain, "'weight' is expanded, so several of its elements"),
    "an expanded buffer": (expanded_buffer, plain, "buffer 'mask' is expanded, so several of its elements"),
    "sparse": (with_weight(torch.zeros(4, 3).to_sparse()), plain, "'weight' is sparse: make it dense"),
    "a tensor of its own kind": (subclass, plain, "'weight' is a .*, which is no plain tensor: give ctx.prepare"),
    "overlapping views": (views(slice(0, 5), slice(3, 8)), plain, "'first' and 'second' overlap in memory"),
    "the same memory twice": (same_memory, plain, r"'0\.weight' and '1\.weight' overlap in memory .*: tie them as one"),
    "a buffer that is a view": (buffer_view, plain, "'weight' and 'row' overlap in memory"),
    "lent to other processes": (lent_to_others, plain, r"'0\.weight' shares memory with other processes"),
    "a sparse embedding": (lambda: nn.Embedding(5, 3, sparse=True), plain, "Embedding makes sparse gradients"),
    "max_norm": (
        lambda: nn.Sequential(nn.Embedding(5, 3, max_norm=1.0)),
        plain,
        "Embedding '0' has max_norm, with which the forward pass writes",
    ),
    "DataParallel": (lambda: nn.DataParallel(network()), plain, "is wrapped in DataParallel, .*: give ctx.prepare the"),
    "DDP": (wrapped, plain, "is wrapped in DistributedDataParallel, .*: give ctx.prepare the module inside"),
    "another model's optimizer": (network, of_another_model, "the optimizer has none of the model's parameters"),
    "a parameter twice": (network, twice, r"the optimizer has parameter '0\.weight' twice"),
    "differentiable": (network, differentiable, "parameter group 0 has differentiable=True, which servers cannot do"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("what", REFUSED)
def test_refused_models_and_optimizers(what: str) -> None:
    build, optimizer, text = REFUSED[what]

    def work(ctx: Context) -> None:
        model = build()
        with pytest.raises(errors.ModelError, match=text) as caught:
            ctx.prepare(model, optimizer(model.parameters()))
        assert "\n" not in str(caught.value)

    inside(work)


class Stream(IterableDataset[Tensor]):
    """No numbers, no length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter([])


def loaders() -> dict[str, tuple[DataLoader[Any], str]]:
    numbers: Any = list(range(10))
    return {
        "iterable": (DataLoader(Stream()), "the IterableDataset has no length"),
        "an __iter__ of its own": (OfItsOwn(numbers), "OfItsOwn has an __iter__ of its own, which would not be called"),
        "empty": (DataLoader(TensorDataset(torch.zeros(0)), batch_size=4), "the data set is empty"),
        "drop_last": (
            DataLoader(numbers, batch_size=11, drop_last=True),
            "10 samples, which makes no slice of 11: use more data, or a smaller batch size, or drop_last=False",
        ),
    }


class OfItsOwn(DataLoader[Any]):
    """Gives what it likes."""

    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize("what", loaders())
def test_refused_data(what: str) -> None:
    loader, text = loaders()[what]

    def work(ctx: Context) -> None:
        with pytest.raises(errors.DataError, match=text):
            ctx.prepare(loader)

    inside(work)


def test_models_that_differ_between_workers_name_the_first_difference() -> None:
    def script(ctx: Context) -> None:
        model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, ctx.rank + 1))
        minimise(ctx, model, plain(model.parameters()), dataset(8))

    with Cluster(2) as cluster:
        workers = [cluster.start(script) for _ in range(2)]
        # The other one goes on waiting for its like.
        error = until("one of them is refused", lambda: next((w.error for w in workers if w.error), None))
    assert isinstance(error, errors.ModelError)
    text = r"model differs: '1\.weight' is a parameter of shape \(\d, 2\).* but .* in the model registered first"
    assert re.search(text, str(error))


def test_data_that_differs_between_workers() -> None:
    def script(ctx: Context) -> None:
        data = TensorDataset(torch.ones(8 + ctx.rank, 1), torch.zeros(8 + ctx.rank))
        model = nn.Linear(1, 1)
        minimise(ctx, model, plain(model.parameters()), data)

    with Cluster(2) as cluster:
        workers = [cluster.start(script) for _ in range(2)]
        with pytest.raises(errors.DataError, match=r"data set has \d samples in slices of 4, the one registered first"):
            cluster.join(workers)


def test_prepare_twice_and_in_parts() -> None:
    def work(ctx: Context) -> None:
        model, other = network(), network()
        with pytest.raises(errors.ModelError, match="together, in one call"):
            ctx.prepare(model)
        with pytest.raises(errors.ModelError, match="together, in one call"):
            ctx.prepare(sgd(model.parameters()))
        with pytest.raises(errors.UserError, match="not list"):
            ctx.prepare([model])
        with pytest.raises(errors.UserError, match=r"nothing was given to ctx\.prepare"):
            ctx.prepare()
        with pytest.raises(errors.ModelError, match=r"several models were given .* give each a call of its own"):
            ctx.prepare(model, network(), sgd(model.parameters()))
        with pytest.raises(errors.ModelError, match=r"the optimizers have parameter .* twice"):
            ctx.prepare(model, sgd(model.parameters()), plain(model.parameters()))
        with pytest.raises(errors.DataError, match="several DataLoaders were given"):
            ctx.prepare(*(DataLoader(dataset(8), batch_size=4) for _ in range(2)))
        given = sgd(model.parameters())
        elsewhere = StepLR(plain(network().parameters()), 1)
        with pytest.raises(errors.ModelError, match="StepLR changes another optimizer than the one given"):
            ctx.prepare(model, given, elsewhere)
        _, optimizer = ctx.prepare(model, given)
        with pytest.raises(errors.ModelError, match="StepLR changes another optimizer than the one given"):
            ctx.prepare(elsewhere)
        scheduler = ctx.prepare(StepLR(optimizer, 1))
        with pytest.raises(errors.UserError, match="not StepScheduler again"):
            ctx.prepare(scheduler)
        with pytest.raises(errors.ModelError, match="to train several at once, give each one a name"):
            ctx.prepare(other, sgd(other.parameters()))
        with pytest.raises(errors.ModelError, match=r"has this model already, .* begin a job for each phase"):
            ctx.prepare(model, plain(model.parameters()))
        ctx.prepare(DataLoader(dataset(8), batch_size=4))
        with pytest.raises(errors.DataError, match="a training loader already"):
            ctx.prepare(DataLoader(dataset(8), batch_size=4))
        with pytest.raises(errors.UserError, match="at least 1, not 0"):
            list(ctx.epochs(0))

    inside(work)
