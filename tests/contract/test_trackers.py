"""Every tracker takes the same calls. Packages that are not installed are replaced by fakes of their documented API."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import nan
from types import ModuleType
from typing import Any

import pytest

from paramserver.core.records.steps import StepValues
from paramserver.records.trackers import TRACKERS, RunFacts, Tracker

# (run, step, name) to value.
Seen = dict[tuple[str, int, str], float]


class Fakes:
    """Packages that note what they are told."""

    def __init__(self) -> None:
        self.seen: Seen = {}
        self.ended: list[str] = []

    def note(self, run: str, step: int, values: Mapping[str, float]) -> None:
        assert all(type(value) is float for value in values.values())
        self.seen.update({(run, step, name): value for name, value in values.items()})

    # ---- wandb: wandb.init(...) -> Run with define_metric, log, finish

    def wandb(self) -> ModuleType:
        fakes = self

        class Run:
            def __init__(self, run: str) -> None:
                self.run = run
                self.metrics: dict[str, str | None] = {}

            def define_metric(self, name: str, step_metric: str | None = None) -> None:
                self.metrics[name] = step_metric

            def log(self, data: dict[str, float]) -> None:
                assert self.metrics == {"step": None, "*": "step"}
                values = dict(data)
                step = values.pop("step")
                assert isinstance(step, int)
                fakes.note(self.run, step, values)

            def finish(self) -> None:
                fakes.ended.append(self.run)

        module = ModuleType("wandb")

        def init(id: str, name: str, resume: str, config: dict[str, str]) -> Run:
            assert (name, resume, config) == ("job", "allow", {"training.seed": "0"})
            return Run(id)

        module.init = init  # type: ignore[attr-defined]
        return module

    # ---- mlflow: the fluent API, whose run belongs to a thread

    def mlflow(self) -> ModuleType:
        fakes, module = self, ModuleType("mlflow")
        runs: list[Any] = []
        active: list[str] = []

        class Found:
            def __init__(self, run_id: str) -> None:
                self.info = self
                self.run_id = run_id

        def search_runs(filter_string: str, output_format: str, max_results: int) -> list[Found]:
            assert output_format == "list"
            return [Found(key) for key in runs if filter_string == f"tags.paramserver = '{key}'"][:max_results]

        def start_run(run_id: str = "", run_name: str = "", tags: Mapping[str, str] | None = None) -> None:
            if tags:
                runs.append(tags["paramserver"])
            active.append(run_id or runs[-1])

        def log_metrics(metrics: dict[str, float], step: int) -> None:
            fakes.note(active[-1], step, metrics)

        module.search_runs, module.start_run, module.log_metrics = search_runs, start_run, log_metrics  # type: ignore[attr-defined]
        module.log_params = lambda params: None  # type: ignore[attr-defined]
        module.end_run = lambda: fakes.ended.append(active.pop())  # type: ignore[attr-defined]
        return module

    # ---- trackio: trackio.init(...) -> Run with log, finish

    def trackio(self) -> ModuleType:
        fakes, module = self, ModuleType("trackio")

        class Run:
            def __init__(self, run: str) -> None:
                self.run = run

            def log(self, metrics: dict[str, float], step: int) -> None:
                fakes.note(self.run, step, metrics)

            def finish(self) -> None:
                fakes.ended.append(self.run)

        def init(project: str, name: str, resume: str, config: dict[str, str]) -> Run:
            assert (project, resume) == ("paramserver", "allow")
            return Run(name.removeprefix("job-"))

        module.init = init  # type: ignore[attr-defined]
        return module

    # ---- torch.utils.tensorboard: SummaryWriter

    def tensorboard(self) -> ModuleType:
        fakes = self

        class SummaryWriter:
            def __init__(self, log_dir: str, purge_step: int | None = None) -> None:
                assert log_dir == "runs/job"
                if purge_step is not None:
                    fakes.seen = {key: value for key, value in fakes.seen.items() if key[1] < purge_step}

            def add_scalar(self, tag: str, value: float, step: int, walltime: float) -> None:
                fakes.note("5eed", step, {tag: value})

            def close(self) -> None:
                fakes.ended.append("5eed")

        module = ModuleType("torch.utils.tensorboard")
        module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
        return module


FACTS = RunFacts("job", "5eed", {"training.seed": "0"})
STEPS = [
    StepValues(0, 0, {"train/loss": 1.0}),
    StepValues(1, 0, {"train/loss": nan}),
    StepValues(2, 0, {"train/loss": 3.0, "lr": 0.1}),
    StepValues(2, 1, {"train/loss": 4.0}),
]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    made = Fakes()
    for name in ("wandb", "mlflow", "trackio"):
        monkeypatch.setitem(sys.modules, name, getattr(made, name)())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", made.tensorboard())
    return made


def tracker(name: str) -> Tracker:
    return TRACKERS[name][0](FACTS)


def record(name: str, steps: list[StepValues]) -> None:
    opened = tracker(name)
    opened.open()
    for step in steps:
        opened.log(step, 1000.0 + step.step)
    opened.close()


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_gets_every_value_with_its_step_and_the_run_ends(name: str, fakes: Fakes) -> None:
    assert tracker(name).name == name
    record(name, STEPS)
    assert {key: value for key, value in fakes.seen.items() if value == value and key[2] != "lr"} == {
        ("5eed", 0, "train/loss"): 1.0,
        ("5eed", 2, "train/loss"): 4.0,
    }
    assert ("5eed", 1, "train/loss") in fakes.seen
    assert fakes.ended[-1] == "5eed"


@pytest.mark.parametrize("name", TRACKERS)
def test_another_coordinator_goes_on_with_the_same_run(name: str, fakes: Fakes) -> None:
    record(name, STEPS[:1])
    record(name, STEPS[2:])
    assert {run for run, _, _ in fakes.seen} == {"5eed"}
    assert {step for _, step, _ in fakes.seen} == {0, 2}
