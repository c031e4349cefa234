"""Optimizer state that a script brings is taken over, and what it reads of the servers is what plain torch has."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, inside, train, until
from tests.support.cluster.programs import Aligned, Program, adamw, dataset
from tests.support.cluster.reference import slice_by_slice, slices_of_steps
from tests.support.failover.rollback import Rig, Strike, same, twin
from tests.support.optimizers import OPTIMIZERS, model_for

SAMPLES, BATCH = 40, 8
cross_entropy: Any = torch.nn.functional.cross_entropy


def begun(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that have made three steps by themselves."""
    model = model_for(name, dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    x, y = dataset(SAMPLES, dtype).tensors
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(model(x).float(), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def loop(ctx: Context, model: Any, optimizer: Any, loader: Any) -> None:
    for _ in ctx.epochs(2):
        for x, y in loader:
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def tensors(state: dict[str, Any]) -> dict[tuple[int, str], torch.Tensor]:
    return {(p, key): torch.as_tensor(v) for p, states in state["state"].items() for key, v in states.items()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["param_groups"] == expected["param_groups"]
    ours, theirs = tensors(found), tensors(expected)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype, key
        assert ours[key].shape == value.shape, key
        assert torch.equal(ours[key], value), key


@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_from_the_state_that_a_script_brings(name: str, servers: int) -> None:
    """Bit for bit as plain torch, and what is read at the end is what plain torch has then, in its format."""
    data = dataset(SAMPLES)
    saved: list[dict[str, Any]] = []

    def script(ctx: Context) -> None:
        model, plain = begun(name)
        model, optimizer, loader = ctx.prepare(model, plain, DataLoader(data, batch_size=BATCH, shuffle=True))
        saved.append(optimizer.state_dict())
        loop(ctx, model, optimizer, loader)
        saved.append(optimizer.state_dict())

    # Chunks of 64 elements.
    outcome = train(script, 1, servers, {"training__chunk_bytes": 256}, slices_per_step=1)
    model, plain = begun(name)
    assert_same(saved[0], plain.state_dict())
    slice_by_slice(model, plain, list(slices_of_steps(data, BATCH, 1, 2)), cross_entropy)
    for key, parameter in model.named_parameters():
        assert torch.equal(outcome.tensor(key), parameter.detach()), key
    assert_same(saved[1], plain.state_dict())
    another = OPTIMIZERS[name](model_for(name).parameters())
    another.load_state_dict(saved[1])
    assert_same(another.state_dict(), plain.state_dict())


class Scaled(nn.Module):
    """One of the parameters has no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Aligned(torch.float32)
        self.scale = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) * self.scale


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adafactor"])
def test_a_parameter_without_dimensions_has_state(name: str) -> None:
    """It is brought and read. torch's fused kernels round a single number in another way than many numbers."""
    data = dataset(SAMPLES)
    saved: list[dict[str, Any]] = []

    def script(ctx: Context) -> None:
        model: Any = Scaled()
        x, y = data.tensors
        plain = OPTIMIZERS[name](model.parameters())
        cross_entropy(model(x), y).backward()
        plain.step()
        plain.zero_grad()
        saved.append(copy.deepcopy(plain.state_dict()))
        model, optimizer, loader = ctx.prepare(model, plain, DataLoader(data, batch_size=BATCH))
        saved.append(optimizer.state_dict())
        loop(ctx, model, optimizer, loader)
        saved.append(optimizer.state_dict())

    train(script, 1, 2, {"training__chunk_bytes": 256}, slices_per_step=1)
    assert_same(saved[1], saved[0])
    assert [key for key, parameter in Scaled().named_parameters() if parameter.shape == ()] == ["scale"]
    found = {key: value for (number, key), value in tensors(saved[2]).items() if number == 0}
    assert all(value.shape == () for value in found.values()), found
    assert any(value != tensors(saved[0])[0, key] for key, value in found.items() if key != "step"), found


def test_with_several_workers_the_state_counts_as_the_weights_do() -> None:
    """Two workers and three servers; float32 masters of bfloat16 parameters have state in float32."""

    def script(ctx: Context) -> None:
        model, plain = begun("adamw", torch.bfloat16)
        before = copy.deepcopy(plain.state_dict())
        given = DataLoader(dataset(SAMPLES, torch.bfloat16), batch_size=BATCH)
        model, optimizer, loader = ctx.prepare(model, plain, given)
        after = optimizer.state_dict()
        for key, value in tensors(before).items():
            assert torch.equal(tensors(after)[key], value.float()), key
        loop(ctx, model, optimizer, loader)

    assert train(script, 2, 3).summary["steps"] == 6


@pytest.mark.parametrize("name", ["adamw", "asgd", "adafactor"])
def test_parameters_that_thaw_while_training_runs(name: str) -> None:
    """The optimizer has them from the beginning. They are frozen for an epoch, train for one, and are frozen again."""
    data = dataset(SAMPLES)

    def freeze(model: Any, epoch: int) -> None:
        model.first.requires_grad_(epoch == 1)
        for parameter in model.parameters():
            parameter.grad = None

    def script(ctx: Context) -> None:
        model: Any = model_for(name)
        freeze(model, 0)
        optimizer: Any = OPTIMIZERS[name](model.parameters())
        loader: Any = DataLoader(data, batch_size=BATCH, shuffle=True)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        for epoch in ctx.epochs(3):
            freeze(model, epoch)
            for x, y in loader:
                cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    outcome = train(script, 1, 2, {"training__chunk_bytes": 256}, slices_per_step=1)
    model = model_for(name)
    optimizer = OPTIMIZERS[name](model.parameters())
    steps = list(slices_of_steps(data, BATCH, 1, 3))
    for epoch in range(3):
        freeze(model, epoch)
        third = len(steps) // 3
        slice_by_slice(model, optimizer, steps[epoch * third : (epoch + 1) * third], cross_entropy)
    for key, parameter in model.named_parameters():
        assert torch.equal(outcome.tensor(key), parameter.detach()), key


def test_state_that_differs_between_workers_is_refused() -> None:
    def script(ctx: Context) -> None:
        model, plain = begun("sgd")
        if ctx.rank == 1:
            plain.state.clear()
        ctx.prepare(model, plain)

    with Cluster(2, 1) as cluster:
        workers = [cluster.start(script) for _ in range(2)]
        until("one of them is refused", lambda: any(worker.error is not None for worker in workers))
        (error,) = [worker.error for worker in workers if worker.error is not None]
        assert isinstance(error, errors.ModelError)
        assert "load the same optimizer state in every worker before ctx.prepare" in str(error)


def scaled(optimizer: torch.optim.Optimizer) -> None:
    for states in optimizer.state.values():
        states["exp_avg"] = states["exp_avg"][:1]


def poisoned(optimizer: torch.optim.Optimizer) -> None:
    next(iter(optimizer.state.values()))["exp_avg"].fill_(torch.nan)


def foreign(optimizer: torch.optim.Optimizer) -> None:
    next(iter(optimizer.state.values()))["shadow"] = torch.zeros(3)


def partial(optimizer: torch.optim.Optimizer) -> None:
    del next(iter(optimizer.state.values()))["exp_avg_sq"]


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (scaled, "has shape .* load the state of this model"),
        (poisoned, "has a NaN or an infinite number"),
        (foreign, "has 'shadow', which torch.optim.AdamW does not have"),
        (partial, "lacks 'exp_avg_sq'"),
    ],
)
def test_state_that_servers_cannot_go_on_from(spoil: Callable[[torch.optim.Optimizer], None], sentence: str) -> None:
    def work(ctx: Context) -> None:
        model, plain = begun("adamw")
        spoil(plain)
        with pytest.raises(errors.ModelError, match=sentence):
            ctx.prepare(model, plain)

    inside(work)


def test_one_worker_alone_reads_the_state_in_the_middle_of_a_step() -> None:
    """Nobody else takes part, no step is completed for it, and the version is that of the weights at hand."""
    together = threading.Barrier(2)
    found: list[dict[str, Any]] = []

    def script(ctx: Context) -> None:
        model: Any = Aligned()
        optimizer: Any = OPTIMIZERS["adam"](model.parameters())
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        for number, _ in enumerate(ctx.epochs(2)):
            for step, (x, y) in enumerate(loader):
                cross_entropy(model(x), y).backward()
                if number == 0 and step == 1:
                    if ctx.is_main:
                        found.append(optimizer.state_dict())
                        assert {float(s["step"]) for s in found[0]["state"].values()} == {ctx.version}
                    together.wait(20.0)
                optimizer.step()
                optimizer.zero_grad()

    assert train(script, 2, 2, slices_per_step=2).summary["steps"] == 6
    assert len(found) == 1


def test_asynchronous_state_can_be_read_while_others_train() -> None:
    def script(ctx: Context) -> None:
        model: Any = Aligned()
        optimizer: Any = OPTIMIZERS["adam"](model.parameters())
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=4)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        for _ in ctx.epochs(3):
            for x, y in loader:
                cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if ctx.is_main:
                    assert set(optimizer.state_dict()["state"]) == {0, 1, 2}

    assert train(script, 2, 2, mode="async").summary["steps"] == 30


