"""Whether the next contribution may leave while it is computed, judging by those before it."""

from __future__ import annotations

from collections.abc import Sequence

from paramserver.v1 import types_pb2

# A script whose gradients are not what left early is not tried again for up to so many slices.
_MOST_REST = 1024


class Foresight:
    """Of one script. What is said of a contribution before it is computed must be true when it is."""

    def __init__(self) -> None:
        # The tensors that the last contribution used; empty if none of its sort can leave early.
        self._used: frozenset[int] = frozenset()
        # What was said of the one that leaves: its tensors, the hyper-parameters, the norm to clip to.
        self._said: tuple[object, ...] = ()
        # How often in a row that was not what was contributed in the end; so many slices are computed without now.
        self._misses = self._rest = 0

    def of_next(self) -> frozenset[int]:
        """A slice begins: the tensors that its contribution is expected to use; empty: it should not leave early."""
        self._rest -= 1
        return self._used if self._rest < 0 else frozenset()

    def said(self, used: frozenset[int], groups: Sequence[types_pb2.GroupHypers], clip_norm: float) -> None:
        """A contribution begins to leave, and this was said of it."""
        self._said = used, groups, clip_norm

    def compare(self, used: set[int], groups: Sequence[types_pb2.GroupHypers], clip_norm: float, left: bool) -> None:
        """The contribution that has begun to leave is computed. ``left``: it was not computed once more since then."""
        right = left and self._said == (used, groups, clip_norm)
        # A script that changes its gradients mostly does so in each step.
        self._misses = 0 if right else self._misses + 1
        self._rest = 0 if right else min(2**self._misses, _MOST_REST)

    def learn(self, used: frozenset[int]) -> None:
        """A contribution used these tensors; empty if its gradients were changed before it left."""
        self._used = used
