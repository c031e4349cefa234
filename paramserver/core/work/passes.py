"""Which epoch an iteration over the prepared loader belongs to, in loops over ``ctx.epochs`` and in plain ones.

In a plain loop (``for epoch in range(3): for batch in loader:``) each iteration over the loader is a *pass*, and pass
number n gives whatever is not done of the epochs up to n. So the pass of a worker that comes late is empty until it is
where the others are, and a job that goes back to a checkpoint does its earlier epochs again within the present pass.
In ``ctx.epochs`` the epoch is told, and has one pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paramserver import errors

# Of the number that workers agree on: which one the job's first epoch has for the script.
FIRST_EPOCH = "first epoch"
# How the names of numbers begin that are digests of samples. A job that goes on from a checkpoint may have other data.
SAMPLES = "samples"


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
    # Which iteration over the loader the present one is, counted from 1; whether the script is inside of it.
    iteration: int = 0
    in_loop: bool = False
    # The job went back, and the present pass of a plain loop does earlier epochs again.
    again: bool = False
    # By how many steps the weights at hand are past the end of the pass that has ended.
    steps_past: int = 0
    # By call (``ctx.load``, ``ctx.evaluate``), the epoch in which the script called it last, and how often there.
    calls: dict[str, tuple[int, int]] = field(default_factory=dict)

    def plan(self, epoch: int, last: bool) -> None:
        """An epoch of ``ctx.epochs`` begins."""
        self.epoch, self.last = epoch, last
        self.planned, self.ended, self.stepped = True, False, False
        self.through = 0
        self.calls.clear()

    def called(self, what: str) -> tuple[int, int]:
        """The epoch, and how often the script has called ``what`` in it."""
        epoch, count = self.calls.get(what, (self.epoch, 0))
        return self.epoch, count if epoch == self.epoch else 0

    def call(self, what: str) -> tuple[int, int]:
        """The script calls ``what``; returns the epoch, and how often it was called in that epoch before."""
        epoch, count = self.called(what)
        self.calls[what] = (epoch, count + 1)
        return epoch, count

    def leave(self) -> None:
        """The loop over ``ctx.epochs`` is left, before its end."""
        self.planned, self.last = False, True

    def plan_ended(self, count: int) -> None:
        """The loop over ``ctx.epochs(count)`` has come to its end."""
        self.leave()
        self.through = count

    def begins_with(self, epoch: int) -> None:
        """The first pass of a plain loop will be this epoch."""
        self.epoch, self.ended = epoch - 1, True

    @property
    def next_epoch(self) -> int:
        """Which epoch a pass of a plain loop would be that began now."""
        return self.epoch + (self.epoch < 0 or self.ended or self.stepped)

    def begin(self) -> int:
        """An iteration over the loader begins; returns its number. Raises UserError where there is nothing to give.

        One that was left before the first optimizer step, as by ``next(iter(loader))``, was no pass: the next iteration
        begins with the same slice. An iteration that was left later is over, and the next one has the remaining slices.
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
            self.epoch = self.next_epoch
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

    def goes_back(self) -> None:
        """The job went back during a pass of a plain loop, which does earlier epochs again."""
        self.again = True

    def gives(self, epoch: int | None) -> int | None:
        """The iteration goes on with a slice of this epoch, or (None) comes to its end.

        Returns by how many epochs the slice lies before the pass, if the pass does earlier epochs again.
        """
        self.in_loop, self.ended = epoch is not None, epoch is None
        if epoch is None or not self.again:
            return None
        self.again = epoch < self.epoch
        return self.epoch - epoch

    def looked_ahead(self) -> None:
        """What the iteration gives next was asked for by the loop's own body, in which the script still is."""
        self.in_loop, self.ended = True, False

    def steps(self) -> None:
        """The script makes an optimizer step."""
        self.stepped = True

    def leave_iteration(self, iteration: int) -> bool:
        """The iteration of this number is over, at its end or before; False if another one has begun meanwhile."""
        if iteration != self.iteration:
            return False
        self.in_loop = False
        return True

    @property
    def plain(self) -> bool:
        """The present pass is one of a plain loop."""
        return not self.planned and not self.through and self.epoch >= 0

    @property
    def left(self) -> bool:
        """The last pass was left after its first optimizer step and before its end."""
        return self.stepped and not self.ended