def test_state_that_is_loaded_after_prepare_is_refused_unless_it_is_the_servers() -> None:
    def work(ctx: Context) -> None:
        model: Any = Aligned()
        plain = OPTIMIZERS["adamw"](model.parameters())
        _, other = begun("adamw")
        model, optimizer = ctx.prepare(model, plain)
        optimizer.load_state_dict(optimizer.state_dict())  # accelerate does this at once
        with pytest.raises(errors.ModelError, match=r"load it into the optimizer before ctx\.prepare"):
            optimizer.load_state_dict(other.state_dict())
        for use in (plain.step, plain.state_dict, lambda: plain.load_state_dict({})):
            with pytest.raises(errors.ModelError, match="use the one that it returned"):
                use()

    inside(work)


def halve_all(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


def test_hooks_that_the_script_has_registered_are_called() -> None:
    called: list[str] = []

    def work(ctx: Context) -> None:
        model: Any = Aligned()
        plain = OPTIMIZERS["sgd"](model.parameters())

        def halve(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            called.append("before")
            halve_all(model)

        plain.register_step_pre_hook(halve)
        handle = plain.register_step_post_hook(lambda *_: called.append("removed"))
        plain.register_step_post_hook(lambda *_: called.append("after"))
        plain.register_state_dict_pre_hook(lambda _: called.append("save"))
        plain.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1})
        plain.register_load_state_dict_pre_hook(lambda _, state: called.append("load"))
        plain.register_load_state_dict_post_hook(lambda _: called.append("loaded"))
        data: Any = DataLoader(dataset(BATCH), batch_size=BATCH)
        model, optimizer, loader = ctx.prepare(model, plain, data)
        handle.remove()
        for _ in ctx.epochs(1):
            for x, y in loader:
                cross_entropy(model(x), y).backward()
                optimizer.step()
        assert called == ["before", "after"]
        assert optimizer.state_dict()["mine"] == 1
        optimizer.load_state_dict(optimizer.state_dict())
        assert called[2:] == ["save", "save", "load", "save", "loaded"]
        expected = Aligned()
        steps = OPTIMIZERS["sgd"](expected.parameters())
        cross_entropy(expected(x), y).backward()
        halve_all(expected)
        steps.step()
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(ours, theirs)

    inside(work)


