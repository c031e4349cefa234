"""Named places in the code where a planned fault may strike. They do nothing unless somebody has armed them."""

from __future__ import annotations

from typing import Protocol


class Plan(Protocol):
    """What decides whether a place strikes; see :mod:`paramserver.testing`."""

    def reached(self, name: str, step: int) -> None:
        """This process has come to the place ``name`` while it works on ``step`` (-1: on none). May not return."""


_plan: Plan | None = None


def arm(plan: Plan | None) -> None:
    """Let ``plan`` decide from now on; None: nothing happens any more."""
    global _plan
    _plan = plan


def reach(name: str, step: int = -1) -> None:
    """The code has come to the place ``name``. May raise what the plan says, take its time, or end the process."""
    if _plan is not None:
        _plan.reached(name, step)
