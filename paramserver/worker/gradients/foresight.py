"""Predicts whether the next contribution may leave while it is computed, from the contributions before."""

from __future__ import annotations

from collections.abc import Sequence

from paramserver.v1 import types_pb2

# A script whose gradients are not what left early is not tried again for up to so many slices.
_MOST_REST = 1024


class Foresight:
    """Predicts for one script. A header that is sent before its contribution is computed must be true in the end."""

    def __init__(self) -> None:
        # The tensors that the last contribution used; empty if a contribution like that cannot leave early.
        self._used: frozenset[int] = frozenset()
        # Of the contribution that is leaving, its announced tensors, hyper-parameters and the norm to clip to.
        self._said: tuple[object, ...] = ()
        # How many announcements in a row were wrong; and for how many slices from now on nothing leaves early.
        self._misses = self._rest = 0

    def of_next(self) -> frozenset[int]:
        """A slice begins: the tensors that its contribution will probably use; empty: nothing should leave early."""
        self._rest -= 1
        return self._used if self._rest < 0 else frozenset()

    def said(self, used: frozenset[int], groups: Sequence[types_pb2.GroupHypers], clip_norm: float) -> None:
        """A contribution begins to leave, and these facts were announced."""
        self._said = used, groups, clip_norm

    def compare(self, used: set[int], groups: Sequence[types_pb2.GroupHypers], clip_norm: float, left: bool) -> None:
        """The contribution that has begun to leave is computed. ``left``: it is still the same computation."""
        right = left and self._said == (used, groups, clip_norm)
        # A script that changes its gradients mostly does so in each step.
        self._misses = 0 if right else self._misses + 1
        self._rest = 0 if right else min(2**self._misses, _MOST_REST)

    def learn(self, used: frozenset[int]) -> None:
        """A contribution used these tensors; empty if its gradients were changed before it left."""
        self._used = used
