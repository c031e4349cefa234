"""Faults that are put into paramserver on purpose: the tester must find each of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from paramserver.core.work.slices import DataSpec
from paramserver.worker import context
from paramserver.worker.data import order
from paramserver.worker.models import preparing
from paramserver.worker.schedulers.schedule import OptimizerSchedule
from paramserver.worker.script import loader
from paramserver.worker.script.binding import ModelBinding
from paramserver.worker.script.state import NOTHING

Mutant = Callable[[], AbstractContextManager[object]]


def lost_momentum() -> AbstractContextManager[object]:
    """Servers are told that there is none."""
    real = ModelBinding.hypers

    def hypers(self: ModelBinding) -> Any:
        return [{**group, "momentum": 0.0, "nesterov": False} if "momentum" in group else group for group in real(self)]

    return mock.patch.object(ModelBinding, "hypers", hypers)


def skipped_batch() -> AbstractContextManager[object]:
    """The gradient of a script's third slice is dropped."""
    real = ModelBinding.gather

    def gather(self: ModelBinding, partial: Any, *rest: Any) -> None:
        real(self, partial, *rest)
        count = self.__dict__["gathered"] = self.__dict__.get("gathered", 0) + 1
        if count == 3:
            partial.used.clear()

    return mock.patch.object(ModelBinding, "gather", gather)


def late_schedule() -> AbstractContextManager[object]:
    """Schedules that are advanced per step stay where they are."""
    return mock.patch.object(OptimizerSchedule, "advance_in_steps", return_value=None)


def other_order() -> AbstractContextManager[object]:
    """Samples come in the order of another seed."""

    def other(given: Any, data: DataSpec, seed: int, agree: Any) -> order.Order:
        return order.order_of(given, data, seed + 1, agree)

    return mock.patch.object(loader, "order_of", other)


def old_weights() -> AbstractContextManager[object]:
    """A script goes on with the weights of the first version."""
    real = ModelBinding.load

    def load(self: ModelBinding, weights: Any) -> None:
        first = [p.detach().clone() for p in self.parameters]
        real(self, weights)
        with torch.no_grad():
            for parameter, value in zip(self.parameters[:1], first[:1], strict=True):
                parameter.data = value

    return mock.patch.object(ModelBinding, "load", load)


def lost_buffers() -> AbstractContextManager[object]:
    """What a slice does to buffers is dropped."""
    return mock.patch.object(ModelBinding, "gather_buffers", return_value=None)


def no_clipping() -> AbstractContextManager[object]:
    """Gradients are contributed as they are."""
    return mock.patch.object(context.Context, "clip_grad_norm", return_value=None)


def no_refusal() -> AbstractContextManager[object]:
    """Every sampler is taken for a shuffle."""

    def describe(given: Any, *others: Any) -> DataSpec:
        return DataSpec(max(1, len(given.dataset)), given.batch_size or 1)

    return mock.patch.object(preparing, "describe_loader", describe)


def lost_state() -> AbstractContextManager[object]:
    """The optimizer state that a script brings is dropped."""
    return mock.patch.object(preparing, "bring", return_value=NOTHING)


MUTANTS: dict[str, Mutant] = {
    "lost momentum": lost_momentum,
    "skipped batch": skipped_batch,
    "late schedule": late_schedule,
    "other order": other_order,
    "old weights": old_weights,
    "lost buffers": lost_buffers,
    "no clipping": no_clipping,
    "no refusal": no_refusal,
    "lost state": lost_state,
}
