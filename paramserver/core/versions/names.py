"""Names of contributions: they name the work, never the worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class SyncName:
    """Slices ``[lo, hi)`` of the ``of`` slices of step ``step``: one node of the reduction tree."""

    step: int
    lo: int
    hi: int
    of: int

    @property
    def slices(self) -> int:
        """How many slices the contribution covers."""
        return self.hi - self.lo

    def __str__(self) -> str:
        which = f"slice {self.lo}" if self.slices == 1 else f"slices {self.lo} to {self.hi - 1}"
        return f"step {self.step}, {which}"


@dataclass(frozen=True, slots=True, order=True)
class AsyncName:
    """Slice ``index`` of epoch ``epoch``, as leased."""

    epoch: int
    index: int

    @property
    def slices(self) -> int:
        """How many slices the contribution covers: always one."""
        return 1

    def __str__(self) -> str:
        return f"epoch {self.epoch}, slice {self.index}"


Name = SyncName | AsyncName
