"""A contribution follows from its slice and from the job's history, whatever the process computed before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paramserver import errors
from paramserver.core.work.slices import DataSpec, SyncSchedule, slice_indices
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, Died, Outcome, alone, train, wait
from tests.support.cluster.programs import fill, generator
from tests.support.failover.rollback import Rig, Strike, same, twin

SAMPLES, BATCH, SLICES, EPOCHS = 24, 2, 2, 2
SPEC = DataSpec(SAMPLES, BATCH)
X = torch.randn(SAMPLES, 4, generator=generator(1), dtype=torch.float64)
Y = torch.randn(SAMPLES, 1, generator=generator(2), dtype=torch.float64)
# The first slice of the job has this sample.
FIRST = slice_indices(SPEC, 0, 0, 0)[0]
DATA = TensorDataset(X, Y, torch.arange(SAMPLES))
STEPS = EPOCHS * SAMPLES // (BATCH * SLICES)


class Rarely(nn.Module):
    """The first slice of the first epoch uses a layer that no other slice uses, and nobody uses another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.never = nn.Linear(2, 2)
        self.double()
        fill(self)

    def loss(self, epoch: int, x: Tensor, y: Tensor, which: Tensor) -> Any:
        hidden = self.first(x)
        if epoch == 0 and bool((which == FIRST).any()):
            hidden = hidden + self.rare(hidden)
        return (self.last(hidden) - y).square().mean()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


def decay(parameters: Any) -> torch.optim.Optimizer:
    """Servers have no state for it that could tell which parameters had a gradient."""
    return torch.optim.SGD(parameters, lr=0.05, weight_decay=0.1)


Clear = Callable[[Any], None]


