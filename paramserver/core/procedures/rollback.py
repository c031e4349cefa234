"""Going back to a checkpoint: the order of the commands, and what follows when one of them fails.

The coordinator performs one :class:`Command` after the other, and reports how it ended. The number of a timeline is
written down before any server hears of it, so that no number is used twice. Each attempt has a timeline of its own.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint that fits the model. ``name``: unique. ``timeline``: the one on which it was made.

    ``elsewhere``: it lies in the place that the job was told to go on from, not in the place of the job's own.
    """

    name: str
    version: int
    timeline: int
    elsewhere: bool = False


# ---- events


@dataclass(frozen=True, slots=True)
class Reason:
    """A shard is gone. ``reached``: the newest version that a shard has reported."""

    reached: int


@dataclass(frozen=True, slots=True)
class Resumes:
    """A new job goes on from a checkpoint."""


@dataclass(frozen=True, slots=True)
class Done:
    """The command has been performed."""


@dataclass(frozen=True, slots=True)
class Told:
    """The answer to :class:`Ask`. ``reached``: the newest version of any shard on the present timeline.

    ``timelines``: those of the shards. ``published``: there was a version, so that a checkpoint is needed. ``saved``:
    the checkpoints to choose from, the newest one first. ``place``: where the job keeps checkpoints, empty: nowhere.
    """

    reached: int
    timelines: tuple[int, ...]
    published: bool
    saved: tuple[Saved, ...] = ()
    place: str = ""


class Kind(enum.Enum):
    """How a command has failed."""

    # A server is on another timeline.
    STRAYED = enum.auto()
    # Another coordinator leads the job.
    REPLACED = enum.auto()
    # The checkpoint cannot be used.
    DAMAGED = enum.auto()
    # The same may work later.
    LATER = enum.auto()
    # The same would fail again.
    FOR_GOOD = enum.auto()


@dataclass(frozen=True, slots=True)
class Failed:
    """The command has failed. ``text``: why."""

    kind: Kind
    text: str


Event = Reason | Resumes | Done | Told | Failed

# ---- commands


@dataclass(frozen=True, slots=True)
class EndOld:
    """End all that goes on of the old timeline. ``again``: the job has just gone back, and another shard is gone."""

    again: bool = False


@dataclass(frozen=True, slots=True)
class AwaitServers:
    """Wait until each seat has a server. ``after_failure``: a little later than at once."""

    after_failure: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask all shards for their timelines and versions, and look for checkpoints. The answer is :class:`Told`."""


@dataclass(frozen=True, slots=True)
class BeginTimeline:
    """Begin a timeline above all that were ``heard`` of, at ``version``, and write its number down."""

    heard: tuple[int, ...]
    version: int


@dataclass(frozen=True, slots=True)
class Restore:
    """All shards restore this checkpoint, and publish it."""

    saved: Saved


@dataclass(frozen=True, slots=True)
class SetUp:
    """No version was published: all shards get ready for version 0, which a worker uploads again."""


@dataclass(frozen=True, slots=True)
class GoOn:
    """All shards have ``version``: let the workers follow. -1: version 0 has to be uploaded.

    ``redone``: the steps that are done again. None: a new job goes on from a checkpoint.
    """

    version: int
    redone: int | None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the job as failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class StepDown:
    """Another coordinator leads the job."""

    reason: str


Command = EndOld | AwaitServers | Ask | BeginTimeline | Restore | SetUp | GoOn | GiveUp | StepDown


class Rollback:
    """The way back of one job, once at a time. All changes go through :meth:`handle`.

    ``patience_s``: so many seconds, failures that may pass are tried again.
    """

    def __init__(self, patience_s: float) -> None:
        # What is being performed; None: the job is not going back.
        self.command: Command | None = None
        # Whether a new job is about to go on from a checkpoint.
        self.resuming = False
        # How often the job went back; the steps that were done again for it.
        self.count = self.steps_redone = 0
        # The newest version before the job went back.
        self.reached = 0
        # Names of checkpoints that cannot be used.
        self.bad: set[str] = set()
        self._patience_s = patience_s
        # Whether another shard has gone since the present attempt began.
        self._again = False
        # The checkpoint of the present attempt; None: version 0 is uploaded again.
        self._chosen: Saved | None = None
        # When the first attempt began, on any clock.
        self._since = 0.0

    def restore(self, count: int, steps_redone: int) -> None:
        """Go on from the record of an earlier coordinator."""
        self.count, self.steps_redone = count, steps_redone

    @property
    def under_way(self) -> bool:
        """Whether the job is going back, or has failed on the way."""
        return self.command is not None

    def handle(self, event: Event, now: float) -> Command | None:
        """Take an event in; return the command to perform next. None: there is none, or one is being performed."""
        match event:
            case Reason(reached):
                return self._reason(reached)
            case Resumes():
                self.resuming = True
                self.command = EndOld()
            case Failed():
                self.command = self._failed(event, now)
            case Told():
                self.command = self._choose(event)
            case Done():
                self.command = self._next(now)
        return self.command

    def _reason(self, reached: int) -> Command | None:
        if self.command is not None:
            self._again = True
            return None
        self.reached = reached
        self.command = EndOld()
        return self.command

    def _next(self, now: float) -> Command | None:
        match self.command:
            case EndOld():
                self._since = now
                return AwaitServers()
            case AwaitServers():
                self._again = False
                return Ask()
            case BeginTimeline():
                return Restore(self._chosen) if self._chosen is not None else SetUp()
            case Restore() | SetUp():
                return AwaitServers() if self._again else self._go_on()
            case GoOn():
                return EndOld(again=True) if self._again else None
        return self.command  # the job has ended here

    def _choose(self, told: Told) -> Command:
        self.reached = max(self.reached, told.reached)
        self._chosen = None
        if told.published or self.resuming:
            self._chosen = next((saved for saved in told.saved if saved.name not in self.bad), None)
            if not told.place:
                return GiveUp("a shard of the model is gone, and there is no checkpoint")
            if self._chosen is None:
                return GiveUp(f"there is no complete checkpoint of this job in {told.place}")
        heard, version = (self._chosen.timeline, self._chosen.version) if self._chosen is not None else (0, 0)
        return BeginTimeline((*told.timelines, heard), version)

    def _go_on(self) -> Command:
        version = self._chosen.version if self._chosen is not None else -1
        if self.resuming:
            self.resuming = False
            return GoOn(version, None)
        redone = max(0, self.reached - version) if version >= 0 else 0
        self.count += 1
        self.steps_redone += redone
        return GoOn(version, redone)

    def _failed(self, event: Failed, now: float) -> Command | None:
        match event.kind:
            case Kind.REPLACED:
                return StepDown(event.text)
            case Kind.STRAYED:
                return AwaitServers(after_failure=True)
            case Kind.DAMAGED if isinstance(self.command, Restore):
                self.bad.add(self.command.saved.name)
                return AwaitServers()
            case Kind.FOR_GOOD:
                return GiveUp(event.text)
        if now - self._since <= self._patience_s:
            return AwaitServers(after_failure=True)
        return GiveUp(f"it was tried for {self._patience_s:g} s (cluster.max_idle_s), the last time with: {event.text}")
