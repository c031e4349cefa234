"""The weights that one worker pulls for all workers of its host: which versions lie there, and who reads them.

A version lies in a slot, as on a server (`slots`). The slot is used again when a newer version has come and no reader
reads it any more. There is one pull at a time. It begins when the first reader wants a version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from paramserver.core.layout.slots import Slots


@dataclass(frozen=True, slots=True)
class Wants:
    """A reader wants ``version`` or a later one, and reads from the slots ``reading`` and from no others."""

    reader: int
    call: int
    version: int
    reading: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GivesUp:
    """The reader does not wait for the answer to this call any more."""

    call: int


@dataclass(frozen=True, slots=True)
class Leaves:
    """A reader is gone."""

    reader: int


@dataclass(frozen=True, slots=True)
class Came:
    """The pull has brought this version, which lies in the slot of the pull."""

    version: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The pull has brought nothing, and nothing writes to its slot any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Pull ``version`` or a later one into ``slot``. `Came` or `Failed` follows."""

    version: int
    slot: int


@dataclass(frozen=True, slots=True)
class Give:
    """The answer to a call: ``version`` lies in ``slot``."""

    call: int
    version: int
    slot: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The answer to a call: its reader has to pull by itself, for this reason."""

    call: int
    reason: str


Event: TypeAlias = Wants | GivesUp | Leaves | Came | Failed
Effect: TypeAlias = Begin | Give | Refuse


class HostWeights:
    """The state. ``slots``: how many slots there are."""

    def __init__(self, slots: int) -> None:
        self._slots = Slots(slots)
        self._readers: set[int] = set()
        # The newest version that lies here, and its slot.
        self._newest: tuple[int, int] | None = None
        # The slot of the pull that is under way.
        self._pulling: int | None = None
        # By call, in order.
        self._waiting: dict[int, Wants] = {}

    @property
    def used(self) -> frozenset[int]:
        """The slots in which something lies that is needed, or is about to."""
        return self._slots.used

    def handle(self, event: Event) -> list[Effect]:
        """Take an event in; return the effects, in order."""
        match event:
            case Wants(reader, call, _, reading):
                if reader not in self._readers:
                    self._readers.add(reader)
                    self._slots.join(reader)
                self._slots.reads(reader, reading)
                self._waiting[call] = event
            case GivesUp(call):
                self._waiting.pop(call, None)
            case Leaves(reader):
                self._readers.discard(reader)
                self._slots.leave(reader)
                self._waiting = {call: one for call, one in self._waiting.items() if one.reader != reader}
            case Came(version):
                assert self._pulling is not None, "a version comes by a pull"
                former, self._newest, self._pulling = self._newest, (version, self._pulling), None
                if former is not None:
                    self._slots.drop(former[1])
            case Failed(reason):
                assert self._pulling is not None, "a pull fails that has begun"
                self._slots.drop(self._pulling)
                self._pulling = None
                return self._refuse(reason)
        return self._go_on()

    def _go_on(self) -> list[Effect]:
        """Answer the calls that can be answered, and begin a pull for the others."""
        effects: list[Effect] = []
        for call, one in list(self._waiting.items()):
            if self._newest is not None and self._newest[0] >= one.version:
                version, slot = self._newest
                self._slots.lend(one.reader, slot)
                effects.append(Give(call, version, slot))
                del self._waiting[call]
        if self._waiting and self._pulling is None:
            self._pulling = self._slots.take()
            if self._pulling is None:
                return [*effects, *self._refuse("its readers use all the memory that it has for weights")]
            effects.append(Begin(min(one.version for one in self._waiting.values()), self._pulling))
        return effects

    def _refuse(self, reason: str) -> list[Effect]:
        calls, self._waiting = list(self._waiting), {}
        return [Refuse(call, reason) for call in calls]
