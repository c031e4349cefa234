"""The facts that servers and workers report about steps. All times are seconds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paramserver.core.blame.causes import Cause
from paramserver.core.blame.spent import PHASES, Spent

# A worker reports twice a second. One that is silent for longer does not run, or cannot be reached.
SILENT_S = 2.0


@dataclass(frozen=True, slots=True)
class Made:
    """How a version came about on one shard, by the clock of its server, since the former version was published.

    ``others``, ``last``: when the contributions of all workers but the last one were there, and when all were.
    ``published``: when the version was. ``worker``: who came last, None if there was no other one; ``before``: the last
    one of the others. ``owner``: to whom the last slices had been dealt, who may be another one than who brought them.
    ``starved``, ``paused``: what the server lost meanwhile. ``shard`` and ``server`` tell whose facts.
    """

    step: int
    shard: int
    server: str
    others: float
    last: float
    published: float
    worker: int | None = None
    before: int | None = None
    owner: int | None = None
    lo: int = 0
    hi: int = 0
    starved: float = 0.0
    paused: float = 0.0
    asynchronous: bool = False

    @property
    def straggled(self) -> float:
        """For so long all workers but one were there, and the server could see that."""
        if self.worker is None:
            return 0.0
        return max(0.0, self.last - self.others - self.paused)

    @property
    def culprit(self) -> int | None:
        """The worker that was waited for, even if another one computed its slices in the end."""
        return self.worker if self.owner is None or self.worker is None else self.owner

    @property
    def making(self) -> float:
        """From the last contribution to the published version."""
        return self.published - self.last


@dataclass(frozen=True, slots=True)
class Held:
    """A worker was held at the staleness bound for so long, while worker ``by`` had the slowest clock."""

    worker: int
    by: int
    clock: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Worked:
    """The time of a worker from one slice that it handed in to the next one.

    ``step``: the version that the slice was computed on; asynchronous: the clock of the worker. ``first``: it has
    handed in nothing before. ``done``: False if the slice is not handed in yet.
    """

    step: int
    spent: Spent
    first: bool = False
    done: bool = True


def under_way(step: int, spent: Spent, phase: str, silent: float, first: bool) -> Worked:
    """The times of a slice that a worker has not handed in. ``silent``: the seconds since the worker's last report."""
    if phase in PHASES:
        spent = replace(spent, **{phase: getattr(spent, phase) + silent})
    paused = spent.paused + (silent if silent >= SILENT_S else 0.0)
    return Worked(step, replace(spent, paused=paused), first, done=False)


@dataclass(frozen=True, slots=True)
class Open:
    """Now: a step lacks slices ``lo`` to ``hi`` - 1, and has stood for ``waited`` seconds with all others.

    ``worker``: who is to bring them; ``doing``: its phase, and for how long; ``silent``: since it was heard of.
    """

    step: int
    worker: str
    lo: int
    hi: int
    waited: float
    doing: str = ""
    doing_s: float = 0.0
    silent: float = 0.0


@dataclass(frozen=True, slots=True)
class Blamed:
    """A step that waited noticeably. ``member``: empty if the data does not say for whom."""

    step: int
    waited: float
    member: str
    cause: Cause
    seconds: float
    lo: int = 0
    hi: int = 0
    asynchronous: bool = False
    at: float = field(default=0.0, compare=False)
