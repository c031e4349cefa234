"""The values of ctx.log reach the coordinator once per step, whoever computes the slices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paramserver import errors
from paramserver.core.records.history import Point
from paramserver.records.file import read
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, inside, until
from tests.support.cluster.programs import Program
from tests.support.cluster.small_job import BATCH, EPOCHS, SAMPLES, SLICES, program
from tests.support.failover.moments import EVERY
from tests.support.failover.rollback import Rig, Strike

STEPS = 4 * EPOCHS


def curve(script: Callable[[Context], object], name: str, points: int, workers: int, **options: Any) -> list[Point]:
    """The points of a name after a job, of which there are to be so many."""
    with Cluster(workers, 2, **options) as cluster:
        cluster.train(script)
        history = cluster.job.coordinator.job.records.history
        until("all steps are closed", lambda: len(history.points(name)) >= points)
        return history.points(name)


def test_the_curve_of_the_loss_does_not_depend_on_the_number_of_workers() -> None:
    one, three = (curve(program(), "loss", STEPS, workers, slices_per_step=SLICES) for workers in (1, 3))
    assert [point.step for point in one] == list(range(STEPS))
    assert [(point.step, point.value) for point in three] == [(point.step, point.value) for point in one]


def test_asynchronous_slices_are_all_in_the_curve() -> None:
    def log_samples(ctx: Context, slices: int) -> None:
        ctx.log({"of/slice": slices})

    slices = -(-SAMPLES // BATCH) * EPOCHS
    points = curve(program(log_samples), "of/slice", slices, 1, mode="async")
    assert [point.value for point in points] == list(range(slices))


class Evaluates(Program):
    """Logs a value after each epoch."""

    def __call__(self, ctx: Context) -> None:
        super().__call__(ctx)
        ctx.log({"accuracy": torch.tensor(0.25) * (ctx.rank + 1)})


def test_a_value_from_outside_of_the_loop_belongs_to_the_version_at_hand() -> None:
    small = program()
    script = Evaluates(small.data, small.batch_size, small.epochs)
    points = curve(script, "accuracy", 1, 2, slices_per_step=SLICES)
    assert [point.step for point in points] == [STEPS]
    assert points[0].value == 0.375


def test_what_is_no_number_is_refused_in_one_sentence() -> None:
    def refused(ctx: Context) -> None:
        wrong: dict[Callable[[], None], str] = {
            lambda: ctx.log(loss="low"): "takes a number for 'loss', not str ('low')",
            lambda: ctx.log(loss=torch.ones(3)): "one number for 'loss', not 3 of them",
            lambda: ctx.log(loss=None): "takes a number for 'loss', not NoneType",
            lambda: ctx.log(0.3): r"ctx.log\(loss=...\) or ctx.log\(\{\"loss\": ...\}\), not float",  # type: ignore[arg-type]
            lambda: ctx.log({"loss": 1}, loss=2): "was given 'loss' twice",
            lambda: ctx.log({1: 2.0}): "the name '1'",  # type: ignore[dict-item]
            lambda: ctx.log({"": 2.0}): "the name ''",
        }
        for call, message in wrong.items():
            with pytest.raises(errors.UserError, match=message.replace("('", r"\('").replace("')", r"'\)")):
                call()
        ctx.log(a=1, b=True, c=np.float32(0.5), d=torch.ones(1, 1), e=float("nan"), f=np.ones((1, 1)))

    inside(refused)


@pytest.mark.long
def test_the_file_has_each_step_once_when_another_coordinator_takes_over_and_the_job_goes_back(tmp_path: Path) -> None:
    quiet, path = tmp_path / "quiet.jsonl", tmp_path / "records.jsonl"
    faults = [Strike("push.recv", "server-1", 5, also=("leader",))]
    for file, strikes in ((quiet, []), (path, faults)):
        file.with_suffix("").mkdir()
        with Rig(file.with_suffix(""), EVERY, strikes, run__records=str(file)) as rig:
            rig.begin(program())
            rig.finish()
            assert set(rig.deaths) == ({"server-1", "leader"} if strikes else set())
    steps = read(path)
    assert [(step.step, step.values) for step in steps] == [(step.step, step.values) for step in read(quiet)]
    assert len(steps) == STEPS
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line for line in lines if "beginning" in line] == lines[:1], "one part: the same job"
    places = [(line["timeline"], line["step"]) for line in lines[1:]]
    assert len(places) == len(set(places)), "no step is written twice on a timeline"
    assert max(places)[0] > 0, "the job went back"
