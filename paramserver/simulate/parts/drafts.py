"""A simulated server's next version before its step is complete, piece by piece, as in `server.versions.drafting`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paramserver.core.versions.names import Name, SyncName
from paramserver.simulate.machinery.blame import Chain


@dataclass(slots=True, eq=False)
class Coming:
    """A contribution that has begun to arrive. ``came``: which pieces of it are there."""

    name: Name
    worker: int
    came: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Draft:
    """What the next version will be if it is made of ``parts``. ``lacking``: by piece, how many have not brought it."""

    parts: Sequence[Coming]
    lacking: list[int]
    made: list[int] = field(default_factory=list)


class Drafts:
    """The draft of a server whose part of the model is cut into ``pieces``; ``make`` begins to compute one of them."""

    def __init__(self, pieces: int, make: Callable[[Draft, int, Chain], None]) -> None:
        self.draft: Draft | None = None
        self._pieces, self._make = pieces, make
        self._parts: list[Coming] = []
        self._covered: set[int] = set()  # slices
        self._drafted: set[Coming] = set()

    def begins(self, part: Coming, chain: Chain) -> None:
        """A contribution to the next version begins to arrive; somebody may be quicker with the same slices."""
        name = part.name
        assert isinstance(name, SyncName)
        slices = range(name.lo, name.hi)
        if not self._covered.isdisjoint(slices):
            return
        self._parts.append(part)
        self._covered.update(slices)
        if len(self._covered) < name.of:
            return
        self._drafted = set(self._parts)
        lacking = [sum(piece not in one.came for one in self._parts) for piece in range(self._pieces)]
        draft = self.draft = Draft(tuple(self._parts), lacking)
        for piece, number in enumerate(lacking):
            if not number:
                self._make(draft, piece, chain)

    def came(self, part: Coming, piece: int, chain: Chain) -> None:
        """A piece of a contribution is there."""
        part.came.add(piece)
        draft = self.draft
        if draft is not None and part in self._drafted:
            draft.lacking[piece] -= 1
            if not draft.lacking[piece]:
                self._make(draft, piece, chain)

    def take(self, parts: Sequence[Coming]) -> Draft | None:
        """The draft, if it was made of just these; the next contributions belong to another one."""
        draft, drafted = self.draft, self._drafted
        self.draft, self._parts, self._covered, self._drafted = None, [], set(), set()
        return draft if drafted == set(parts) else None
