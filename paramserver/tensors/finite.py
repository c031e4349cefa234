"""Whether numbers are finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def is_finite(tensor: Tensor) -> bool:
    """True if no element is NaN or infinite. Usually costs one sum."""
    # A sum of finite numbers may overflow, but one with a NaN or an infinity in it is never finite.
    return math.isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """The same for several at once. Usually looks at their device a single time."""
    if len(tensors) > 1:
        import torch

        if math.isfinite(torch.stack([tensor.sum().float() for tensor in tensors]).sum().item()):
            return True
    return all(is_finite(tensor) for tensor in tensors)
