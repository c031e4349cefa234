"""What a script counts in its loop, and what it gives to ``scheduler.step(value)`` and to schedulers by its counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from paramserver import errors
from paramserver.core.versions.ways import Place, forms

# Numbers of updates that a scheduler is built with.
_LENGTHS = ("T_max", "T_0", "total_steps", "total_iters", "step_size", "total_size")


class Counted:
    """The batches of this worker, as its script may count them; and the forms of the values it has given."""

    def __init__(self) -> None:
        # The number of the batch at hand in the present pass, and among all batches; without a loader of the last step.
        self.batch = self.all = -1
        self._forms: dict[int, list[int]] = {}

    def begin_pass(self) -> None:
        """An iteration over the loader begins."""
        self.batch = -1

    def next(self) -> None:
        """The script gets a batch; without a loader it makes a step."""
        self.batch += 1
        self.all += 1

    def form(self, number: int, given: float, places: list[Place], batches: int, heard: int) -> int:
        """The form of a value that the script gives to the scheduler of this number; 0: of none that is known.

        ``places``: where the script may think that it is, and where the job is. ``heard``: the form of other workers.
        """
        former = self._forms.get(number)
        possible = [form for form in forms(given, places, batches) if former is None or form in former]
        self._forms[number] = possible
        return heard if heard in possible else next(iter(possible), 0)


def unknown(scheduler: LRScheduler, given: Any, batches: int) -> errors.UserError:
    """The refusal of a value that workers would not agree on."""
    what = f"epoch + i / len(loader), with i from enumerate(loader) and len(loader) after ctx.prepare ({batches})"
    return errors.UserError(
        f"the script calls {type(scheduler).__name__}.step({given}) in its loop, and each worker has other batches, so "
        f"workers would not agree on a learning rate: give it {what if batches else 'ctx.version'}, or call step() "
        "without a value"
    )


def twice(scheduler: LRScheduler) -> errors.UserError:
    """The refusal of a second call in a step."""
    return errors.UserError(
        f"the script calls step() of {type(scheduler).__name__} twice on a batch, and a prepared scheduler advances "
        "once with every step of the job: call it once, and build it for that"
    )


def inside_a_slice(scheduler: LRScheduler) -> errors.UserError:
    """The refusal of a call between the batches of a slice."""
    return errors.UserError(
        f"the script calls step() of {type(scheduler).__name__} on a batch before optimizer.step(), and several "
        "batches make a step (accumulate): a prepared scheduler advances once with every step, so call it after "
        "optimizer.step(), where ctx.step_due is true"
    )


def wrong_length(scheduler: LRScheduler, before: int, after: int, early: bool, epochs: int) -> str:
    """A warning if the scheduler was built with the length of the loader before ``ctx.prepare``; empty: it was not.

    ``before``, ``after``: ``len(loader)`` then and now. ``early``: it was built when the loader had not been prepared.
    ``epochs``: how many are planned, 0 if nobody knows.
    """
    if before == after:
        return ""
    for one, name, length in _lengths(scheduler):
        times = length // before
        if length % before or length == epochs * after or not (early or times == epochs):
            continue
        return (
            f"{type(one).__name__} has {name} = {length}, which is {times} times len(loader) before ctx.prepare "
            f"({before}). After ctx.prepare len(loader) is {after}, the number of updates in an epoch, which counts in "
            f"schedules: build the scheduler after ctx.prepare of the loader, with {times * after}"
        )
    return ""


def _lengths(scheduler: Any) -> Iterator[tuple[Any, str, int]]:
    for name in _LENGTHS:
        value = getattr(scheduler, name, 0)
        if isinstance(value, int | float) and value >= 1 and value == int(value):
            yield scheduler, name, int(value)
    for one in getattr(scheduler, "_schedulers", ()):
        yield from _lengths(one)
