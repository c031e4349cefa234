"""Which slots of a server's shared weights are in use: by versions, and by workers that read from them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable


class Slots:
    """``count`` slots. Not thread-safe, but for :meth:`drop`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._versions: Counter[int] = Counter()
        self._readers: dict[int, set[int]] = {}
        self._useless: set[int] = set()
        self._dropped: deque[int] = deque()

    def take(self) -> int | None:
        """A slot that nobody uses, for a version; None if there is none."""
        self._settle()
        used = self._useless.union(self._versions, *self._readers.values())
        slot = next((slot for slot in range(self._count) if slot not in used), None)
        if slot is not None:
            self._versions[slot] += 1
        return slot

    def use(self, slot: int) -> None:
        """One more version lies in a slot: with the same weights as the one that lies there."""
        self._versions[slot] += 1

    def drop(self, slot: int) -> None:
        """A version is gone, or was never made. From any thread."""
        self._dropped.append(slot)

    def limit(self, slots: Iterable[int]) -> None:
        """There is memory for these slots only: give out no others any more."""
        self._useless = set(range(self._count)).difference(slots)

    def join(self, reader: int, former: Iterable[int] = ()) -> None:
        """A reader that reads from no slot yet, or from the slots of the ``former`` readers that it replaces."""
        self._readers[reader] = {slot for one in former for slot in self._readers.pop(one, ())}

    def reads(self, reader: int, slots: Iterable[int]) -> None:
        """``reader`` reads from these slots and from no others."""
        self._readers[reader] = set(slots)

    def lend(self, reader: int, slot: int) -> None:
        """A reader may read from this slot, too."""
        self._readers[reader].add(slot)

    def leave(self, reader: int) -> None:
        """A reader is gone."""
        self._readers.pop(reader, None)

    @property
    def used(self) -> frozenset[int]:
        """The slots in which a version lies, or from which a reader reads."""
        self._settle()
        return frozenset(self._versions).union(*self._readers.values())

    def _settle(self) -> None:
        while self._dropped:
            slot = self._dropped.popleft()
            self._versions[slot] -= 1
            assert self._versions[slot] >= 0, f"slot {slot} was dropped more often than used"
            if not self._versions[slot]:
                del self._versions[slot]
