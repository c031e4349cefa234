"""The values of ctx.log reach the coordinator once per step, whoever computes the slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from paramserver import errors
from paramserver.core.records.history import Point
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, inside, until
from tests.support.cluster.programs import Program
from tests.support.cluster.small_job import BATCH, EPOCHS, SAMPLES, SLICES, program

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
    points = curve(program(log_samples), "of/slice", 1, 1, mode="async")
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
