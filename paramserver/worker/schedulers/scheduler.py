"""The scheduler that ``ctx.prepare`` hands back: torch's interface, advanced with the job."""

from __future__ import annotations

from typing import Any, Protocol

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paramserver import errors


class Calls(Protocol):
    """What becomes of the script's calls of ``step()``; `schedules.Schedules` does it."""

    @property
    def by_steps(self) -> bool:
        """Whether the script's steps are the job's: inside the loop over the loader, or anywhere without a loader."""

    @property
    def differ(self) -> bool:
        """Whether workers have different values inside of the loop."""

    def in_step(self, number: int, *args: Any, **kwargs: Any) -> None:
        """The script advances the scheduler of this number before or after an optimizer step."""

    def beside_steps(self, number: int, *args: Any, **kwargs: Any) -> None:
        """The script advances it elsewhere."""

    def measured(self, number: int, value: float, *args: Any, **kwargs: Any) -> None:
        """The script gives it a value; workers may have different ones."""


class StepScheduler:
    """A learning-rate scheduler that counts the job's updates, not this worker's slices.

    Inside of the loop over the prepared loader ``step()`` brings the schedule to where the job stands (by no step or by
    several); outside of it (once per epoch) it does what the wrapped scheduler does.

    >>> scheduler = ctx.prepare(torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5))
    >>> scheduler.get_last_lr()
    [0.1]
    """

    def __init__(self, wrapped: LRScheduler, number: int, calls: Calls) -> None:
        self.wrapped = wrapped
        self._number, self._calls = number, calls

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule: in the loop over the loader to where the job stands, elsewhere by one step.

        ``ReduceLROnPlateau`` takes the value of the first worker that comes to this place of the script. Raises
        UserError if it is called in the loop over the prepared loader, and if another scheduler is advanced after some
        steps in the loop and not after others. In the loop a value may be ``epoch + i / len(loader)``, or a count of
        batches: the scheduler gets what one process with all slices of a step would give it.

        >>> scheduler = ctx.prepare(torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5))
        >>> for x, y in loader:
        ...     F.mse_loss(model(x), y).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     scheduler.step()
        >>> scheduler.get_last_lr()
        [0.025]
        """
        if isinstance(self.wrapped, ReduceLROnPlateau):
            self._step_measured(*args, **kwargs)
        elif not self._calls.by_steps:
            self._calls.beside_steps(self._number, *args, **kwargs)
        else:
            self._calls.in_step(self._number, *args, **kwargs)

    def _step_measured(self, metrics: Any, *args: Any, **kwargs: Any) -> None:
        if self._calls.by_steps and self._calls.differ:
            raise errors.UserError(
                "ReduceLROnPlateau.step() belongs between two epochs: within an epoch workers compute different "
                "slices, so they would not agree on a learning rate"
            )
        self._calls.measured(self._number, float(metrics), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)
