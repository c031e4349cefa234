"""Whether numbers are finite."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def is_finite(tensor: Tensor) -> bool:
    """True if no element is NaN or infinite. Usually costs one sum."""
    # A sum of finite numbers may overflow, but one with a NaN or an infinity in it is never finite.
    return math.isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())
