"""A sample that kills every process that reads it, under `run`: named, or skipped."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.support.integration.harness import Place, place_fixture, read_summary

SCRIPT = """
import os, signal, torch
from torch.utils.data import DataLoader, Dataset
import paramserver as ps

class Data(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if index == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((3,), float(index)), torch.ones(1)

ctx = ps.init()
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
model, optimizer, loader = ctx.prepare(model, optimizer, DataLoader(Data(), batch_size=4))
for epoch in ctx.epochs(1):
    for x, y in loader:
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
ctx.close()
"""
NAME = r"slice 3 of epoch 1 \((step \d+; )?samples 12, 13, 14, 15\)"


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_skip(place: Place, workers: int) -> None:
    script, summary, ckpt = place.work / "deadly.py", place.work / "summary.json", place.work / "ckpt"
    script.write_text(SCRIPT)
    flags = ("--servers", "1", "--workers", str(workers), "--checkpoint-dir", ckpt, "--summary", summary)
    done = place.paramserver("run", script, *flags, "--set", "training.poison=skip").check()
    found = read_summary(summary)
    assert found["samples"] == 36
    assert len(found["poisoned_slices"]) == 1
    assert re.fullmatch(NAME, found["poisoned_slices"][0])
    assert re.search(rf"everything promised is there: .*without samples that kill the workers .*: {NAME}", done.out)
    (epoch,) = json.loads(place.paramserver("ledger", "--json", ckpt).check().out)["epochs"]
    assert (epoch["once"], epoch["skipped"], epoch["never"]) == (36, 4, 0)


@pytest.mark.long
def test_fail(place: Place) -> None:
    script = place.work / "deadly.py"
    script.write_text(SCRIPT)
    done = place.paramserver("run", script, "--servers", "1", "--workers", "1").check(1)
    assert re.search(rf"error: the job has failed: each worker that computes {NAME} dies, worker-0 the last", done.err)
    assert place.leftovers() == []
