"""The hyper-parameters that come with contributions. Those of most steps are those of the step before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from paramserver.core.layout.hypers import Hypers, HyperValue
from paramserver.core.layout.optimizers import Optimizers
from paramserver.errors import ModelError, ProtocolError
from paramserver.tensors.hypers import groups_from_proto
from paramserver.v1 import types_pb2

# Relative difference of a number that two kinds of processor have computed in the same way.
_ROUNDING = 1e-9


class Hyperparameters:
    """Checks them against those that the job began with, by parameter group, and remembers the last ones."""

    def __init__(self, optimizers: Optimizers, first: Sequence[Hypers]) -> None:
        self._optimizers, self.first = optimizers, first
        self._last: tuple[list[bytes], tuple[Hypers, ...]] = ([], ())

    def of(self, groups: Iterable[types_pb2.GroupHypers]) -> tuple[Hypers, ...]:
        """As plain values. Raises ProtocolError for numbers that this optimizer does not take, or cannot change to."""
        came = list(groups)
        raw = [group.SerializeToString(deterministic=True) for group in came]
        if raw != self._last[0] or not raw:
            found = groups_from_proto(came)
            try:
                self._optimizers.validate_change(self.first, found)
            except ModelError as error:
                raise ProtocolError(str(error)) from error
            self._last = raw, tuple(found)
        return self._last[1]


def differing(one: Sequence[Hypers], other: Sequence[Hypers]) -> str:
    """The first hyper-parameter that is not equal in both, with both values, in words; empty if there is none.

    Values that machines may have rounded in another way count as equal.
    """
    if one is other:
        return ""
    for number, (here, there) in enumerate(zip(one, other, strict=True)):
        for key in sorted(here):
            if not _close(here[key], there[key]):
                return f"{key} of parameter group {number} is {here[key]} and {there[key]}"
    return ""


def _close(one: HyperValue, other: HyperValue) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_ROUNDING)
    return one == other
