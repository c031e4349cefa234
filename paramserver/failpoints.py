"""Named places in the code where a planned fault may strike. Without a plan they do nothing."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

C = TypeVar("C")


class Plan(Protocol):
    """Decides whether a fault strikes at a place; see :mod:`paramserver.testing.arming`."""

    def reached(self, name: str, step: int) -> None:
        """This process has come to the place ``name`` while it works on ``step`` (-1: on none). May end the process."""

    def plans(self, name: str) -> bool:
        """Whether anything is planned at the place ``name`` in this process."""
        ...

    def touched(self, writes: bool) -> None:
        """This process reads a place of checkpoints, or writes there. Raises OSError if the storage has a fault."""

    def through(self, channel: Any) -> Any:
        """A channel to a peer, as this process shall see it."""

    def named(self, name: str) -> None:
        """This process is the member of that name."""


_plan: Plan | None = None


def arm(plan: Plan | None) -> None:
    """Let ``plan`` decide from now on; None: nothing happens any more."""
    global _plan
    _plan = plan


def reach(name: str, step: int = -1) -> None:
    """The code has come to the place ``name``. May raise what the plan says, take its time, or end the process."""
    if _plan is not None:
        _plan.reached(name, step)


def touch(writes: bool) -> None:
    """A place of checkpoints on disk is about to be read, or written to. May raise OSError, or take its time."""
    if _plan is not None:
        _plan.touched(writes)


def planned(name: str) -> bool:
    """Whether a fault is planned at the place ``name`` in this process: then there must be a moment to strike in."""
    return _plan is not None and _plan.plans(name)


def through(channel: C) -> C:
    """The channel itself, or one whose calls suffer what is planned."""
    return channel if _plan is None else _plan.through(channel)


def known_as(name: str) -> None:
    """This process has become the member of that name ("worker-1")."""
    if _plan is not None:
        _plan.named(name)
