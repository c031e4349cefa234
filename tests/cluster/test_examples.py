"""The examples of docstrings, and the scripts of README and tutorial, do what they show. All train alone."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paramserver as ps
from tests.support.unit.pages import ROOT, code

NAMES = ("init", "Context", "Client", "server_optimizer")


def examples() -> Iterator[doctest.DocTest]:
    for name in NAMES:
        thing = getattr(ps, name)
        members = [(name, thing)]
        if inspect.isclass(thing):
            members += [(f"{name}.{m}", value) for m, value in inspect.getmembers(thing) if not m.startswith("_")]
        for full, member in members:
            text = inspect.getdoc(member) or ""
            if ">>>" in text and not isinstance(member, property):
                yield doctest.DocTestParser().get_doctest(text, {}, full, None, None)


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory without a configuration."""
    monkeypatch.chdir(tmp_path)


def objects(name: str) -> dict[str, Any]:
    """The names that examples use without saying where they come from."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(32, 4), torch.ones(32, 1))
    found: dict[str, Any] = {"ps": ps, "np": np, "torch": torch, "F": F}
    if not name.startswith("Client"):
        found |= {"model": model, "optimizer": optimizer, "loader": DataLoader(data, 8)}
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "at.pt")
    if name.startswith("Context."):
        found["ctx"] = ps.init()
    if name.startswith("Client."):
        found["client"] = ps.Client()
    return found


@pytest.mark.parametrize("test", list(examples()), ids=lambda test: test.name)
def test_examples_of_docstrings(test: doctest.DocTest) -> None:
    test.globs = names = objects(test.name)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    try:
        runner.run(test, out=said.append, clear_globs=False)
    finally:
        for name in ("ctx", "client"):
            if name in names:
                names[name].close()
    assert runner.summarize(verbose=False).failed == 0, "".join(said)
    assert test.examples


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


def test_the_script_of_the_tutorial(capsys: pytest.CaptureFixture[str]) -> None:
    (script,) = code((ROOT / "docs/tutorial.md").read_text())
    exec(script, {})
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said if line.startswith("epoch")] == [f"epoch {n}" for n in range(1, 6)]
