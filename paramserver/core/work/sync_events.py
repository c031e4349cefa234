"""Events of a synchronous worker, and the effects that its state machine returns: plain frozen values.

``step`` is the version on which a step computes. A ``node`` is a half-open range of a step's slices that is a node of
the reduction tree.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass

from paramserver.core.versions.reduction import Node
from paramserver.core.work.stealing import Ask, Assignment

# ---- events


@dataclass(frozen=True, slots=True)
class StepBegan:
    """This worker has version ``step``, and begins that step of ``of`` slices.

    ``place`` among ``workers``: as in :class:`SharesChanged`. ``taken``: the slices of the step that made this version
    which were given to others than their owners.
    """

    step: int
    of: int
    place: int
    workers: int
    taken: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class SharesChanged:
    """The slices of the present step are dealt out anew, to this ``place`` among ``workers``; -1: it gets none."""

    place: int
    workers: int


@dataclass(frozen=True, slots=True)
class SliceWanted:
    """The script is ready to compute a slice."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The script has computed a slice of ``step``.

    ``stalled_s``: seconds in which it waited for weights meanwhile. ``apart``: this contribution must not be added to
    others before it is pushed.
    """

    step: int
    slice: int
    stalled_s: float = 0.0
    apart: bool = False


class Exchange(enum.Enum):
    """The outcome of a :class:`PushAndWait`."""

    # The next version is here.
    DONE = "done"
    # The contribution has arrived, but the next version has not come in time.
    PUSHED = "pushed"
    # The contribution has to be pushed without the wait.
    NOT_MADE = "not made"


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A :class:`PushAndWait` is over."""

    outcome: Exchange


@dataclass(frozen=True, slots=True)
class PushesArrived:
    """After :class:`Wait`: all contributions that were pushed in this step have arrived."""


@dataclass(frozen=True, slots=True)
class PatienceOver:
    """The time of :class:`Patience` has passed, and the next version has not come."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A server's answer to :class:`AskForWork`: a slice to compute, or None. ``complete``: it lacks no slice."""

    slice: int | None
    complete: bool = False


@dataclass(frozen=True, slots=True)
class NotAnswered:
    """There is no answer to :class:`AskForWork`."""


@dataclass(frozen=True, slots=True)
class PutOff:
    """The slice that the script has computed does not count: it needs a part of slice ``first``, which comes first."""

    first: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """The worker goes on in another mode, or leaves: everything that it has computed is to be pushed."""


Event = (
    StepBegan
    | SharesChanged
    | SliceWanted
    | Computed
    | Exchanged
    | PushesArrived
    | PatienceOver
    | Answered
    | NotAnswered
    | PutOff
    | Leaving
)

# ---- effects


@dataclass(frozen=True, slots=True)
class Compute:
    """Give this slice of the present step to the script. ``unplanned``: the slice was not foreseen."""

    slice: int
    unplanned: bool = False


@dataclass(frozen=True, slots=True)
class Add:
    """Add the contribution of node ``right`` to the one of ``left``; the sum is the one of both together."""

    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Push:
    """Begin to push the contribution of this node."""

    node: Node


@dataclass(frozen=True, slots=True)
class PushAndWait:
    """Push this contribution and wait for the next version, if one call can do both; tell :class:`Exchanged`.

    ``patience_s``: the longest wait. ``assignment``: for the servers; None: they are told nothing.
    """

    node: Node
    patience_s: float
    assignment: Assignment | None


@dataclass(frozen=True, slots=True)
class Drop:
    """The contribution of this node is not needed: others have completed its step."""

    node: Node


@dataclass(frozen=True, slots=True)
class NotNeeded:
    """The contribution just computed is not needed: its step is over, or this worker has computed it before."""


@dataclass(frozen=True, slots=True)
class AskForWork:
    """Ask this server which slice to compute; tell :class:`Answered` or :class:`NotAnswered`."""

    server: int
    ask: Ask


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask for the next version, and tell :class:`PushesArrived`. The wait ends with a version, or other shares, too.

    ``assignment``: for the servers; None: they are told nothing.
    """

    assignment: Assignment | None


@dataclass(frozen=True, slots=True)
class Patience:
    """Go on waiting; if nothing has come after so many seconds, tell :class:`PatienceOver`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class StopWaiting:
    """Ask no longer for the next version: there is this slice to compute, which comes with :class:`SliceWanted`."""

    slice: int


Effect = Compute | Add | Push | PushAndWait | Drop | NotNeeded | AskForWork | Wait | Patience | StopWaiting