def to_zeros(optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def to_none(optimizer: Any) -> None:
    optimizer.zero_grad()


def by_hand(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.zero_()


def never(optimizer: Any) -> None:
    pass


# How a script clears gradients: before a backward pass, and after a step.
WAYS: dict[str, tuple[Clear, Clear]] = {
    "zeros first": (to_zeros, never),
    "zeros last": (never, to_zeros),
    "zeros by hand": (never, by_hand),
    "none first": (to_none, never),
    "none last": (never, to_none),
}


class Script:
    """``each(ctx, n)`` is called in slice n of its worker."""

    def __init__(
        self,
        way: tuple[Clear, Clear],
        each: Callable[[Context, int], object] = lambda ctx, n: None,
        build: Callable[[Any], torch.optim.Optimizer] = momentum,
    ) -> None:
        self.way, self.each, self.build = way, each, build

    def __call__(self, ctx: Context) -> None:
        own = Rarely()
        loader: Any = DataLoader(DATA, batch_size=BATCH, shuffle=True)
        _, optimizer, loader = ctx.prepare(own, self.build(own.parameters()), loader)
        n = 0
        for epoch in ctx.epochs(EPOCHS):
            for batch in loader:
                self.way[0](optimizer)
                own.loss(epoch, *batch).backward()
                self.each(ctx, n)
                n += 1
                optimizer.step()
                self.way[1](optimizer)


def plain(way: tuple[Clear, Clear], build: Callable[[Any], torch.optim.Optimizer] = momentum) -> Rarely:
    """The same in one process of torch: a step has the slices of the job's step as one batch."""
    model = Rarely()
    optimizer = build(model.parameters())
    schedule = SyncSchedule(SPEC.slices_per_epoch, SLICES)
    for version in range(STEPS):
        step = schedule.step(version)
        way[0](optimizer)
        for index in step.slices:
            batch = DATA[slice_indices(SPEC, 0, step.epoch, index)]
            (model.loss(step.epoch, *batch) / SLICES).backward()
        optimizer.step()
        way[1](optimizer)
    return model


@cache
def quiet(name: str, build: Callable[[Any], torch.optim.Optimizer] = momentum) -> Outcome:
    return train(Script(WAYS[name], build=build), slices_per_step=SLICES)


@pytest.mark.parametrize("build", [momentum, decay], ids=lambda build: build.__name__)
@pytest.mark.parametrize("name", WAYS)
def test_a_layer_that_one_slice_uses_ends_as_in_plain_torch(name: str, build: Any) -> None:
    for key, parameter in plain(WAYS[name], build).named_parameters():
        torch.testing.assert_close(quiet(name, build).tensor(key), parameter.detach(), rtol=1e-12, atol=1e-14, msg=key)


@pytest.mark.parametrize("name", ["zeros first", "zeros last", "none first"])
def test_another_worker_goes_on_when_the_one_that_used_the_layer_is_slow(name: str) -> None:
    """From its second slice on it computes nothing until the others are done."""
    stopped, go = threading.Event(), threading.Event()

    def each(ctx: Context, n: int) -> None:
        if ctx.rank == 0 and n == 1:
            stopped.set()
            wait(go, "the end of the other worker", 60.0)

    with Cluster(2, 2, slices_per_step=SLICES) as cluster:
        slow = cluster.start(Script(WAYS[name], each))
        other = cluster.start(Script(WAYS[name]))
        wait(stopped, "the second slice of worker-0")
        cluster.join([other])
        go.set()
        cluster.join([slow])
        outcome = cluster.outcome()
    assert outcome.digests == quiet(name).digests


@pytest.mark.parametrize("name", ["zeros first", "zeros last", "none last"])
def test_a_worker_that_comes_does_not_know_how_the_script_clears(name: str) -> None:
    """The only worker dies right after the step that used the layer: the next one has seen nothing."""

    def dies(ctx: Context, n: int) -> None:
        if n == SLICES:
            raise Died

    with Cluster(1, 1, slices_per_step=SLICES, lease_s=0.6, grace_s=0.3) as cluster:
        first = cluster.start(Script(WAYS[name], dies))
        first.end(20.0)
        cluster.join([cluster.start(Script(WAYS[name]))])
        outcome = cluster.outcome()
    assert outcome.digests == quiet(name).digests
    assert outcome.summary["contributions_duplicate"] == 0


@pytest.mark.parametrize("replicas", [0, 1], ids=["back to a checkpoint", "a backup takes over"])
def test_servers_remember_which_tensors_were_used(replicas: int, tmp_path: Path) -> None:
    """Weight decay alone leaves no state that would tell it. Both workers begin anew with the servers."""
    script = Script(WAYS["zeros first"], build=decay)
    wanted = twin("leftover", script, slices_per_step=SLICES)
    strike = Strike("apply.mid", "server-1", 4)
    with Rig(tmp_path, 2, [strike], cluster__replicas=replicas, training__slices_per_step=SLICES) as rig:
        rig.begin(script)
        summary = rig.finish()
        assert rig.deaths == ["server-1"]
        assert (rig.rollbacks > 0) == (replicas == 0)
    same(summary, wanted)


# ---- what is refused


def third() -> tuple[Clear, Clear]:
    """Clears on every third batch."""
    count = 0

    def clear(optimizer: Any) -> None:
        nonlocal count
        count += 1
        if count % 3 == 0:
            optimizer.zero_grad()

    return never, clear


@pytest.mark.parametrize("way", [lambda: (never, never), third], ids=["never", "every third batch"])
def test_gradients_of_an_earlier_slice_are_refused(
    way: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = r"the gradient of 'first.weight' holds what an earlier step has left.*accumulate=k"
    with pytest.raises(errors.UserError, match=refusal):
        alone(Script(way()), tmp_path, monkeypatch)
    with pytest.raises(errors.UserError, match=refusal):
        train(Script(way()), 2, slices_per_step=SLICES)


def test_gradients_of_a_pass_outside_of_the_loop_are_refused() -> None:
    def script(ctx: Context) -> None:
        own = Rarely()
        loader: Any = DataLoader(DATA, batch_size=BATCH)
        _, optimizer, loader = ctx.prepare(own, momentum(own.parameters()), loader)
        own.loss(1, *DATA[:4]).backward()
        for batch in loader:
            own.loss(0, *batch).backward()
            optimizer.step()

    with pytest.raises(errors.UserError, match="holds what an earlier step has left"):
        train(script)


def test_casts_of_weights_are_not_kept_from_slice_to_slice() -> None:
    """Plain torch computes each batch with the casts of the first weights."""

    def script(cached: bool) -> Callable[[Context], None]:
        def run(ctx: Context) -> None:
            own = nn.Linear(4, 1, bias=False)
            fill(own)
            loader: Any = DataLoader(TensorDataset(X.float(), Y.float()), batch_size=BATCH)
            model, optimizer, loader = ctx.prepare(own, momentum(own.parameters()), loader)
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached):
                for x, y in loader:
                    (model(x).float() - y).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()

        return run

    with pytest.raises(errors.UserError, match=r"lies within torch.autocast.*around the forward pass only"):
        train(script(True))
    assert train(script(False)).summary["steps"] == SAMPLES // BATCH


def test_gradients_that_the_script_writes_itself_count() -> None:
    """Into tensors that it keeps, and without a backward pass that would add to them."""

    def script(kept: bool) -> Callable[[Context], None]:
        def run(ctx: Context) -> None:
            own = Rarely()
            loader: Any = DataLoader(DATA, batch_size=BATCH)
            _, optimizer, loader = ctx.prepare(own, momentum(own.parameters()), loader)
            for batch in loader:
                used = [*own.first.parameters(), *own.last.parameters()]
                found = torch.autograd.grad(own.loss(1, *batch), used)
                for parameter, gradient in zip(used, found, strict=True):
                    if kept and parameter.grad is not None:
                        parameter.grad.copy_(gradient)
                    else:
                        parameter.grad = gradient
                optimizer.step()

        return run

    assert train(script(True), slices_per_step=3).digests == train(script(False), slices_per_step=3).digests
