"""Which epoch an iteration over the prepared loader belongs to, in loops over ``ctx.epochs`` and in plain ones.

In a plain loop (``for epoch in range(3): for batch in loader:``) each iteration over the loader is a *pass*, and pass
number n gives whatever is not done of the epochs up to n. So the pass of a worker that comes late is empty until it is
where the others are, and a job that goes back to a checkpoint does its earlier epochs again within the present pass.
In ``ctx.epochs`` the epoch is told, and has one pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from paramserver import errors


@dataclass(slots=True)
class Passes:
    """Told when iterations begin and end; says up to which epoch slices are wanted."""

    # The epoch of the present or last pass, -1 before the first.
    epoch: int = -1
    # No later epoch is going to be asked for, as far as is known: a plain loop may end with any pass.
    last: bool = True
    # An epoch of ``ctx.epochs`` is under way.
    planned: bool = False
    # How many epochs ``ctx.epochs`` was asked for, once it has come to its end.
    through: int = 0
    # The present pass has come to its end; some optimizer step was made in it.
    ended: bool = False
    stepped: bool = False
    # Which iteration over the loader the present one is, counted from 1.
    iteration: int = 0

    def plan(self, epoch: int, last: bool) -> None:
        """An epoch of ``ctx.epochs`` begins."""
        self.epoch, self.last = epoch, last
        self.planned, self.ended, self.stepped = True, False, False
        self.through = 0

    def leave(self) -> None:
        """The loop over ``ctx.epochs`` is left, before its end."""
        self.planned, self.last = False, True

    def plan_ended(self, count: int) -> None:
        """The loop over ``ctx.epochs(count)`` has come to its end."""
        self.leave()
        self.through = count

    def begin(self) -> int:
        """An iteration over the loader begins; returns its number. Raises UserError where there is nothing to give.

        One that was left before the first optimizer step, as by ``next(iter(loader))``, was no pass: the next iteration
        begins with the same slice. One that was left later is over, and the next one begins with what it has left.
        """
        if self.through:
            raise errors.UserError(
                f"ctx.epochs({self.through}) has come to its end, and the prepared loader gives only slices to train "
                "on: plan more epochs, or use a DataLoader that was not prepared (to evaluate, for example)"
            )
        if self.planned and self.ended:
            raise errors.UserError(
                f"the prepared loader has given all of its slices of epoch {self.epoch + 1}: iterate over it once in "
                "each epoch of ctx.epochs, and use a DataLoader that was not prepared for anything else (to evaluate, "
                "for example)"
            )
        if not self.planned:
            if self.epoch < 0 or self.ended or self.stepped:
                self.epoch += 1
            self.ended = self.stepped = False
        self.iteration += 1
        return self.iteration

    def check(self, iteration: int) -> None:
        """The iteration of this number goes on. Raises UserError if another one has begun meanwhile."""
        if iteration != self.iteration:
            raise errors.UserError(
                "another iteration over the prepared loader has begun before this one came to its end: "
                "iterate over it once at a time"
            )

    @property
    def plain(self) -> bool:
        """The present pass is one of a plain loop."""
        return not self.planned and not self.through and self.epoch >= 0

    @property
    def left(self) -> bool:
        """The last pass was left after its first optimizer step and before its end."""
        return self.stepped and not self.ended
