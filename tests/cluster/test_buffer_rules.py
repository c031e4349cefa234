"""Buffers of which the mean over slices makes no sense: the script says how their changes count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from structlog.testing import capture_logs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paramserver import errors
from paramserver.worker.context import Context
from paramserver.worker.script.binding import ModelBinding
from tests.support.cluster.harness import train

SAMPLES, BATCH, SLICES, PLACES = 36, 4, 3, 8
RULES = {"queue*": "first", "seen": "sum"}


class Queued(nn.Module):
    """Keeps keys of former batches in a queue, as MoCo does, and counts samples."""

    queue: torch.Tensor
    queue_end: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        nn.init.constant_(self.layer.weight, 0.5)
        nn.init.constant_(self.layer.bias, 0.25)
        self.register_buffer("queue", torch.zeros(PLACES))
        self.register_buffer("queue_end", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) + 0.125 * self.queue.mean()
        with torch.no_grad():
            end = int(self.queue_end)
            self.queue[end : end + BATCH] = x[:, 0]
            self.queue_end.fill_((end + BATCH) % PLACES)
            self.seen += len(x)
        return out


def samples() -> TensorDataset:
    x = torch.arange(SAMPLES, dtype=torch.float32)[:, None] + 1
    return TensorDataset(x, x / SAMPLES)


def prepared(ctx: Context, rules: Mapping[str, str] | None) -> Any:
    model: Any = Queued()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return ctx.prepare(model, optimizer, DataLoader(samples(), BATCH), buffers=rules)


def steps(ctx: Context) -> None:
    model, optimizer, loader = prepared(ctx, RULES)
    for x, y in loader:
        F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def draws(ctx: Context) -> None:
    """Without a loader."""
    x, y = samples().tensors
    model: Any = Queued()
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4), buffers=RULES)
    while ctx.version < 4:
        rows = torch.randint(SAMPLES, (BATCH,), generator=torch.Generator().manual_seed(ctx.slice_seed()))
        F.mse_loss(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def test_a_queue_is_that_of_slice_0_and_a_count_is_of_all_slices() -> None:
    outcome = train(steps, workers=2, slices_per_step=SLICES)

    # Steps 0, 1 and 2 begin with the batches 0, 3 and 6, and slice 0 has the first of them, as rank 0 of DDP has. The
    # queue has two places for batches. Whole numbers as small as these are exact.
    batches = [torch.arange(BATCH * n, BATCH * (n + 1)) + 1.0 for n in range(SAMPLES // BATCH)]
    assert outcome.tensor("queue").equal(torch.cat([batches[6], batches[3]]))
    assert outcome.tensor("queue_end").item() == BATCH
    assert outcome.tensor("seen").item() == SAMPLES


@pytest.mark.parametrize("script", [steps, draws])
def test_the_bits_do_not_depend_on_the_number_of_workers_or_servers(script: Callable[[Context], None]) -> None:
    settings = {"training__chunk_bytes": 64}
    digests = {
        train(script, workers, servers, settings=settings, slices_per_step=SLICES).digests
        for workers, servers in ((1, 1), (2, 2), (3, 1))
    }
    assert len(digests) == 1


def test_a_device_gathers_the_same_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = train(steps, workers=2, slices_per_step=SLICES).digests
    monkeypatch.setattr(ModelBinding, "gather_buffers", lambda self, *parts: self._gather_buffers(*parts))
    assert train(steps, workers=2, slices_per_step=SLICES).digests == wanted


def test_in_asynchronous_mode_the_changes_of_all_slices_are_added_and_a_pointer_is_warned_of() -> None:
    with capture_logs() as logs:
        outcome = train(steps, mode="async")
    assert outcome.tensor("seen").item() == SAMPLES
    assert [one for one in logs if "a pointer that begins anew" in one["event"]]


@pytest.mark.parametrize(
    ("rules", "kind", "words"),
    [
        ({"queue": "last"}, errors.UserError, r"takes a rule \(mean, first, sum\) for each pattern"),
        (["queue"], errors.UserError, "takes a rule"),
        ({"quack*": "first"}, errors.ModelError, "no buffer like 'quack\\*'; it has queue, queue_end, seen"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(rules: Any, kind: type[Exception], words: str) -> None:
    def script(ctx: Context) -> None:
        prepared(ctx, rules)

    with pytest.raises(kind, match=words):
        train(script)
