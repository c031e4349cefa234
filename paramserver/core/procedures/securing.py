"""Making a version safe: having it, or a later one, in a complete checkpoint, also if that takes several attempts.

This is what the end of a job, and ``ctx.load``, wait for.
"""

from __future__ import annotations

from dataclasses import dataclass

_RETRY_S = 0.2

# ---- events


@dataclass(frozen=True, slots=True)
class Stands:
    """The answer to :class:`Look`. ``safe``: there is a checkpoint. ``room``: each server can take another copy."""

    safe: bool
    room: bool


@dataclass(frozen=True, slots=True)
class Copied:
    """The answer to :class:`Cut`: all shards copy this version."""

    version: int


@dataclass(frozen=True, slots=True)
class Settled:
    """The answer to :class:`Await`. ``good``: it is a checkpoint. ``again``: if not, the same may work later."""

    good: bool
    again: bool = False


@dataclass(frozen=True, slots=True)
class Later:
    """The command has failed, and may work later."""


@dataclass(frozen=True, slots=True)
class Done:
    """The command has been performed."""


Event = Stands | Copied | Settled | Later | Done

# ---- commands


@dataclass(frozen=True, slots=True)
class Look:
    """Look whether there is a checkpoint, and room for another copy, after ``rest_s`` seconds."""

    rest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Cut:
    """All shards copy the version at which they stand."""


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until the checkpoint of this version is complete or given up."""

    version: int


@dataclass(frozen=True, slots=True)
class Miss:
    """The version cannot be saved: remove what servers have written, and say so."""

    version: int


@dataclass(frozen=True, slots=True)
class End:
    """The version is safe, or :class:`Miss` was performed."""


Command = Look | Cut | Await | Miss | End


class Securing:
    """The way of one version into a checkpoint. All changes go through :meth:`handle`.

    ``look_s``: seconds between two looks at servers that have no room.
    """

    def __init__(self, version: int, look_s: float) -> None:
        self.command: Command = Look()
        self._version, self._look_s = version, look_s
        # The version that is being copied.
        self._reached = -1

    def handle(self, event: Event) -> Command:
        """Take an event in; return the command to perform next."""
        match self.command, event:
            case Look(), Stands(True, _):
                self.command = End()
            case Look(), Stands(_, room):
                # A server without room would skip the version.
                self.command = Cut() if room else Look(self._look_s)
            case Cut(), Copied(version):
                self._reached, self.command = version, Await(version)
            case Await(), Settled(good, again):
                self.command = self._settled(good, again)
            case Look() | Cut() | Await(), Later():
                self.command = Look(_RETRY_S)
            case Miss(), _:
                self.command = End()
        return self.command

    def _settled(self, good: bool, again: bool) -> Command:
        if self._reached >= self._version and good:
            return End()
        if self._reached < self._version or again:  # the shards go on to later versions, or have room soon
            return Look(self._look_s)
        return Miss(self._reached)
