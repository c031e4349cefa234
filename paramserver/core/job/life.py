"""The life of a job: its phase, the reason for it, its timeline and the setting in force.

All changes of the phase go through :meth:`Life.handle`. A job that has ended stays ended, whatever was under way.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from paramserver.core.versions.consistency import Consistency


class Phase(enum.Enum):
    """The phase of the job, as the coordinator sees it."""

    WAITING = "waiting"
    INITIALISING = "initialising"
    RUNNING = "running"
    RECOVERING = "recovering"
    FAILED = "failed"
    STOPPED = "stopped"
    DONE = "done"


ENDED = frozenset({Phase.FAILED, Phase.STOPPED, Phase.DONE})
BEFORE = frozenset({Phase.WAITING, Phase.INITIALISING})


@dataclass(frozen=True, slots=True)
class Counted:
    """Members have come or gone, or more is known of the model.

    ``missing``: the members that the start waits for, in words. ``model``: the model is known. ``published``: the
    servers have published a version that workers may pull.
    """

    missing: str
    model: bool
    published: bool


@dataclass(frozen=True, slots=True)
class GoesBack:
    """All shards go back to a checkpoint, since one of them is gone. ``published``: there was a version before."""

    why: str
    published: bool


@dataclass(frozen=True, slots=True)
class WentBack:
    """All shards have the version of the checkpoint."""


@dataclass(frozen=True, slots=True)
class LoadBegins:
    """All workers have called ``ctx.load``: the shards begin a timeline for the state that the scripts load."""


@dataclass(frozen=True, slots=True)
class Uploads:
    """The shards are ready for the loaded state, which a worker uploads."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The loaded state is published."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Another number of servers has all of the model. Nothing is lost. `WentBack` follows when all servers know."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The job ends in ``phase``. ``summary``: its result. ``released``: the result is gathered, and servers may leave.

    ``exit_code``: of the coordinator, if the job fails.
    """

    phase: Phase
    reason: str
    summary: str = ""
    released: bool = True
    exit_code: int = 0


Event = Counted | GoesBack | WentBack | LoadBegins | Uploads | Loaded | Moves | Ends


class Life:
    """The life of one job. ``consistency``: the setting with which it begins."""

    def __init__(self, consistency: Consistency) -> None:
        self.phase = Phase.WAITING
        self.reason = ""
        self.timeline = 0
        self.consistency = consistency
        self.summary = ""
        self.released = False
        self.exit_code = 0

    @property
    def ended(self) -> bool:
        """Whether the job is done, has failed or was stopped. The result of a stopped job may have to be gathered."""
        return self.phase in ENDED

    @property
    def final(self) -> bool:
        """Whether nothing can change the phase any more."""
        return self.phase in (Phase.FAILED, Phase.DONE) or (self.phase is Phase.STOPPED and self.released)

    def handle(self, event: Event) -> bool:
        """Move to the phase that follows; False if the event changes nothing in the present phase."""
        match event, self.phase:
            case Counted(), Phase.WAITING | Phase.INITIALISING:
                return self._counted(event)
            case GoesBack(), Phase.WAITING | Phase.INITIALISING | Phase.RUNNING | Phase.RECOVERING:
                back = event.published or self.phase not in BEFORE
                then = "going back to a checkpoint" if back else "version 0 is uploaded again"
                self._move(Phase.RECOVERING if back else self.phase, f"{event.why}: {then}")
            case WentBack(), Phase.RECOVERING:
                self._move(Phase.RUNNING)
            case LoadBegins(), Phase.RUNNING:
                self._move(Phase.RECOVERING, "the scripts load weights")
            case Moves(), Phase.RUNNING:
                self._move(Phase.RECOVERING, "the model moves to another number of servers")
            case Uploads(), Phase.RECOVERING:
                self._move(Phase.INITIALISING)
            case Loaded(), Phase.INITIALISING:
                self._move(Phase.RUNNING)
            case Ends(), _ if not self.final:
                self._move(event.phase, event.reason)
                self.summary, self.released, self.exit_code = event.summary, event.released, event.exit_code
            case _:
                return False
        return True

    def _counted(self, event: Counted) -> bool:
        before = self.phase, self.reason
        if event.published and not event.missing:
            self._move(Phase.RUNNING)
        else:
            self._move(Phase.INITIALISING if event.model else self.phase, event.missing)
        return before != (self.phase, self.reason)

    def _move(self, phase: Phase, reason: str = "") -> None:
        self.phase, self.reason = phase, reason

    # ---- the timeline and the setting

    def begin_timeline(self, *heard: int) -> int:
        """Begin a timeline above the present one and above those that servers or checkpoints have ``heard`` of."""
        self.timeline = 1 + max([self.timeline, *heard])
        return self.timeline

    def agree(self, consistency: Consistency) -> None:
        """All shards have this setting."""
        self.consistency = consistency

    # ---- an earlier coordinator

    def restore(self, timeline: int) -> None:
        """Go on from the record of an earlier coordinator, or from a checkpoint, on ``timeline``."""
        self.timeline = timeline

    def take_over(self, phase: Phase, reason: str = "") -> None:
        """Go on in the phase in which the servers stand."""
        self._move(phase, reason)

    def begin_again(self, timeline: int, consistency: Consistency) -> None:
        """Begin from the start, on a timeline that no server knows."""
        self._move(Phase.WAITING)
        self.timeline, self.consistency = timeline, consistency
