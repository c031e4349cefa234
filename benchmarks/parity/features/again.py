"""Rows about objects whose state travels in checkpoints: jobs that go back, and jobs that are resumed."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.parity.rows import PLAIN, Results, Row, Tensors
from benchmarks.parity.sides import Ours, Side
from benchmarks.parity.training import DATA, EPOCHS, adamw, flat
from paramserver.worker.context import Context
from tests.support.cluster.harness import until, wait
from tests.support.cluster.programs import Aligned
from tests.support.failover.rollback import Rig

# The version at which processes are lost, and the checkpoint before it.
LOST, SAVED = 11, 9


class Steps:
    """A count of versions, which the script keeps."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def registered(side: Side) -> Tensors:
    """A GradScaler whose scale grows, averaged weights, and a count."""
    model: Any = Aligned()
    optimizer: Any = adamw(model.parameters())
    model, optimizer, loader = side.prepare(model, optimizer, DATA)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    mean: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    steps = Steps()
    for name, thing in (("scaler", scaler), ("mean", mean), ("steps", steps)):
        side.register(name, thing)
    for _ in side.epochs(EPOCHS):
        for x, y in loader:
            scaler.scale(side.weighed(F.cross_entropy(model(x), y))).backward()  # type: ignore[no-untyped-call]
            if not side.due:
                continue
            scaler.step(optimizer)
            optimizer.zero_grad()
            if side.stepped():
                scaler.update()
                mean.update_parameters(model)
                steps.count += 1
            else:
                scaler.update(scaler.get_scale())
    of_scaler = {key: torch.tensor(value) for key, value in scaler.state_dict().items()}
    return {**flat(side.state()), **mean.state_dict(), **of_scaler, "steps": torch.tensor(steps.count)}


class Held(Ours):
    """A worker that waits at a version until it is told to go on."""

    def __init__(self, ctx: Context, reached: threading.Event, go: threading.Event) -> None:
        super().__init__(ctx)
        self._reached, self._go = reached, go

    def weighed(self, loss: Tensor) -> Tensor:
        if self.ctx.version == LOST and not self._go.is_set():
            self._reached.set()
            wait(self._go, "the word to go on", 60.0)
        return loss


def held(row: Row, workers: int, place: Path, then: Callable[[Rig], object]) -> Results:
    """A job that is held at a version while ``then`` happens, to the end of its workers."""
    reached, go = threading.Event(), threading.Event()
    results = Results(row, lambda ctx: Held(ctx, reached, go))
    with Rig(place, SAVED, servers=2, workers=workers, training__slices_per_step=row.slices) as rig:
        rig.begin(results)
        wait(reached, f"version {LOST}", 60.0)
        until("the checkpoint", lambda: [*place.glob(f"ckpt/step-{SAVED:08}-*/MANIFEST.json")])
        then(rig)
        go.set()
        if not rig.ending:
            rig.finish()
    return results


def goes_back(row: Row, workers: int) -> Tensors:
    """A server is killed, and the job goes back to a checkpoint in the middle of an epoch."""

    def kill(rig: Rig) -> None:
        rig.kill_now("server-1")
        until("the job went back", lambda: rig.rollbacks)

    with tempfile.TemporaryDirectory() as place:
        return held(row, workers, Path(place), kill).same()


def is_resumed(row: Row, workers: int) -> Tensors:
    """All servers end, and another job goes on from the checkpoint."""

    def end(rig: Rig) -> None:
        for server in list(rig.keepers):
            rig.call(server.die)
        rig.ending = True

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        held(row, workers, place, end)
        results = Results(row)
        options: dict[str, Any] = {"checkpoint__resume": str(place / "ckpt"), "training__slices_per_step": row.slices}
        with Rig(place, SAVED, servers=workers, workers=workers, **options) as rig:
            rig.begin(results)
            rig.finish()
        return results.same()


OBJECTS = "`ctx.register` of a GradScaler, an `AveragedModel`, a count"
ROWS = [
    Row(OBJECTS, PLAIN, registered),
    Row(f"{OBJECTS}: the job goes back", PLAIN, registered, job=goes_back),
    Row(f"{OBJECTS}: the job is resumed", PLAIN, registered, job=is_resumed),
]
