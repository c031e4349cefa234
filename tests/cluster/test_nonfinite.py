"""NaN and infinite gradients: skip the step, reject the contribution, or fail the run; and torch's GradScaler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from paramserver import errors
from paramserver.core.work.slices import DataSpec, slice_indices
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, Outcome, train
from tests.support.cluster.programs import Program, dataset, network, sgd

SAMPLES, BATCH, SLICES = 48, 4, 4  # 12 slices: 3 steps
SPEC = DataSpec(SAMPLES, BATCH)
# What the loss is multiplied by, so that a scale near the largest float overflows.
LARGE = 64.0


class Weight(nn.Module):
    """Its gradient is the mean of the batch, which may hold anything."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.other = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x[:, None]).sum(1) + self.other.sum()


def poisoned(bad: float, slices: tuple[int, ...] = (5,)) -> TensorDataset:
    """Ones, but for one number in each of these slices of epoch 0."""
    x = torch.ones(SAMPLES)
    for index in slices:
        x[slice_indices(SPEC, 0, 0, index)[1]] = bad
    return TensorDataset(x, torch.zeros(SAMPLES))


def program(data: Dataset[Any], epochs: int = 1) -> Program:
    def plain(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    return Program(data, BATCH, epochs, Weight, plain, loss=lambda output, _: output.mean())


def run(data: Dataset[Any], policy: str | None, mode: str = "sync", workers: int = 3, servers: int = 2) -> Outcome:
    settings = {"training__chunk_bytes": 64, **({"training__nonfinite": policy} if policy else {})}
    slices = SLICES if mode == "sync" else 0
    return train(program(data), workers, servers, settings, mode=mode, slices_per_step=slices)


BAD = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("policy", [None, "skip"])
def test_skip_leaves_the_step_out_on_every_shard(policy: str | None, bad: float) -> None:
    """The default. Also ``other``, whose gradient is finite and which may lie on another server, keeps its value."""
    outcome = run(poisoned(bad), policy)
    assert outcome.summary["steps"] == 3
    assert outcome.summary["steps_skipped"] == 1
    assert outcome.summary["contributions_applied"] == 12
    assert torch.equal(outcome.tensor("weight"), torch.full((3,), -2.0))
    assert torch.equal(outcome.tensor("other"), torch.full((2,), -2.0))


@pytest.mark.parametrize("bad", BAD)
def test_reject_leaves_the_slice_out(bad: float) -> None:
    """The mean is over the samples of the others; here they are all ones."""
    outcome = run(poisoned(bad), "reject")
    assert outcome.summary["steps_skipped"] == 0
    assert torch.equal(outcome.tensor("weight"), torch.full((3,), -3.0))
    assert torch.equal(outcome.tensor("other"), torch.full((2,), -3.0))


@pytest.mark.parametrize("policy", ["skip", "reject"])
def test_a_step_of_nothing_but_bad_slices(policy: str) -> None:
    outcome = run(poisoned(float("nan"), (4, 5, 6, 7)), policy)
    assert outcome.summary["steps"] == 3
    assert outcome.summary["steps_skipped"] == (1 if policy == "skip" else 0)
    assert torch.equal(outcome.tensor("weight"), torch.full((3,), -2.0))


@pytest.mark.parametrize("policy", ["skip", "reject"])
def test_asynchronous_a_bad_slice_changes_nothing(policy: str) -> None:
    outcome = run(poisoned(float("inf"), (0, 5)), policy, mode="async")
    assert outcome.summary["steps"] == 12
    assert outcome.summary["steps_skipped"] == (2 if policy == "skip" else 0)
    assert torch.equal(outcome.tensor("weight"), torch.full((3,), -10.0))
    assert torch.equal(outcome.tensor("other"), torch.full((2,), -10.0))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_fail_ends_the_worker_and_names_the_tensor(mode: str) -> None:
    with Cluster(2, 2, mode, slices_per_step=SLICES if mode == "sync" else 0) as cluster:
        script = program(poisoned(float("nan"), tuple(range(12))))
        workers = [cluster.start(script, {"training__nonfinite": "fail"}) for _ in range(2)]
        with pytest.raises(errors.NonFiniteError, match=r"the gradient of 'weight' is not finite \(.*slice.*fail ends"):
            cluster.join(workers)
        assert all(server.applied == 0 for server in cluster.stats())


def test_skipped_steps_do_not_depend_on_the_shape_of_the_cluster() -> None:
    data = poisoned(float("nan"), (2, 9))
    assert len({run(data, "skip", workers=w, servers=s).digests for w, s in ((1, 1), (2, 2), (5, 3))}) == 1
    assert len({run(data, "reject", workers=w, servers=s).digests for w, s in ((1, 1), (2, 2), (5, 3))}) == 1


def test_the_optimizer_state_does_not_see_a_skipped_step() -> None:
    """As without a cluster: momentum neither decays nor grows."""

    def build(data: Dataset[Any]) -> Program:
        return Program(data, BATCH, 1, Weight, sgd, loss=lambda output, _: output.mean())

    skipped = train(build(poisoned(float("inf"))), 2, 2, slices_per_step=SLICES)
    shorter = TensorDataset(torch.ones(32), torch.zeros(32))
    clean = train(build(shorter), 2, 2, slices_per_step=SLICES)
    assert clean.summary["steps"] == 2
    assert skipped.digests == clean.digests


class Halves(nn.Module):
    """A float16 parameter with the largest gradient there is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, dtype=torch.float16))


def test_half_precision_gradients_are_summed_in_float32() -> None:
    """I02: 65504 + 65504 is finite, and so is 4 samples times that."""

    def script(ctx: Context) -> None:
        model: Any = Halves()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=2.0**-16)
        loader: Any = DataLoader(TensorDataset(torch.ones(8)), batch_size=4)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        for _ in ctx.epochs(1):
            for _ in loader:
                (model.weight * torch.tensor(65504.0, dtype=torch.float16)).sum().backward()
                assert float(model.weight.grad[0]) == 65504.0
                optimizer.step()
                optimizer.zero_grad()

    outcome = train(script, 2, 1)
    assert outcome.summary["steps"] == 1
    assert torch.equal(outcome.tensor("weight"), torch.full((5,), -65504.0 / 2**16))


# ---- GradScaler


def scaled(ctx: Context, scaler: torch.amp.GradScaler, clip: bool = False) -> list[float]:
    """A mixed-precision loop as PyTorch's documentation has it; returns the scales."""
    model: Any = network()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1 / LARGE, momentum=0.9)
    loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    scales = []
    for _ in ctx.epochs(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y) * LARGE
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1 * LARGE)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
    return scales


