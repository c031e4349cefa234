"""A curve in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float]) -> str:
    """A character for each value, from the lowest to the highest. Values that are no numbers are blank.

    >>> sparkline([0, 1, 2, 7])
    '▁▂▃█'
    """
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return " " * len(values)
    low, high = min(known), max(known)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((v - low) * scale)] if math.isfinite(v) else " " for v in values)
