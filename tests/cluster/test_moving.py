"""What scripts that are moved here do beside training: they leave batches out, look at options, and change groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from structlog.testing import capture_logs
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.tensors.dtypes import in_model_type, real_of
from paramserver.worker.again import check_after
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, Outcome, inside, train
from tests.support.cluster.programs import FEATURES, Aligned, adamw, dataset, sgd
from tests.support.cluster.reference import slice_by_slice, slices_of_steps

SAMPLES, BATCH, EPOCHS = 48, 8, 2
DATA = dataset(SAMPLES)
cross_entropy: Any = F.cross_entropy


# ---- batches that are left out


def leaves_out(ctx: Context) -> None:
    """Clears gradients before the backward pass only, so those of the batch before are still there."""
    model: Any = Aligned()
    optimizer: Any = adamw(model.parameters())
    loader: Any = DataLoader(DATA, batch_size=BATCH)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    for _ in ctx.epochs(EPOCHS):
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            if left_out(x):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def left_out(x: Tensor) -> bool:
    return any(torch.equal(x[0], DATA[at][0]) for at in (8, 40))


@pytest.mark.parametrize("slices", [1, 2])
def test_a_batch_may_be_left_out_while_gradients_of_the_one_before_are_there(slices: int) -> None:
    with capture_logs() as logs:
        outcomes = [train(leaves_out, w, s, slices_per_step=slices) for w, s in ((1, 1), (2, 2))]
    assert outcomes[0].digests == outcomes[1].digests
    assert sum("its slice counts without samples" in entry["event"] for entry in logs) >= 1
    if slices == 1:
        model = Aligned()
        batches = [(x, y) for _ in range(EPOCHS) for x, y in DataLoader(DATA, batch_size=BATCH)]
        steps = [[(x, y)] for x, y in batches if not left_out(x)]
        slice_by_slice(model, adamw(model.parameters(), fused=True), steps, cross_entropy)
        for name, parameter in model.named_parameters():
            assert torch.equal(outcomes[1].tensor(name), parameter.detach()), name


@pytest.mark.parametrize("clears", [True, False])
def test_gradients_of_the_batch_that_is_left_out_are_refused(clears: bool) -> None:
    """Also where they lie in the memory of those that were cleared."""

    def script(ctx: Context) -> None:
        model: Any = Aligned()
        optimizer: Any = sgd(model.parameters())
        loader: Any = DataLoader(DATA, batch_size=BATCH)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        for number, (x, y) in enumerate(loader):
            if clears:
                optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            if number == 1:
                continue
            optimizer.step()

    with pytest.raises(errors.UserError, match="has gradients of the present one"):
        inside(script)


# ---- what scripts look at, and what they change


def begun(ctx: Context, model: Any, optimizer: Any, **options: Any) -> tuple[Any, Any, Any]:
    """Model, optimizer and loader after one epoch."""
    loader: Any = DataLoader(DATA, batch_size=BATCH, **options)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    train_epoch(model, optimizer, loader)
    return model, optimizer, loader


def train_epoch(model: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


def together(samples: Any) -> Any:
    return torch.utils.data.default_collate(samples)


def test_the_prepared_loader_has_the_options_of_the_scripts() -> None:
    def script(ctx: Context) -> None:
        model = Aligned()
        given = DataLoader(DATA, batch_size=BATCH, drop_last=True, collate_fn=together)
        _, _, loader = ctx.prepare(model, adamw(model.parameters()), given)
        names = ("num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "generator")
        for name in (*names, "prefetch_factor", "persistent_workers", "multiprocessing_context"):
            assert getattr(loader, name) is getattr(given, name), name
        again = DataLoader(loader.dataset, loader.batch_size, collate_fn=loader.collate_fn, drop_last=loader.drop_last)
        assert len(again) == SAMPLES // BATCH
        assert not hasattr(loader, "state_dict")

    inside(script)


def test_optimizer_state_is_read_from_the_servers() -> None:
    """The same as in state_dict(), and None or nothing where there is none."""

    def script(ctx: Context) -> None:
        model: Any = Aligned()
        model, optimizer, _ = begun(ctx, model, adamw(model.parameters()))
        saved = optimizer.state_dict()["state"]
        assert len(optimizer.state) == len(saved) == 3
        for number, parameter in enumerate(model.parameters()):
            assert parameter in optimizer.state
            for key, value in saved[number].items():
                assert torch.equal(optimizer.state[parameter][key], value)
        foreign = torch.zeros(1)
        assert optimizer.state[foreign] == {}
        assert optimizer.state.get(foreign) is None
        assert set(optimizer.state) == set(model.parameters())

    inside(script)


def replaces_the_state(model: Any, optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def clears_the_state(model: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def sets_a_state(model: Any, optimizer: Any) -> None:
    optimizer.state[model.second.weight] = {}


def removes_a_group(model: Any, optimizer: Any) -> None:
    del optimizer.param_groups[0]


def appends_a_group(model: Any, optimizer: Any) -> None:
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [nn.Parameter(torch.zeros(1))]})


def replaces_the_parameters_of_a_group(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:1]


def replaces_the_groups(model: Any, optimizer: Any) -> None:
    optimizer.param_groups = [dict(group, lr=0.5) for group in optimizer.param_groups]


def takes_a_parameter_out_of_a_group(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].pop()


STATE = "changes optimizer.state, which is a copy of the servers' state"
GROUPS = "optimizer.param_groups has other groups or other parameters than at ctx.prepare"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (replaces_the_state, STATE),
        (clears_the_state, STATE),
        (sets_a_state, STATE),
        (removes_a_group, GROUPS),
        (appends_a_group, GROUPS),
        (replaces_the_parameters_of_a_group, GROUPS),
        (takes_a_parameter_out_of_a_group, GROUPS),
        (replaces_the_groups, "the script has replaced optimizer.param_groups"),
    ],
)
def test_changes_that_servers_would_not_see_are_refused(change: Callable[[Any, Any], None], sentence: str) -> None:
    def script(ctx: Context) -> None:
        model: Any = Aligned()
        groups = [{"params": list(model.first.parameters())}, {"params": list(model.second.parameters())}]
        model, optimizer, loader = begun(ctx, model, adamw(groups))
        change(model, optimizer)
        train_epoch(model, optimizer, loader)

    with pytest.raises(errors.ModelError, match=sentence):
        inside(script)


# ---- complex buffers


class Rotary(nn.Module):
    """Turns pairs of numbers, as rotary embeddings do, and counts in a complex buffer, too."""

    turns: Tensor
    count: Tensor

    def __init__(self, persistent: bool = True, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.inner = Aligned()
        self.odd = nn.Parameter(torch.ones(1))  # what follows it lies at an odd place
        angles = torch.arange(float(FEATURES // 2))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles).to(dtype), persistent=persistent)
        self.register_buffer("count", torch.zeros((), dtype=dtype))

    def forward(self, x: Tensor) -> Any:
        """Scores of the classes."""
        self.count += 1 + 2j
        turned = torch.view_as_complex(x.view(len(x), -1, 2)) * self.turns
        return self.inner(torch.view_as_real(turned).flatten(-2).to(x.dtype) * self.odd)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("persistent", [True, False])
def test_complex_buffers(persistent: bool, dtype: torch.dtype) -> None:
    """They are those of plain torch, for any number of workers, also in state dicts."""
    held: list[Rotary] = []
    saved: list[dict[str, Any]] = []

    def script(ctx: Context) -> None:
        model = Rotary(persistent, dtype)
        begun(ctx, model, adamw(model.parameters()))
        held.append(model)
        saved.append(ctx.state_dict()["model"])

    outcomes: list[Outcome] = [train(script, w, s, slices_per_step=2) for w, s in ((1, 1), (2, 2))]
    assert outcomes[0].digests == outcomes[1].digests
    assert outcomes[1].tensor("count").tolist() == [3.0, 6.0]
    for model, state in zip(held, saved, strict=True):
        assert torch.equal(model.turns, Rotary(dtype=dtype).turns)
        assert model.count.item() == 3 + 6j
        assert ("turns" in state) is persistent
        fresh = Rotary(persistent, dtype)
        fresh.load_state_dict(state)
        assert fresh.count.item() == 3 + 6j


def test_complex_buffers_are_loaded() -> None:
    def script(ctx: Context) -> None:
        model = Rotary()
        loader: Any = DataLoader(DATA, batch_size=BATCH)
        prepared, _, _ = ctx.prepare(model, adamw(model.parameters()), loader)
        state = {name: value.clone() for name, value in prepared.state_dict().items()}
        state["count"] = torch.tensor(5 - 1j)
        ctx.load(model=state)
        assert prepared.count.item() == 5 - 1j

    inside(script)


def test_real_numbers_of_complex_tensors() -> None:
    pairs = torch.arange(7.0)[1:].view(3, 2)
    value = in_model_type(pairs, torch.complex64)
    assert value.tolist() == [1 + 2j, 3 + 4j, 5 + 6j]
    assert torch.equal(real_of(value), pairs)
    assert torch.equal(real_of(value.conj()), pairs * torch.tensor([1.0, -1.0]))
    assert real_of(pairs) is pairs


# ---- several steps on a batch


def steps_twice(ctx: Context, **options: Any) -> None:
    """Two steps on each batch."""
    model: Any = Aligned()
    optimizer: Any = adamw(model.parameters())
    model, optimizer, loader = ctx.prepare(model, optimizer, DataLoader(DATA, batch_size=BATCH), **options)
    for x, y in loader:
        for _ in range(2):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()


def test_one_model_steps_twice_on_each_batch() -> None:
    """As the sentence says that refuses it without turns."""
    with pytest.raises(errors.UserError, match=r"to step several times on a batch, say how often .*turns=2"):
        inside(steps_twice)
    outcome = train(lambda ctx: steps_twice(ctx, name="model", turns=2), 2, 2, slices_per_step=1)
    model = Aligned()
    steps = [[(x, y)] for x, y in DataLoader(DATA, batch_size=BATCH) for _ in range(2)]
    slice_by_slice(model, adamw(model.parameters(), fused=True), steps, cross_entropy)
    for name, parameter in model.named_parameters():
        assert torch.equal(outcome.tensor(f"model.{name}"), parameter.detach()), name


# ---- losses over a batch


def contrasts(model: Any, x: Tensor, y: Tensor) -> None:
    one, other = (F.normalize(model(scale * x)) for scale in (1.0, 1.1))
    cross_entropy(one @ other.T / 0.1, torch.arange(len(x))).backward()


def test_negatives_of_a_contrastive_loss_come_from_the_slice() -> None:
    def script(ctx: Context) -> None:
        model: Any = Aligned()
        optimizer: Any = adamw(model.parameters())
        model, optimizer, loader = ctx.prepare(model, optimizer, DataLoader(DATA, batch_size=BATCH, shuffle=True))
        for _ in ctx.epochs(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                contrasts(model, x, y)
                optimizer.step()

    outcome = train(script, 2, 2, slices_per_step=2)
    model = Aligned()
    steps = slices_of_steps(DATA, BATCH, 2, EPOCHS)
    slice_by_slice(model, adamw(model.parameters(), fused=True), steps, cross_entropy, backward=contrasts)
    for name, parameter in model.named_parameters():
        assert torch.equal(outcome.tensor(name), parameter.detach()), name


# ---- a schedule by step, and another one by epoch


class WarmsUp:
    """The rate rises with each step of the first epoch, and falls after each later one. ``rates``: of each batch."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def schedulers(self, optimizer: Any) -> tuple[Any, Any]:
        return LinearLR(optimizer, 0.1, 1.0, 4), CosineAnnealingLR(optimizer, 3)

    def loop(self, model: Any, optimizer: Any, loader: Any, by_step: Any, by_epoch: Any, epochs: Any) -> None:
        for epoch in epochs:
            for x, y in loader:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                self.rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                if epoch == 0:
                    by_step.step()
            if epoch > 0:
                by_epoch.step()

    def __call__(self, ctx: Context) -> None:
        model: Any = Aligned()
        optimizer: Any = adamw(model.parameters())
        schedulers = self.schedulers(optimizer)
        loader: Any = DataLoader(DATA, batch_size=BATCH)
        model, optimizer, loader, by_step, by_epoch = ctx.prepare(model, optimizer, loader, *schedulers)
        self.loop(model, optimizer, loader, by_step, by_epoch, ctx.epochs(3))


def test_a_scheduler_by_step_and_another_one_by_epoch() -> None:
    scripts = [WarmsUp(), WarmsUp()]
    outcomes = [train(one, w, w, slices_per_step=1) for w, one in zip((1, 2), scripts, strict=True)]
    assert outcomes[0].digests == outcomes[1].digests
    model, twin = Aligned(), WarmsUp()
    optimizer = adamw(model.parameters(), fused=True)
    twin.loop(model, optimizer, DataLoader(DATA, batch_size=BATCH), *twin.schedulers(optimizer), range(3))
    assert scripts[0].rates == twin.rates
    for name, parameter in model.named_parameters():
        assert torch.equal(outcomes[0].tensor(name), parameter.detach()), name


# ---- one training after another


def test_a_process_that_has_left_a_job_is_refused_if_it_joins_it_again() -> None:
    """Its second training would be handed the weights of the first one. Another job takes it."""
    with Cluster(2) as cluster:
        ctx = cluster.context(0)
        ctx.close()
        with pytest.raises(errors.UserError, match=r"called again after ctx\.close\(\): a job is one training"):
            check_after([ctx], cluster.job.worker(1))
    with Cluster() as other:
        engine = other.job.worker(0)
        check_after([ctx], engine)
        engine.close()
