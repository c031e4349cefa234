"""Parameter groups that a script adds while training runs: when, and whether all workers do so."""

from __future__ import annotations

from typing import Any

from paramserver import errors
from paramserver.core.work.passes import Passes
from paramserver.worker.engine import Engine
from paramserver.worker.schedulers.schedules import Schedules
from paramserver.worker.script.binding import ModelBinding

# The name under which workers tell each other that a group was added in an epoch. The number is that of the group.
_NAME = "parameter groups"


class Thawing:
    """Adds later groups to one optimizer. See `groups.Groups`."""

    def __init__(self, engine: Engine, passes: Passes, binding: ModelBinding, schedules: Schedules) -> None:
        self._engine, self._passes, self._binding, self._schedules = engine, passes, binding, schedules
        # The epoch in which the groups of other workers were compared with those here.
        self._checked = -1

    def add(self, group: dict[str, Any]) -> None:
        """The script adds a later group. Raises ModelError if servers lack it, UserError in a wrong place."""
        if self._schedules:
            raise errors.ModelError(
                "a prepared scheduler has a learning rate for each group that it was built with, so no group can be "
                "added: give the optimizer the group before ctx.prepare, and freeze it with requires_grad_(False)"
            )
        if self._passes.in_loop:
            raise errors.UserError(
                "optimizer.add_param_group belongs between two epochs: within an epoch workers are at different slices"
            )
        if self._passes.plain:
            raise errors.UserError(
                "optimizer.add_param_group needs the loop `for epoch in ctx.epochs(n)`, which begins an earlier epoch "
                "again if the job goes back: a plain loop does not"
            )
        epoch = self._passes.epoch
        self._binding.add_group(group, epoch)
        place = epoch + 1, self._binding.script_groups.added
        self._engine.agreeing.agree(_NAME, place, float(place[1]))

    def begin_epoch(self, epoch: int) -> None:
        """The script begins this epoch, perhaps once more since the job went back."""
        self._binding.back_to(epoch)

    def check(self) -> None:
        """The script takes a slice. Raises UserError if it lacks a group that another worker added before."""
        groups, epoch = self._binding.script_groups, self._passes.epoch
        if not groups.waiting or self._checked == epoch:
            return
        self._checked = epoch
        added = sum(at <= epoch for at, _ in self._engine.agreeing.so_far(_NAME, 0))
        if added > groups.added:
            raise errors.UserError(
                f"another worker has added {added} parameter groups before epoch {epoch + 1}, this one "
                f"{groups.added}: add the groups that belong to all earlier epochs, too (if epoch >= 3, not "
                "if epoch == 3), since a worker may come late and a job may be resumed"
            )