def with_state(parameters: Iterable[Any], **_: Any) -> torch.optim.Optimizer:
    """As after five steps."""
    optimizer = adamw(parameters)
    for group in optimizer.param_groups:
        for p in group["params"]:
            moments = {"exp_avg": torch.full_like(p, 0.1), "exp_avg_sq": torch.full_like(p, 0.2)}
            optimizer.state[p] = {"step": torch.tensor(5.0), **moments}
    return optimizer


@pytest.mark.parametrize(("moment", "step"), [("commit.before_log", 1), ("ckpt.mid_write", 0)])
def test_a_job_that_goes_back_to_version_0_has_the_state_that_was_brought(
    moment: str, step: int, tmp_path: Path
) -> None:
    """Version 0 is a checkpoint, or is uploaded once more; the bits are those of a run in which nobody dies."""
    program = Program(dataset(SAMPLES), BATCH, 1, Aligned, with_state)
    with Rig(tmp_path, 3, [Strike(moment, "server-1", step)]) as rig:
        rig.begin(program)
        summary = rig.finish()
        assert rig.rollbacks >= 1
    same(summary, twin("brought", program, slices_per_step=4))
    fresh = twin("not brought", Program(dataset(SAMPLES), BATCH, 1, Aligned, adamw), slices_per_step=4)
    assert fresh["weights_sha256"] != summary["weights_sha256"]
