"""Having all shards copy one version: the order of the commands, and what follows when one of them fails.

Synchronous shards make the same versions, each at its own time. So a version is named that none of them has made, and
each copies it when it makes it. At the end of a job, and in asynchronous mode, the shards have to stand at one version
with the same slices counted. In asynchronous mode workers are held back until then.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from paramserver import errors

# ---- events


@dataclass(frozen=True, slots=True)
class Done:
    """The command has been performed."""


@dataclass(frozen=True, slots=True)
class Told:
    """The answer to :class:`Ask`: the versions of all shards.

    ``even``: they stand at one version of one timeline. ``saved``: this version is a checkpoint already.
    """

    versions: Collection[int]
    even: bool = False
    saved: bool = False


@dataclass(frozen=True, slots=True)
class Compared:
    """The answer to :class:`Compare`. ``same``: all shards have counted the same slices."""

    same: bool


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to :class:`Copy`: how many shards copy the version, and how many do not."""

    taken: int
    refused: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The command has failed, or was cancelled."""

    error: BaseException


Event = Done | Told | Compared | Answered | Failed

# ---- commands


@dataclass(frozen=True, slots=True)
class Hold:
    """Shards accept no contribution of another slice."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask all shards for their versions. ``again``: in a moment."""

    again: bool = False


@dataclass(frozen=True, slots=True)
class Compare:
    """Ask all shards which slices they have counted."""


@dataclass(frozen=True, slots=True)
class Copy:
    """All shards copy this version. A shard that has no such version any more refuses."""

    version: int


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Shards that copy this version let go of it, since others do not, or may not."""

    version: int


@dataclass(frozen=True, slots=True)
class LetGo:
    """Shards accept contributions again."""


@dataclass(frozen=True, slots=True)
class End:
    """All shards copy this version, or it is a checkpoint."""

    version: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Raise the error."""

    error: BaseException


Command = Hold | Ask | Compare | Copy | TakeBack | LetGo | End | GiveUp


class Cutting:
    """One attempt. All changes go through :meth:`handle`, the first command is :attr:`command`.

    ``ahead``: name a version that no shard has made. ``hold``: hold workers back. ``multiple``: only its multiples may
    be named ahead. The attempt ends ``limit_s`` seconds after ``now``.
    """

    def __init__(self, ahead: bool, hold: bool, now: float, limit_s: float, multiple: int = 1) -> None:
        assert not (ahead and hold), "a version that lies ahead is not waited for"
        self.command: Command = Hold() if hold else Ask()
        self._ahead, self._hold, self._multiple = ahead, hold, max(1, multiple)
        self._limit_s, self._deadline = limit_s, now + limit_s
        # Versions from the newest one to the version that is named; raised when some shard has passed it.
        self._margin = 1
        # Even shards: the version at which they stood when they were last asked; -1: they did not.
        self._last = -1
        # Why not all shards could be told to copy the version.
        self._error: BaseException | None = None
        # How the attempt ends when shards have been told to go on.
        self._outcome: End | GiveUp | None = None

    @property
    def over(self) -> bool:
        """Whether the attempt has ended."""
        return isinstance(self.command, (End, GiveUp))

    def handle(self, event: Event, now: float) -> Command:
        """Take an event in; return the command to perform next."""
        match self.command, event:
            case TakeBack(), _:
                if isinstance(event, Failed):
                    self._error = self._error or event.error
                self.command = self._next(now) if self._error is None else self._end(GiveUp(self._error))
            case LetGo(), Failed(error):  # the caller is gone; shards are told nevertheless
                self.command = GiveUp(error)
            case LetGo(), _ if self._outcome is not None:
                self.command = self._outcome
            case Copy(version), Failed(error):  # some shards may have heard of it
                self._error, self.command = error, TakeBack(version)
            case _, Failed(error):
                self.command = self._end(GiveUp(error))
            case Hold(), _:
                self.command = Ask()
            case Ask(), Told():
                self.command = self._name(event) if self._ahead else self._look(event, now)
            case Compare(), Compared(same):
                self.command = Copy(self._last) if same else self._next(now)
            case Copy(version), Answered(taken, refused):
                self.command = self._copied(version, taken, refused, now)
        return self.command

    def _name(self, told: Told) -> Command:
        version = max(told.versions) + self._margin
        return Copy(-(-version // self._multiple) * self._multiple)

    def _look(self, told: Told, now: float) -> Command:
        version = max(told.versions) if told.even else -1
        # Contributions that were accepted before workers were held back may still make a version.
        quiet, self._last = version == self._last, version
        if version < 0 or (self._hold and not quiet):
            return self._next(now)
        return self._end(End(version)) if told.saved else Compare()

    def _copied(self, version: int, taken: int, refused: int, now: float) -> Command:
        if taken and not refused:
            return self._end(End(version))
        if self._ahead:
            self._margin *= 4
            return TakeBack(version)
        return TakeBack(version) if taken else self._next(now)

    def _next(self, now: float) -> Command:
        if now <= self._deadline:
            return Ask(again=not self._ahead)
        why = (
            "no version could be named in advance" if self._ahead else "the shards did not come to stand at one version"
        )
        return self._end(GiveUp(errors.DeadlineError(f"{why} within {self._limit_s:g} s")))

    def _end(self, outcome: End | GiveUp) -> Command:
        """Nothing may keep workers held back: also if it is not known whether any shard holds them."""
        if not self._hold:
            return outcome
        self._outcome = outcome
        return LetGo()
