"""The tour of docs/design.md: the functions that one gradient passes, and that a real step calls them in that order."""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.nn.functional as F
from torch.utils.data import DataLoader

from paramserver.worker.context import Context
from paramserver.worker.links import exchange
from tests.support.cluster.harness import Cluster
from tests.support.cluster.programs import dataset, network, sgd

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "paramserver"
# Steps in the middle: the first ones set things up.
STEPS = (2, 3, 4)

# (file within the package, qualified name of a function)
Stop = tuple[str, str]


def stops() -> list[Stop]:
    """The functions of the tour, in its order."""
    text = (ROOT / "docs/design.md").read_text().partition("\n## The tour: one gradient")[2].partition("\n## ")[0]
    return re.findall(r"^- `([\w/]+\.py): ([\w.]+)`", text, re.MULTILINE)


def functions(path: Path) -> Iterator[str]:
    """Qualified names of the functions of a file, without those inside of functions."""
    todo: list[tuple[str, ast.AST]] = [("", ast.parse(path.read_text()))]
    while todo:
        prefix, node = todo.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name
            elif isinstance(child, ast.ClassDef):
                todo.append((f"{prefix}{child.name}.", child))


class Trace:
    """Calls of the package's functions in all threads, in their order, for each step that is traced."""

    def __init__(self) -> None:
        self.on = False
        self.steps: list[list[Stop]] = []

    def begin(self) -> None:
        """Trace another step, until ``on`` is False."""
        self.steps.append([])
        self.on = True

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """For `sys.setprofile`."""
        code = frame.f_code
        if self.on and event == "call" and code.co_filename.startswith(f"{PACKAGE}/"):
            self.steps[-1].append((code.co_filename.removeprefix(f"{PACKAGE}/"), code.co_qualname))

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Threads that begin here are traced."""
        threading.setprofile(self.note)
        try:
            yield
        finally:
            threading.setprofile(None)

    def named(self) -> set[Stop]:
        """The functions that every step calls, without comprehensions and lambdas.

        What runs in the background from time to time is not called in every step.
        """
        return {(file, name) for file, name in set.intersection(*map(set, self.steps)) if "<" not in name}


def some_steps(trace: Trace) -> Any:
    """A script whose STEPS are traced, from the backward pass until the new weights are there."""

    def script(ctx: Context) -> None:
        plain = network()
        model, optimizer, loader = ctx.prepare(plain, sgd(plain.parameters()), DataLoader(dataset(48), 8))
        for _ in ctx.epochs(1):
            for n, (x, y) in enumerate(loader):
                loss = F.cross_entropy(model(x), y)
                if n in STEPS:
                    trace.begin()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                trace.on = False
                optimizer.zero_grad()
                assert ctx.version == n + 1

    return script


def test_the_functions_of_the_tour_exist() -> None:
    assert 20 < len(set(stops())) <= 70
    assert len({file for file, _ in stops()}) <= 30
    for file, name in stops():
        assert (PACKAGE / file).is_file(), file
        assert name in functions(PACKAGE / file), f"{file}: {name}"


def test_a_step_calls_them_in_that_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """One host, shared memory, synchronous, one worker and one server; see also test_exchange."""
    monkeypatch.setattr(exchange, "MOST_S", 20.0)  # however busy the machine is
    monkeypatch.setattr("paramserver.core.work.speed.Speed.patience_s", lambda _: 20.0)
    assert sys.getprofile() is None
    trace = Trace()
    with trace.threads(), Cluster(transport="shm") as cluster:
        cluster.start(some_steps(trace))
        cluster.join()
    called = trace.named()
    print(f"one gradient: {len(called)} functions in {len({file for file, _ in called})} files are called")
    assert len(trace.steps) == len(STEPS)
    for calls in trace.steps:
        rest = iter(calls)
        for before, stop in zip([None, *stops()], stops(), strict=False):
            if stop not in rest:
                again = " (it was called earlier)" if stop in calls else ""
                raise AssertionError(f"after {before} {stop} is not called{again}; mend the tour in docs/design.md")