def unscaled(ctx: Context, clip: bool = False) -> None:
    """The same without a scaler."""

    def each(_: Context, __: int) -> None:
        if clip:
            torch.nn.utils.clip_grad_norm_(held[0].parameters(), 0.1 * LARGE)

    held: list[nn.Module] = []

    def build() -> nn.Module:
        held.append(network())
        return held[0]

    def plain(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1 / LARGE, momentum=0.9)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) * LARGE

    Program(dataset(SAMPLES), BATCH, 2, build, plain, loss=loss, each=each)(ctx)


@pytest.mark.parametrize("clip", [False, True], ids=["", "unscale_ and clip"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_grad_scaler_without_overflow_changes_no_bit(mode: str, clip: bool) -> None:
    """The scale is a power of two, and contributions are unscaled before they are sent."""
    workers = 2 if mode == "sync" else 1
    made: list[float] = []

    def script(ctx: Context) -> None:
        made.extend(scaled(ctx, torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5), clip))

    outcome = train(script, workers, 2, mode=mode)
    plain = train(lambda ctx: unscaled(ctx, clip), workers, 2, mode=mode)
    assert max(made) > 2.0**10, "the scale has grown meanwhile"
    assert outcome.digests == plain.digests
    assert outcome.summary["steps_skipped"] == 0


def test_a_grad_scaler_with_overflow_skips_the_same_steps_as_without_a_cluster() -> None:
    scales: list[float] = []

    def script(ctx: Context) -> None:
        scales.extend(scaled(ctx, torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-3)))

    outcome = train(script, 1, 2)
    assert len(scales) == 24 == outcome.summary["steps"]
    skipped = sum(scale < before for before, scale in zip([2.0**127, *scales], scales, strict=False))
    assert 0 < skipped < 24
    assert outcome.summary["steps_skipped"] == skipped
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / LARGE, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-3)
    points = dataset(SAMPLES)
    for epoch in range(2):
        for index in range(SPEC.slices_per_epoch):
            x, y = points[slice_indices(SPEC, 0, epoch, index)]
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y) * LARGE).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(outcome.tensor(name), parameter.detach(), rtol=1e-5, atol=1e-6)
    assert scaler.get_scale() == scales[-1]


def test_overflow_in_one_worker_skips_the_step_for_all() -> None:
    """And nobody waits for a contribution that never comes."""

    def script(ctx: Context) -> None:
        scale = 2.0**127 if ctx.rank == 0 else 1.0
        scaled(ctx, torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000))

    outcome = train(script, 3, 2)
    assert outcome.summary["steps"] == 8
    assert 0 < outcome.summary["steps_skipped"] < 8
    assert outcome.summary["contributions_applied"] == 24
    assert all(bool(outcome.tensor(name).isfinite().all()) for name in ("0.weight", "2.bias"))
