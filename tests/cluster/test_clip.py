"""Clipping by the global norm acts on the combined gradient of the step, over all slices and all servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from structlog.testing import capture_logs
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.core.work.slices import DataSpec, SyncSchedule, slice_indices
from paramserver.worker.context import Context
from tests.support.cluster.harness import train
from tests.support.cluster.programs import Program, adamw, dataset, network, sgd

SLICES, BATCH, SAMPLES, EPOCHS = 4, 8, 100, 3
# Some steps have a larger norm, others a smaller one; the first test counts them.
LIMIT = 0.8


def clipping(limit: float) -> Program:
    data = dataset(SAMPLES, torch.float64)
    return Program(
        data, BATCH, EPOCHS, lambda: network(dtype=torch.float64), sgd, each=lambda ctx, _: ctx.clip_grad_norm(limit)
    )


def test_equals_clipping_the_whole_batch_in_one_process() -> None:
    outcome = train(clipping(LIMIT), 3, 2, settings={"training__chunk_bytes": 256}, slices_per_step=SLICES)

    data, spec = dataset(SAMPLES, torch.float64), DataSpec(SAMPLES, BATCH)
    schedule = SyncSchedule(spec.slices_per_epoch, SLICES)
    model = network(dtype=torch.float64)
    optimizer = sgd(model.parameters())
    clipped = 0
    for version in range(EPOCHS * schedule.steps_per_epoch):
        step = schedule.step(version)
        indices = [i for index in step.slices for i in slice_indices(spec, 0, step.epoch, index)]
        x, y = data[indices]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        clipped += float(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)) > LIMIT
        optimizer.step()
    assert 0 < clipped < EPOCHS * schedule.steps_per_epoch, "the limit decides nothing"
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(outcome.tensor(name), parameter.detach(), rtol=1e-6, atol=1e-9)


# The norm does not depend on the optimizer.
@pytest.mark.parametrize("optimizer", [pytest.param(sgd, marks=pytest.mark.long), adamw])
def test_the_norm_has_the_same_bits_on_any_number_of_servers(optimizer: object) -> None:
    assert callable(optimizer)
    script = Program(
        dataset(203), BATCH, 2, lambda: network(norm=True), optimizer, each=lambda ctx, _: ctx.clip_grad_norm(0.3)
    )
    settings = {"training__chunk_bytes": 256}
    digests = {
        train(script, workers, servers, settings=settings, slices_per_step=SLICES).digests
        for workers, servers in ((1, 1), (2, 2), (3, 4), (2, 9))
    }
    assert len(digests) == 1
    without = Program(dataset(203), BATCH, 2, lambda: network(norm=True), optimizer)
    assert train(without, settings=settings, slices_per_step=SLICES).digests not in digests


def test_asynchronous_workers_clip_their_own_slice() -> None:
    """With one worker every slice is a step of plain training with clipping."""
    outcome = train(clipping(LIMIT), mode="async")
    data, spec = dataset(SAMPLES, torch.float64), DataSpec(SAMPLES, BATCH)
    model = network(dtype=torch.float64)
    optimizer = sgd(model.parameters())
    for epoch in range(EPOCHS):
        for index in range(spec.slices_per_epoch):
            x, y = data[slice_indices(spec, 0, epoch, index)]
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(outcome.tensor(name), parameter.detach(), rtol=1e-6, atol=1e-9)


def test_a_limit_that_is_none_is_refused() -> None:
    def script(ctx: Context) -> None:
        for limit in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(errors.UserError, match="max_norm"):
                ctx.clip_grad_norm(limit)
        clipping(LIMIT)(ctx)

    assert train(script).summary["steps"] > 0


def clips_with(clip: Callable[[Any], object]) -> Callable[[Context], None]:
    """A script that clips itself. Each worker has another model that is not prepared."""

    def script(ctx: Context) -> None:
        other: Any = network()
        F.cross_entropy(other(dataset(8)[:8][0]), dataset(8)[:8][1]).backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(other.parameters(), 1.0)
        model: Any = network()
        model, optimizer, loader = ctx.prepare(model, sgd(model.parameters()), DataLoader(dataset(SAMPLES), BATCH))
        clip_grad_norm_(other.parameters(), 1.0)
        for x, y in loader:
            loss: Any = F.cross_entropy(model(x), y)
            loss.backward()
            clip(model)
            optimizer.step()
            optimizer.zero_grad()

    return script


def by_norm(model: Any) -> object:
    return clip_grad_norm_(model.parameters(), 0.1)


def by_norm_of_torch(model: Any) -> object:
    return torch.nn.utils.clip_grad_norm_(parameters=list(model.parameters()), max_norm=0.1)


def by_value(model: Any) -> object:
    return torch.nn.utils.clip_grad_value_(next(model.parameters()), 0.1)


def nothing(model: Any) -> object:
    return None


SLICE = "clips the gradient of one slice, and a step has"


@pytest.mark.parametrize(
    ("clip", "slices", "said"),
    [
        (by_norm, 2, "torch's clip_grad_norm_"),
        (by_norm_of_torch, 2, "torch's clip_grad_norm_"),
        (by_value, 2, "torch's clip_grad_value_"),
        (by_norm, 1, ""),
        (nothing, 2, ""),
    ],
)
def test_clipping_of_a_slice_with_a_function_of_torch_is_said_once(
    clip: Callable[[Any], object], slices: int, said: str
) -> None:
    before = torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_, clip_grad_norm_
    with capture_logs() as logs:
        train(clips_with(clip), workers=slices, slices_per_step=slices)
    assert [one["event"].partition(f" {SLICE}")[0] for one in logs if SLICE in one["event"]] == ([said] if said else [])
    assert (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_, clip_grad_norm_) == before
