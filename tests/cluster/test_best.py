"""``checkpoint.best_metric``: the checkpoints with the best values of a name in ``ctx.log`` stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.checkpoint import best, catalog
from paramserver.checkpoint.place import Place
from paramserver.cli.look.checkpoint import list_
from paramserver.config.sources import load_settings
from paramserver.resume.checkpointing import place_of
from paramserver.worker.context import Context
from tests.support.cluster.programs import dataset, network, sgd
from tests.support.failover.rollback import Rig

SLICES = 4
# An epoch has two steps.
STEPS = 2


class Script:
    """Logs these values, one after each epoch, and keeps a copy of the model of each."""

    def __init__(self, values: Sequence[float], each: Callable[[Context, int], object] | None = None) -> None:
        """``each`` is called for each batch with the epoch."""
        self.values, self.each = values, each
        self.models: dict[int, dict[str, torch.Tensor]] = {}
        self.logged: list[float] = []

    def __call__(self, ctx: Context) -> None:
        model: Any = network()
        optimizer: Any = sgd(model.parameters())
        loader: Any = DataLoader(dataset(64), batch_size=8, shuffle=True)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        for epoch in ctx.epochs(len(self.values)):
            for x, y in loader:
                if self.each is not None:
                    self.each(ctx, epoch)
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            if ctx.is_main and not ctx.went_back:
                self.models[epoch] = ctx.state_dict()["model"]
                self.logged.append(self.values[epoch])
            if ctx.is_main:
                ctx.log(val=-1.0 if ctx.went_back else self.values[epoch])


def rig(place: Path, mode: str = "sync", **settings: Any) -> Rig:
    options = {"checkpoint__best_metric": "val", "checkpoint__keep": 1, **settings}
    return Rig(place, 1000, mode=mode, **options)


def weights(place: Path, name: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for part in (place / name).glob("model-*.safetensors"):
        found |= load_file(part)
    return found


def test_the_best_ones_stay_and_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Script([5.0, 2.0, 3.0, 4.0, 1.5, 6.0])
    with rig(tmp_path, checkpoint__best_keep=2) as cluster:
        cluster.begin(script)
        cluster.finish()
    place = Place(str(cluster.checkpoints))
    first, second = best.read(place)
    assert (first.value, second.value) == (1.5, 2.0)
    assert first.name.startswith(f"step-{5 * STEPS:08d}")
    assert {first.name, second.name} <= {one.name for one in catalog.complete(place)}
    for one, epoch in ((first, 4), (second, 1)):
        for name, value in weights(cluster.checkpoints, one.name).items():
            assert torch.equal(value, script.models[epoch][name])
    list_(str(cluster.checkpoints))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("good, ")[2] for line in lines if "best" in line] == ["best: val 1.5", "best 2: val 2"]


def test_asynchronous_workers_mark_the_same_version(tmp_path: Path) -> None:
    script = Script([5.0, 2.0, 3.0, 1.0, 6.0])
    with rig(tmp_path, "async", checkpoint__best_mode="max") as cluster:
        cluster.begin(script)
        cluster.finish()
    (found,) = best.read(Place(str(cluster.checkpoints)))
    assert found.value == 6.0


def test_values_of_a_history_that_was_undone_are_no_candidates(tmp_path: Path) -> None:
    """The third epoch is undone. What the rest of its body logs is not recorded, and its checkpoint's value is new."""
    died: list[int] = []

    def each(ctx: Context, epoch: int) -> None:
        if epoch == 2 and ctx.is_main and not died:
            died.append(epoch)
            cluster.until_saved(2 * STEPS)
            for kept in list(cluster.checkpoints.glob(f"step-{2 * STEPS:08d}-*")):
                (kept / "MANIFEST.json").unlink()  # the job goes back further
            cluster.goes_back()

    script = Script([5.0, 2.0, 3.0, 4.0], each)
    with rig(tmp_path, checkpoint__keep=2) as cluster:
        cluster.begin(script)
        cluster.finish()
    assert died
    (found,) = best.read(Place(str(cluster.checkpoints)))
    assert found.value == 2.0, "of the new history, in which the epoch was trained again"
    assert found.name.endswith("-t1")
    assert found.name in {one.name for one in catalog.complete(Place(str(cluster.checkpoints)))}


def test_a_directory_is_needed() -> None:
    with pytest.raises(errors.ConfigError, match=r'checkpoint.best_metric is "val", and there is no directory'):
        place_of(load_settings(overrides={"checkpoint.best_metric": "val"}, environ={}), fresh=False)
