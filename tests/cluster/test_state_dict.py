"""`ctx.state_dict()`: what plain torch would have, from any worker; plain torch and other jobs go on from it."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.worker.context import Context
from tests.support.cluster.harness import inside, train
from tests.support.cluster.programs import Aligned, dataset, network
from tests.support.cluster.reference import Batch, slice_by_slice
from tests.support.failover.loading import adamw

# 10 slices, 5 steps in an epoch.
SAMPLES, BATCH, SLICES, STEPS = 40, 4, 2, 5


class Saving:
    """Trains for an epoch, and keeps the state of each version that it has. ``build``: the model."""

    def __init__(self, build: Any, load: dict[str, Any] | None = None) -> None:
        self.build, self.load = build, load
        self.found: dict[tuple[int, int], dict[str, Any]] = {}
        self._lock = threading.Lock()

    def __call__(self, ctx: Context) -> None:
        model: Any = self.build()
        optimizer: Any = adamw(model.parameters())
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        if self.load is not None:
            ctx.load(self.load)
        for _ in ctx.epochs(1):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                state, version = ctx.state_dict(), ctx.version
                with self._lock:
                    self.found[version, ctx.rank] = state
                optimizer.step()
                optimizer.zero_grad()


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def steps(slices: int) -> list[list[Batch]]:
    """The batches of each step, of a loader without shuffling."""
    x, y = dataset(SAMPLES)[:]
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    return [batches[start : start + slices] for start in range(0, len(batches), slices)]


def test_plain_torch_goes_on_from_it_with_the_same_bits() -> None:
    script = Saving(Aligned)
    outcome = train(script, 2, 2, slices_per_step=SLICES)
    at = next(version for version, _ in sorted(script.found) if version >= 2)
    saved = next(state for (version, _), state in script.found.items() if version == at)
    model = Aligned()
    optimizer = adamw(model.parameters())
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    slice_by_slice(model, optimizer, steps(SLICES)[at:], F.cross_entropy)
    for name, parameter in model.named_parameters():
        assert torch.equal(outcome.tensor(name), parameter.detach()), name


def test_it_is_the_same_on_all_workers_whatever_they_have_computed_since() -> None:
    """BatchNorm's statistics have changed in the slice at hand, in each worker in another way."""
    script = Saving(lambda: network(norm=True))
    train(script, 2, 2, slices_per_step=SLICES)
    pairs = [
        (script.found[version, 0], script.found[version, 1])
        for version in range(STEPS)
        if {(version, 0), (version, 1)} <= script.found.keys()
    ]
    assert pairs
    assert all(equal(one, other) for one, other in pairs)
    alone = Saving(lambda: network(norm=True))
    train(alone, 1, 1, slices_per_step=SLICES)
    assert all(equal(state, alone.found[version, 0]) for (version, _), state in script.found.items())


def test_another_job_goes_on_from_it() -> None:
    first = Saving(Aligned)
    train(first, 1, 1, slices_per_step=SLICES)
    saved = first.found[3, 0]
    again = Saving(Aligned, load=saved)
    train(again, 2, 2, slices_per_step=SLICES)
    assert equal(again.found[0, 0] if (0, 0) in again.found else again.found[0, 1], saved)


def test_what_is_loaded_into_the_model_before_prepare_counts() -> None:
    given = {name: torch.full_like(value, 0.01) for name, value in Aligned().state_dict().items()}

    def build() -> nn.Module:
        model = Aligned()
        model.load_state_dict(copy.deepcopy(given))
        return model

    script = Saving(build)
    train(script, 2, 1, slices_per_step=SLICES)
    states = [state for (version, _), state in script.found.items() if version == 0]
    assert states
    assert all(equal(dict(state["model"]), given) for state in states)


def test_entries_of_other_kinds() -> None:
    """Frozen and tied parameters, other types, extra state, buffers that are not saved."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = self.first
            self.frozen = nn.Linear(8, 3).requires_grad_(False)
            self.low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
            self.seen: torch.Tensor
            self.register_buffer("seen", torch.tensor(0))
            self.register_buffer("hidden", torch.zeros(1), persistent=False)

        def forward(self, x: torch.Tensor) -> Any:
            """Scores."""
            self.seen += 1
            return self.frozen(self.second(self.first(x))) * self.low.float()

        def get_extra_state(self) -> Any:
            """For the state dict."""
            return {"words": ["a", "b"]}

        def set_extra_state(self, state: Any) -> None:
            """From the state dict."""
            assert state == {"words": ["a", "b"]}

    def work(ctx: Context) -> None:
        model: Any = Mixed()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model, optimizer = ctx.prepare(model, adamw(trained))
        x, y = dataset(8)[:]
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        state = ctx.state_dict()
        assert state["model"].keys() == model.state_dict().keys()
        assert equal(dict(state["model"]), dict(model.state_dict()))
        assert state["model"]["seen"] == 1
        Mixed().load_state_dict(state["model"])
        before = {name: value.clone() for name, value in state["model"].items() if isinstance(value, torch.Tensor)}
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert all(torch.equal(state["model"][name], value) for name, value in before.items()), "it is a copy"

    inside(work)


def test_what_does_not_fit_is_refused() -> None:
    def work(ctx: Context) -> None:
        with pytest.raises(errors.UserError, match="belongs after"):
            ctx.state_dict()
        model: Any = network()
        model, _ = ctx.prepare(model, adamw(model.parameters()))
        wrong: list[Any] = [{}, model.state_dict(), [], {"model": None}]
        for state in wrong:
            with pytest.raises(errors.UserError, match=r"ctx.state_dict\(\) gives|given nothing"):
                ctx.load(state)
        with pytest.raises(errors.UserError, match="not both"):
            ctx.load(ctx.state_dict(), model=model.state_dict())

    inside(work)


# ---- averaged weights


def averaged(model: nn.Module) -> AveragedModel:
    mean: Any = get_ema_multi_avg_fn
    return AveragedModel(model, multi_avg_fn=mean(0.5), use_buffers=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_averaged_model_is_that_of_plain_torch(workers: int) -> None:
    """It is updated once for each version, as the script says it."""
    found: dict[int, dict[str, Any]] = {}

    def script(ctx: Context) -> None:
        model: Any = Aligned()
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH)
        model, optimizer, loader = ctx.prepare(model, adamw(model.parameters()), loader)
        mean, version = averaged(model), ctx.version
        for _ in ctx.epochs(1):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                if ctx.version > version:
                    version = ctx.version
                    mean.update_parameters(model)
        found[ctx.rank] = mean.state_dict()

    train(script, workers, 2, slices_per_step=workers)
    model = Aligned()
    optimizer, mean = adamw(model.parameters()), averaged(model)
    for step in steps(workers):
        slice_by_slice(model, optimizer, [step], F.cross_entropy)
        mean.update_parameters(model)
    assert len(found) == workers
    for state in found.values():
        assert equal(dict(state), dict(mean.state_dict()))
