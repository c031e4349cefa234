"""Strangers at a port: connections whose callers have not shown yet who they are, and which of them has to give way."""

from __future__ import annotations

# An address with more than this part of all places has to give way to others.
_SHARE = 8


class Crowd:
    """The strangers of one port. A key stands for a connection, an address for the machine that it comes from.

    While there are more than ``most``, the address with the most strangers gives way, its oldest connection first: a
    member shows a token at once, so its connection is never old. If many addresses have a few strangers each, they are
    members that begin at the same time. Then the newcomer has to try again.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # Address -> its strangers, the oldest first. Stranger -> its address.
        self._at: dict[str, dict[int, None]] = {}
        self._of: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, key: int) -> bool:
        return key in self._of

    def come(self, key: int, address: str) -> int | None:
        """A stranger has come. Returns the stranger that has to give way, which may be this one; None: there is room.

        The stranger that gives way is no part of the crowd any more.
        """
        assert key not in self._of, "a connection comes once"
        self._of[key] = address
        self._at.setdefault(address, {})[key] = None
        if len(self._of) <= self._most:
            return None
        largest = self._largest()
        return self.oldest() if len(self._at[largest]) * _SHARE > self._most else self._leave(key)

    def gone(self, key: int) -> None:
        """A stranger has shown who it is, or has hung up. May be repeated."""
        if key in self._of:
            self._leave(key)

    def oldest(self) -> int | None:
        """Take the stranger out that gives way first if there must be fewer of them; None: there is none."""
        return self._leave(next(iter(self._at[self._largest()]))) if self._of else None

    def keep(self, present: set[int]) -> None:
        """Forget all strangers that are not ``present``."""
        for key in [key for key in self._of if key not in present]:
            self._leave(key)

    def _largest(self) -> str:
        return max(self._at, key=lambda address: len(self._at[address]))

    def _leave(self, key: int) -> int:
        address = self._of.pop(key)
        del self._at[address][key]
        if not self._at[address]:
            del self._at[address]
        return key
