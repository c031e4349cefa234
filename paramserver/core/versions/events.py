"""Events of a shard, requests to a shard, and the effects that it returns: plain frozen values."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from paramserver.core.versions.consistency import Consistency
from paramserver.core.versions.names import Name


class Outcome(enum.Enum):
    """The answer to a push that is not refused."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"


class Refusal(enum.Enum):
    """Why a message changes nothing; the shell makes an error of it."""

    FENCED = "fenced"
    ROLLED_BACK = "rolled back"
    OUT_OF_ORDER = "out of order"
    STALE = "stale"
    MALFORMED = "malformed"
    GONE = "gone"


# ---- the kinds of a pull


@dataclass(frozen=True, slots=True)
class AtLeast:
    """This version or a later one."""

    version: int


@dataclass(frozen=True, slots=True)
class Exactly:
    """This version and no other."""

    version: int


@dataclass(frozen=True, slots=True)
class AtClock:
    """Asks for a version that a worker may see after it has finished ``clock`` slices."""

    clock: int


@dataclass(frozen=True, slots=True)
class Joining:
    """A worker that starts, or had nothing to do: it begins at the slowest clock."""


@dataclass(frozen=True, slots=True)
class Latest:
    """Asks for the newest published version."""


Want = AtLeast | Exactly | AtClock | Joining | Latest

# ---- events


@dataclass(frozen=True, slots=True)
class Activated:
    """Version 0 (or a restored one) of a timeline is complete and may be published."""

    timeline: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class Arrived:
    """A contribution has arrived whole and passed all checks of its bytes."""

    call: int
    name: Name
    buffer: int
    worker: int
    timeline: int
    clock: int = 0
    # It stands for slices that will never come, and counts as none.
    filler: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """A contribution in a version. ``filler``: it stands for slices that will never come, and counts as none."""

    name: Name
    worker: int
    filler: bool = False


@dataclass(frozen=True, slots=True)
class Forwarded:
    """To a backup: the primary has sent what the version after ``version`` is made of. All of it is in ``buffer``.

    ``parts``: its contributions. ``consistency``: the setting in force. ``clocks``: of the workers at work, and
    ``floor``: the slowest clock so far, when the next version is published.
    """

    version: int
    buffer: int
    parts: tuple[Part, ...]
    consistency: Consistency
    clocks: Mapping[int, int] = field(default_factory=dict)
    floor: int = 0


@dataclass(frozen=True, slots=True)
class Promoted:
    """A backup becomes the primary. ``consistency``: the newest setting that all shards have agreed on."""

    consistency: Consistency


@dataclass(frozen=True, slots=True)
class PullAsked:
    """A worker (or observer: worker 0) asks for weights."""

    call: int
    worker: int
    want: Want
    timeline: int


@dataclass(frozen=True, slots=True)
class CallGone:
    """The caller of a parked pull went away or its wait is over."""

    call: int


@dataclass(frozen=True, slots=True)
class Built:
    """The version that :class:`Build` asked for stands."""

    version: int


@dataclass(frozen=True, slots=True)
class WentIdle:
    """A worker has nothing to do: it holds nobody back until it pulls again."""

    worker: int


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """The workers that are members in this generation."""

    generation: int
    workers: frozenset[int]


@dataclass(frozen=True, slots=True)
class Held:
    """Asynchronous mode: let no worker begin another slice (or let them again)."""

    held: bool


@dataclass(frozen=True, slots=True)
class CutBegun:
    """Asynchronous mode: readers want a cut. Until it is made or given up, nothing more is applied."""

    number: int


@dataclass(frozen=True, slots=True)
class CutAimed:
    """The cut consists of what is applied, and of these contributions: apply them and no others."""

    number: int
    missing: frozenset[Name]


@dataclass(frozen=True, slots=True)
class CutEnded:
    """The cut is given up, or nobody reads its version any more."""

    number: int


@dataclass(frozen=True, slots=True)
class ConsistencyPrepared:
    """Do not publish ``from_version`` of this setting until it is committed or aborted."""

    consistency: Consistency


@dataclass(frozen=True, slots=True)
class ConsistencyCommitted:
    """All shards have prepared the setting of this revision: take it into force at its ``from_version``.

    ``consistency``: the setting itself, for a shard whose former primary has prepared it.
    """

    revision: int
    consistency: Consistency | None = None


@dataclass(frozen=True, slots=True)
class ConsistencyAborted:
    """Some shard was past the boundary: forget the setting of this revision, and older ones."""

    revision: int


@dataclass(frozen=True, slots=True)
class StandsAt:
    """Synchronous mode: nobody may have ``version``, which is not made yet, until plan ``plan`` is settled.

    So no contribution is open when the shards of another number of servers are filled.
    """

    plan: int
    version: int


@dataclass(frozen=True, slots=True)
class PlanSettled:
    """The plans up to ``plan`` are in force, or were given up."""

    plan: int


Event = (
    Activated
    | Arrived
    | Forwarded
    | Promoted
    | PullAsked
    | CallGone
    | Built
    | WentIdle
    | MembersChanged
    | Held
    | CutBegun
    | CutAimed
    | CutEnded
    | ConsistencyPrepared
    | ConsistencyCommitted
    | ConsistencyAborted
    | StandsAt
    | PlanSettled
)

# ---- effects


@dataclass(frozen=True, slots=True)
class DropBuffer:
    """The bytes of this buffer are no longer needed."""

    buffer: int


@dataclass(frozen=True, slots=True)
class AnswerPush:
    """Answer a push; ``version`` is the newest published one."""

    call: int
    outcome: Outcome
    version: int


@dataclass(frozen=True, slots=True)
class AnswerPull:
    """Answer a pull with this published version."""

    call: int
    version: int
    min_clock: int = 0


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer a push or a pull with an error."""

    call: int
    refusal: Refusal
    reason: str


@dataclass(frozen=True, slots=True)
class Build:
    """Combine these buffers in this order and make ``version`` of them beside the present one."""

    version: int
    names: tuple[Name, ...]
    buffers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropVersion:
    """This version can no longer be pulled; its memory may be used again."""

    version: int


Effect = DropBuffer | AnswerPush | AnswerPull | Refuse | Build | DropVersion
