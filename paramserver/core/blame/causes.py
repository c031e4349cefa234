"""The cause of a wait, out of a fixed list, if the data explains most of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from paramserver.core.blame.spent import Spent

# A cause is named if it explains at least this part of the wait.
SHARE = 0.6


class Cause(enum.StrEnum):
    """The cause of a worker's or a server's delay."""

    DATA = "its data loader"
    COMPUTE = "its computation"
    OTHER = "its script between two steps"
    GC = "garbage collection"
    STARVED = "a starved core"
    PAUSED = "paused"
    LINK = "its link"
    SERVER = "its work"
    JOINED = "joined late"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause, and how many seconds of the wait it explains."""

    cause: Cause
    seconds: float = 0.0


def of_worker(waited: float, spent: Spent, usual: Spent, link: float, first: bool) -> Finding:
    """The cause for which a worker was waited for, ``waited`` seconds long.

    ``spent``: where its time went; ``usual``: where that of other workers goes, for as many slices. ``link``: how much
    longer than usual its messages took. ``first``: it has handed in nothing before.
    """
    if first:
        return Finding(Cause.JOINED, waited)
    # Parts of the phases come first, since a phase contains them.
    parts = {
        Cause.PAUSED: spent.paused,
        Cause.STARVED: spent.starved - usual.starved,
        Cause.GC: spent.gc - usual.gc,
    }
    phases = {
        Cause.DATA: spent.data - usual.data,
        Cause.COMPUTE: spent.compute - usual.compute,
        Cause.OTHER: spent.other - usual.other,
    }
    # A part is the cause if it is most of the time that the worker took longer, also where others ended the wait early.
    late = max(waited, spent.busy - usual.busy)
    # Messages come last, since a worker that begins a step late looks as if they had taken long.
    for found, least in ((parts, late), (phases, waited), ({Cause.LINK: link + spent.receive - usual.receive}, waited)):
        cause = max(found, key=found.__getitem__)
        if found[cause] >= SHARE * least:
            return Finding(cause, min(waited, found[cause]))
    return Finding(Cause.UNKNOWN)


def of_server(waited: float, starved: float, paused: float) -> Finding:
    """The cause for which all workers waited for a server."""
    parts = {Cause.PAUSED: paused, Cause.STARVED: starved}
    cause = max(parts, key=parts.__getitem__)
    seconds = min(waited, parts[cause])
    if seconds >= SHARE * waited:
        return Finding(cause, seconds)
    return Finding(Cause.SERVER, waited)
