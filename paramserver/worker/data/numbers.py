"""Which numbers the epochs of a job have for its script, which may go on from a checkpoint of its own."""

from __future__ import annotations

from typing import Protocol

from paramserver.core.work.passes import FIRST_EPOCH


class _Agreeing(Protocol):
    def agree(self, name: str, place: tuple[int, int], value: float) -> float:
        """Give a number for this place of the script; returns the number that all workers have there."""


class EpochNumbers:
    """The order of samples and the seeds of an epoch follow from its number.

    A job counts its epochs from 0. The script's numbers are larger by ``first``, the number of the job's first epoch.
    """

    def __init__(self, agreeing: _Agreeing) -> None:
        self._agreeing = agreeing
        self._settled = False
        self.first = 0

    def begin_with(self, number: int) -> None:
        """The script begins with this epoch. If another worker has begun before, or this one earlier, theirs counts.

        A worker that is started again may begin with a later epoch than the job.
        """
        if not self._settled:
            self.first = int(self._agreeing.agree(FIRST_EPOCH, (1, 1), float(number)))
            self._settled = True

    def of(self, epoch: int) -> int:
        """The number of an epoch of the job."""
        return epoch + self.first
