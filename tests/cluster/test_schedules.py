"""A learning-rate schedule follows the progress through the data, whatever happens to the mode on the way."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR
from torch.utils.data import DataLoader

from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, until, wait
from tests.support.cluster.programs import dataset, network, sgd
from tests.support.failover.rollback import Rig

# 24 slices, 8 steps an epoch.
SAMPLES, BATCH, SLICES, EPOCHS = 96, 4, 3, 4


def made(kind: str, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    if kind == "cycle":
        return OneCycleLR(optimizer, 0.2, total_steps=steps)
    return CosineAnnealingLR(optimizer, T_max=steps)


class Annealed:
    """Trains with a schedule over all epochs; notes the learning rate of each slice, and the last one, by worker."""

    def __init__(self, kind: str = "cycle", hold: dict[int, threading.Event] | None = None) -> None:
        """``hold``: where workers wait, by how many slices all of them have begun."""
        self.kind, self.hold = kind, hold or {}
        self.begun, self.steps = 0, 0
        self.rates: list[float] = []
        self.last: dict[int, float] = {}
        self.lengths: set[int] = set()
        self._lock = threading.Lock()
        self.reached = {number: threading.Event() for number in self.hold}

    def __call__(self, ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        loader: Any = ctx.prepare(DataLoader(dataset(SAMPLES), batch_size=BATCH, shuffle=True))
        self.lengths.add(len(loader))
        self.steps = EPOCHS * len(loader)
        schedule: Any = made(self.kind, optimizer, self.steps)
        model, optimizer, schedule = ctx.prepare(model, optimizer, schedule)
        for _ in ctx.epochs(EPOCHS):
            for x, y in loader:
                self.rates.append(optimizer.param_groups[0]["lr"])
                self.pause()
                loss: Any = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            self.lengths.add(len(loader))
        self.last[ctx.rank] = optimizer.param_groups[0]["lr"]

    def pause(self) -> None:
        with self._lock:
            number, self.begun = self.begun, self.begun + 1
        for held in sorted(self.hold):
            if number >= held:
                self.reached[held].set()
                wait(self.hold[held], "the word to go on", 60.0)

    def at(self, number: int) -> None:
        """Wait until so many slices have begun."""
        wait(self.reached[number], f"slice {number}", 60.0)

    def go(self, number: int) -> None:
        """Let the workers go on from there."""
        self.hold[number].set()


def annealed(script: Annealed, steps: int) -> None:
    """It went all the way of plain torch's schedule of so many steps, and its length never changed."""
    assert script.lengths == {steps // EPOCHS}
    optimizer = sgd(network().parameters())
    plain, wanted = made(script.kind, optimizer, steps), []
    for _ in range(steps):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        plain.step()
    wanted.append(optimizer.param_groups[0]["lr"])
    assert script.last
    assert set(script.last.values()) == {wanted[steps]}, "all workers are at its end"
    assert set(script.rates) <= set(wanted[:steps])
    assert script.rates[0] == wanted[0]
    # A synchronous step in a job that began asynchronous takes several slices at the rate of the first.
    assert set(wanted[steps - SLICES : steps]) & set(script.rates[-4:]), "the last slices were trained with its end"


def change(cluster: Cluster, script: Annealed, number: int, mode: str) -> None:
    """Ask for a mode while the workers stand at slice ``number``."""
    script.at(number)
    asked = threading.Thread(target=cluster.set_consistency, args=(mode, 2), daemon=True)
    asked.start()
    if mode == "async":
        until("the change is scheduled", lambda: all(server.HasField("scheduled") for server in cluster.stats()))
    else:
        table = cluster.job.coordinator.job.leasing.table
        until("the leasing pauses", lambda: table is not None and table.paused)
    script.go(number)
    asked.join(60.0)
    assert not asked.is_alive()
    assert cluster.status().view.consistency.mode == (2 if mode == "async" else 1)


CHANGES = {
    "to async": ("sync", [(30, "async")]),
    "to sync": ("async", [(30, "sync")]),
    "to async and back": ("sync", [(20, "async"), (50, "sync")]),
    "to sync and back, and again": ("async", [(20, "sync"), (45, "async"), (70, "sync")]),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("to async", "cycle"),
        ("to sync", "cosine"),
        ("to sync and back, and again", "cycle"),
        *(
            pytest.param(name, kind, marks=pytest.mark.long)
            for name, kind in (
                ("to async", "cosine"),
                ("to sync", "cycle"),
                ("to async and back", "cycle"),
                ("to async and back", "cosine"),
                ("to sync and back, and again", "cosine"),
            )
        ),
    ],
)
def test_the_mode_changes(name: str, kind: str) -> None:
    began, changes = CHANGES[name]
    script = Annealed(kind, {number: threading.Event() for number, _ in changes})
    with Cluster(2, 2, began, 2, slices_per_step=SLICES) as cluster:
        workers = [cluster.start(script) for _ in range(2)]
        for number, mode in changes:
            change(cluster, script, number, mode)
        cluster.join(workers)
        outcome = cluster.outcome()
    assert outcome.summary["contributions_applied"] == 24 * EPOCHS
    assert outcome.summary["mode"] == changes[-1][1]
    annealed(script, EPOCHS * (8 if began == "sync" else 24))


# ---- together with going back


@pytest.mark.parametrize("began", ["sync", pytest.param("async", marks=pytest.mark.long)])
def test_the_mode_changes_and_the_job_goes_back(began: str, tmp_path: Path) -> None:
    """A server dies after the change, and the job goes back to before it; then the change is made once more."""
    other = "async" if began == "sync" else "sync"
    script = Annealed("cycle", {24: threading.Event(), 60: threading.Event()})
    with Rig(tmp_path, 4 if began == "sync" else 12, mode=began, slices_per_step=SLICES) as rig:
        rig.begin(script)
        script.at(24)
        asked = threading.Thread(target=rig.change_mode, args=(other,), daemon=True)
        asked.start()
        script.go(24)
        script.at(60)
        asked.join(60.0)
        assert not asked.is_alive()
        rig.goes_back()
        script.go(60)
        summary = rig.finish()
        assert rig.rollbacks == 1
    assert summary["contributions_applied"] == 24 * EPOCHS
    assert summary["mode"] == other
    annealed(script, EPOCHS * (8 if began == "sync" else 24))
