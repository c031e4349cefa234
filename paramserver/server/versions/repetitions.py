"""Pushes that were counted, so that a worker that repeats one learns that its own contribution counts."""

from __future__ import annotations

from paramserver.core.versions.events import Outcome
from paramserver.core.versions.names import Name

# Names whose nonce is kept. A repetition comes within seconds, or after a reconnect; this is many steps.
_REMEMBERED = 10_000


class Repetitions:
    """The nonces of pushes that wait for their answer, by call, and of those that were counted last, by name."""

    def __init__(self) -> None:
        self._pushing: dict[int, tuple[Name, int]] = {}
        self._counted: dict[Name, int] = {}

    def pushed(self, call: int, name: Name, nonce: int) -> None:
        """A contribution waits for its answer. ``nonce``: the same if it is sent again; 0: unknown."""
        self._pushing[call] = name, nonce

    def answered(self, call: int, outcome: Outcome | None) -> None:
        """A push has its answer. ``outcome``: None if it was refused."""
        name, nonce = self._pushing.pop(call, (None, 0))
        if name is not None and outcome is Outcome.ACCEPTED:
            self.note(name, nonce)

    def note(self, name: Name, nonce: int) -> None:
        """A contribution counts that came with this nonce."""
        self._counted[name] = nonce
        if len(self._counted) > _REMEMBERED:
            del self._counted[next(iter(self._counted))]

    def counted(self, name: Name, nonce: int) -> bool:
        """Whether the contribution that counted under this name came with this nonce."""
        return self._counted.get(name) == nonce != 0
