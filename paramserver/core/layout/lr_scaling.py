"""Learning rates for another number of slices than the one for which the script has chosen them.

More slices make a larger global batch, whose gradient has less noise, so a larger learning rate fits: in proportion to
the batch (linear) or to its square root. At the beginning that may be too much, so the factor can rise step by step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LrScaling:
    """The factor of all learning rates.

    ``rule``: "none", "linear" or "sqrt". ``base_slices``: the number of slices that the script's learning rates are
    for; 0: as many as a synchronous step has. ``warmup_steps``: how many updates it takes from factor 1 to the whole
    factor.
    """

    rule: str = "none"
    base_slices: int = 1
    warmup_steps: int = 0

    def whole(self, slices: int, of_step: int) -> float:
        """The factor after the warm-up, if an update has so many slices, and a synchronous step ``of_step``.

        >>> LrScaling("linear").whole(4, 4), LrScaling("sqrt", 2).whole(8, 8), LrScaling("linear", 0).whole(1, 4)
        (4.0, 2.0, 0.25)
        """
        if self.rule == "none":
            return 1.0
        ratio = slices / (self.base_slices or of_step)
        return math.sqrt(ratio) if self.rule == "sqrt" else ratio

    def factor(self, slices: int, of_step: int, version: int) -> float:
        """The factor in the update that turns ``version`` into the next one.

        >>> [LrScaling("linear", warmup_steps=4).factor(3, 3, version) for version in (0, 2, 4, 9)]
        [1.0, 2.0, 3.0, 3.0]
        """
        whole = self.whole(slices, of_step)
        if version >= self.warmup_steps:
            return whole
        return 1.0 + (whole - 1.0) * version / self.warmup_steps
