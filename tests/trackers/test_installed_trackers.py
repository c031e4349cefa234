"""The packages of all trackers take our calls, without a network: ``make test-trackers`` installs them."""

from __future__ import annotations

from math import nan
from pathlib import Path

import pytest

from paramserver.config import Run
from paramserver.core.records.steps import StepValues
from paramserver.records.opening import check_records
from paramserver.records.trackers import TRACKERS, RunFacts

STEPS = [
    StepValues(0, 0, {"train/loss": 1.0}),
    StepValues(1, 0, {"train/loss": nan}),
    StepValues(2, 0, {"train/loss": 3.0, "lr": 0.1}),
    StepValues(2, 1, {"train/loss": 4.0}),
]


def record(name: str, steps: list[StepValues]) -> None:
    tracker = TRACKERS[name][0](RunFacts("job", "5eed", {"training.seed": "0"}))
    tracker.open()
    for step in steps:
        tracker.log(step, 1000.0 + step.step)
    tracker.close()


@pytest.mark.filterwarnings("default")  # those of the packages are not ours
@pytest.mark.parametrize("name", TRACKERS)
def test_an_installed_package_takes_the_calls_without_a_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    check_records(Run(track=name))
    record(name, STEPS[:3])
    record(name, STEPS[3:])
    assert any(path.is_file() and path.stat().st_size for path in tmp_path.rglob("*"))
