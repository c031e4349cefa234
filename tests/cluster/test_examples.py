"""The examples of docstrings, and the scripts of README and tutorial, do what they show. All train alone."""

from __future__ import annotations

import doctest
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paramserver as ps
from paramserver.checkpoint.place import Place
from paramserver.notebook import Launched
from paramserver.worker.gradients.hooks import PushBucket
from tests.support.public import PUBLIC
from tests.support.unit.checkpoints import save
from tests.support.unit.pages import ROOT, code, section

# Their examples use a context, which is open.
OF_A_LOOP = ("Context", "ServerOptimizer", "SliceLoader", "StepScheduler", "PushBucket")


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory without a configuration."""
    monkeypatch.chdir(tmp_path)


def objects(kind: str) -> dict[str, Any]:
    """The names that examples of a class or function use without saying where they come from."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(torch.ones(32, 4), torch.ones(32, 1)), 8)
    found: dict[str, Any] = {"ps": ps, "np": np, "torch": torch, "F": F, "time": time, "test_loader": loader}
    if kind in ("launch", "Launched"):
        # Processes of its own: tests/integration/test_launch.py.
        def launch(function: Callable[..., Any], args: tuple[Any, ...], workers: int) -> Launched:
            return Launched(function(*args), {"epochs": args[0]})

        here = SimpleNamespace(init=ps.init, launch=launch)
        return found | {"ps": here, "Launched": Launched, "DataLoader": DataLoader, "TensorDataset": TensorDataset}
    if kind == "Client":
        return found | {"client": ps.Client()}
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "at.pt")
    if kind in OF_A_LOOP:
        found["ctx"] = ctx = ps.init()
        if kind != "Context":
            model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        if kind == "PushBucket":
            found["bucket"] = bucket_of(ctx, model, optimizer, loader)
    return found | {"model": model, "optimizer": optimizer, "loader": loader}


def bucket_of(ctx: ps.Context, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> PushBucket:
    """The bucket that a hook gets in the first step."""
    found: list[PushBucket] = []

    def hook(state: None, bucket: PushBucket) -> torch.Tensor:
        found.append(bucket)
        return bucket.buffer()

    ctx.register_push_hook(None, hook)
    for x, y in loader:
        F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        break
    return found[0]


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_of_docstrings(name: str) -> None:
    kind = name.partition(".")[0]
    # Examples of a class itself begin with `ps.init()` or `ps.Client()`.
    names = objects("" if name in ("Context", "Client") else kind)
    text = inspect.getdoc(PUBLIC[name]) or ""
    test = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    test.globs = names
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    try:
        runner.run(test, out=said.append, clear_globs=False)
    finally:
        for opened in ("ctx", "client"):
            if opened in names:
                names[opened].close()
    assert runner.summarize(verbose=False).failed == 0, "".join(said)
    assert test.examples


def test_an_example_that_is_wrong_fails() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "sum", None, None)
    assert doctest.DocTestRunner().run(test, out=lambda _: None).failed == 1


def test_the_code_that_reads_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    save(Place(str(tmp_path / "ckpt")), 7)
    (script,) = [one for one in code((ROOT / "docs/checkpoints.md").read_text()) if "TensorFile" in one]
    names: dict[str, Any] = {}
    exec(script, names)
    assert set(np.frombuffer(names["data"], np.float32).tolist()) == {7.0}


class Net(nn.Module):
    """A model for the script of the README."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layer(x)
        return scores


def test_the_script_of_the_readme_with_its_lines_and_without_them() -> None:
    (diff,) = code((ROOT / "README.md").read_text(), "diff")
    lines = diff.splitlines()
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :3].argmax(dim=1))
    assert sum(line.startswith("+") for line in lines) == 4
    for kept in (" ", " +"):
        torch.manual_seed(0)
        names: dict[str, Any] = {"Net": Net, "data": data}
        exec("\n".join(line[1:] for line in lines if line[:1] in kept), names)
        assert names["loss"].item() < 1.2
        assert ("ctx" in names) == ("+" in kept)


@pytest.mark.parametrize(
    "title", ["From DistributedDataParallel", "From Horovod", "From a parameter server on PyTorch"]
)
def test_the_scripts_of_the_page_about_migration(title: str) -> None:
    """The lines that are kept or new are a whole script."""
    (diff,) = code(section("docs/migration.md", title), "diff")
    assert_trains([line[1:] for line in diff.splitlines() if line[:1] in " +"])


def test_the_script_for_ddp_before_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process, with gloo."""
    (diff,) = code(section("docs/migration.md", "From DistributedDataParallel"), "diff")
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert_trains([line[1:] for line in diff.splitlines() if line[:1] in " -"])


def assert_trains(lines: list[str]) -> None:
    torch.manual_seed(0)
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :3].argmax(dim=1))
    names: dict[str, Any] = {"Net": Net, "data": data, "torch": torch, "F": F, "DataLoader": DataLoader}
    exec("\n".join(lines), names)
    assert names["loss"].item() < 1.2
    saves = any("torch.save" in line for line in lines)
    assert list(torch.load("model.pt") if saves else Net().state_dict()) == ["layer.weight", "layer.bias"]


def test_the_script_of_the_tutorial(capsys: pytest.CaptureFixture[str]) -> None:
    (script,) = code((ROOT / "docs/tutorial.md").read_text())
    exec(script, {})
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said if line.startswith("epoch")] == [f"epoch {n}" for n in range(1, 6)]
