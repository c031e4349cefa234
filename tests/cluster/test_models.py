"""Models, buffers, loops and optimizers of all kinds are trained as PyTorch users expect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from structlog.testing import capture_logs
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paramserver import errors
from paramserver.worker.context import Context
from tests.support.cluster.harness import Outcome, inside, train
from tests.support.cluster.programs import Program, adamw, dataset, minimise, network, plain, sgd

SAMPLES, BATCH = 40, 4
ONES = TensorDataset(torch.ones(SAMPLES, 1), torch.zeros(SAMPLES))


def test_a_data_set_smaller_than_a_slice_is_one_slice_with_a_warning() -> None:
    script = Program(dataset(3), 8, 2)
    with capture_logs() as logs:
        outcome = train(script, 2, 2)
    warnings = [entry["event"] for entry in logs if entry["log_level"] == "warning"]
    assert any("the data set has 3 samples, fewer than the batch size of 8" in warning for warning in warnings)
    assert (outcome.summary["steps"], outcome.summary["contributions_applied"]) == (2, 2)


class Counting(nn.Module):
    """Buffers of all kinds, which every forward changes."""

    calls: Tensor
    seen: Tensor
    flag: Tensor
    short: Tensor
    scratch: Tensor
    shared: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("flag", torch.tensor([False, True]))
        self.register_buffer("short", torch.zeros(2, dtype=torch.float16))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("shared", torch.zeros(2))
        self.inner = nn.Module()
        self.inner.register_buffer("same", self.shared)

    def forward(self, x: Tensor) -> Tensor:
        """Counts calls and samples."""
        self.calls += 1
        self.seen += float(x.sum())
        self.flag[0] = True
        self.short += 0.5
        self.scratch += 2.0
        self.shared.add_(1.0)
        return self.weight * x


def test_buffers_of_all_kinds(tmp_path: Path) -> None:
    """Each step adds the mean of what its slices added."""

    def script(ctx: Context) -> None:
        model = Counting()
        minimise(ctx, model, plain(model.parameters()), ONES)

    outcomes: list[Outcome] = [train(script, w, s, slices_per_step=4) for w, s in ((1, 1), (3, 2))]
    outcome = outcomes[1]
    assert outcomes[0].digests == outcome.digests
    assert outcome.summary["steps"] == 3
    assert outcome.tensor("calls").item() == 3.0
    assert outcome.tensor("seen").tolist() == [12.0] * 3
    assert outcome.tensor("flag").tolist() == [1.0, 1.0]
    assert outcome.tensor("short").tolist() == [1.5] * 2
    assert outcome.tensor("scratch").tolist() == [6.0] * 2
    assert outcome.tensor("shared").tolist() == [3.0] * 2
    outcome.result.save(tmp_path / "model.safetensors")
    model = Counting()
    found = load_file(tmp_path / "model.safetensors")
    assert set(found) == set(model.state_dict()), "non-persistent buffers are left out, shared ones have both names"
    model.load_state_dict(found)
    assert model.calls.item() == 3
    assert model.calls.dtype is torch.int64
    assert model.flag.tolist() == [True, True]
    assert model.short.dtype is torch.float16


def test_masks_with_infinities_keep_their_bits() -> None:
    """As attention masks have them: a buffer that nobody changes may hold anything."""

    class Masked(nn.Module):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.nan, -0.0]))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    def script(ctx: Context) -> None:
        model = Masked()
        minimise(ctx, model, plain(model.parameters()), ONES)
        seen.append(model.mask.numpy().tobytes())

    seen: list[bytes] = []
    outcome = train(script, 2, 2)
    expected = Masked().mask.numpy().tobytes()
    assert outcome.tensor("mask").numpy().tobytes() == expected
    assert seen == [expected] * 2
    assert outcome.tensor("weight").item() < 1.0


def test_buffers_reach_the_model_of_every_worker() -> None:
    """At the start of a slice they are those of its version."""
    seen: list[tuple[int, int]] = []

    def script(ctx: Context) -> None:
        model: Any = Counting()
        optimizer: Any = plain(model.parameters())
        loader: Any = DataLoader(ONES, batch_size=BATCH)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        for _ in ctx.epochs(2):
            for x, _ in loader:
                seen.append((ctx.version, int(model.calls)))
                model(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    train(script, 3, 2, slices_per_step=4)
    assert len(seen) >= 20  # an idle worker may compute a slice that another one has begun
    assert all(version == calls for version, calls in seen)


def test_bfloat16_parameters_have_float32_masters() -> None:
    """Changes far below the precision of bfloat16 add up."""

    def script(ctx: Context) -> None:
        model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(model.weight)
        held.append(model)
        data = TensorDataset(torch.ones(SAMPLES, 1, dtype=torch.bfloat16), torch.zeros(SAMPLES))
        minimise(ctx, model, plain(model.parameters(), 2.0**-12), data, epochs=8)

    held: list[nn.Linear] = []
    outcome = train(script, 1, 1)
    assert outcome.summary["steps"] == 80
    assert outcome.tensor("weight").dtype is torch.float32
    assert outcome.tensor("weight").item() == 1.0 - 80 * 2.0**-12
    assert held[0].weight.dtype is torch.bfloat16
    assert held[0].weight.item() == 0.98046875  # the nearest


def test_batches_without_a_step_count_as_slices_without_samples() -> None:
    """Nobody hangs; the mean of a step is over the samples of its other slices."""

    def script(ctx: Context) -> None:
        model: Any = nn.Linear(1, 1)
        nn.init.zeros_(model.weight)
        optimizer: Any = plain(model.parameters())
        loader: Any = DataLoader(ONES, batch_size=BATCH)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        for _ in ctx.epochs(2):
            for number, (x, _) in enumerate(loader):
                if number % 2:
                    continue
                model(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    with capture_logs() as logs:
        outcome = train(script, 1, 2, slices_per_step=2)
    assert outcome.tensor("weight").item() == -10.0
    assert outcome.summary["contributions_applied"] == 20
    assert sum("its slice counts without samples" in entry["event"] for entry in logs) == 1
    skipping = train(script, 3, 2, mode="async")
    assert skipping.summary["contributions_applied"] == 20


def test_leaving_a_loop_early() -> None:
    """The rest of the epoch goes to those who stay."""

    def script(ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        for _ in ctx.epochs(2):
            for x, y in loader:
                if ctx.rank == 1:
                    return
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()

    whole = Program(dataset(SAMPLES), BATCH, 2, shuffle=False)
    assert train(script, 2, 2, slices_per_step=4).digests == train(whole, 1, 1, slices_per_step=4).digests


def test_steps_outside_of_the_loop_are_refused() -> None:
    def work(ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        loader: Any = DataLoader(dataset(8), batch_size=BATCH)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        with pytest.raises(errors.UserError, match="before any iteration over the prepared loader"):
            optimizer.step()
        for _ in ctx.epochs(1):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                with pytest.raises(errors.UserError, match="once into each iteration"):
                    optimizer.step()
                optimizer.zero_grad()
        with pytest.raises(errors.UserError, match="once into each iteration"):
            optimizer.step()
        assert ctx.version == 2

    inside(work)


def test_without_a_loader_every_step_is_a_slice() -> None:
    """Data from elsewhere: as many steps as the script takes."""

    def script(ctx: Context) -> None:
        model: Any = network()
        model, optimizer = ctx.prepare(model, sgd(model.parameters()))
        x, y = dataset(16)[:]
        for _ in range(5):
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    outcome = train(script, 2, 2)
    assert outcome.summary["steps"] == 5
    model = network()
    reference = sgd(model.parameters())
    x, y = dataset(16)[:]
    for _ in range(5):
        reference.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        reference.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(outcome.tensor(name), parameter.detach(), rtol=1e-5, atol=1e-6)


# ---- the optimizer's interface


def test_closure_zero_grad_and_state_dict() -> None:
    def work(ctx: Context) -> None:
        model: Any = network()
        given = adamw(model.parameters())
        loader: Any = DataLoader(dataset(12), batch_size=BATCH)
        model, optimizer, loader = ctx.prepare(model, given, loader)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.param_groups is given.param_groups
        state = optimizer.state_dict()
        assert state["param_groups"][0]["lr"] == 0.01
        assert state["state"] == {}
        with pytest.raises(errors.ModelError, match="has 2 parameter groups, this optimizer has 1"):
            optimizer.load_state_dict({"param_groups": [{}, {}]})
        with pytest.raises(errors.ModelError, match="has to be named there"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for _ in ctx.epochs(1):
            for number, (x, y) in enumerate(loader):

                def closure() -> Any:
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(x), y)  # noqa: B023
                    loss.backward()  # type: ignore[no-untyped-call]
                    return loss

                returned: Any = optimizer.step(closure)
                assert float(returned.detach()) > 0
                assert ctx.version == number + 1
                optimizer.zero_grad()
                assert all(parameter.grad is None for parameter in model.parameters())
        assert all(not torch.equal(before[name], value) for name, value in model.state_dict().items())
        # A learning rate that is set by hand counts, and so does one that is loaded.
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = 0.0
        optimizer.load_state_dict(state)
        assert given.param_groups[0]["lr"] == 0.0

    inside(work)


def test_the_model_stays_itself() -> None:
    """Same class, same parameter objects, so that whatever holds on to them sees the training."""

    def work(ctx: Context) -> None:
        model = network()
        parameters = list(model.parameters())
        same, _ = ctx.prepare(model, sgd(model.parameters()))
        assert same is model
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        assert set(model.state_dict()) == {"0.weight", "0.bias", "2.weight", "2.bias"}

    inside(work)
