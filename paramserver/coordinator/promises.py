"""What the job has promised and does not keep: for the time being (troubles), or for good (broken promises)."""

from __future__ import annotations

from collections.abc import Mapping


class Promises:
    """Two lists of sentences, each under a key, so that whoever wrote a sentence can take it back.

    A *trouble* makes the job ``degraded`` in `status` for as long as it lasts, such as a checkpoint that is overdue. A
    *broken promise* makes the run end with an exit code other than 0, such as a last checkpoint that is missing.
    Sentences say what happened and what to do.
    """

    def __init__(self) -> None:
        self._troubles: dict[str, str] = {}
        self._broken: dict[str, str] = {}

    @property
    def troubles(self) -> Mapping[str, str]:
        """The troubles that last, by key."""
        return self._troubles

    @property
    def broken(self) -> Mapping[str, str]:
        """The promises that are broken for good, by key."""
        return self._broken

    def trouble(self, key: str, sentence: str) -> None:
        """Something is wrong from now on, until :meth:`over` is called with the same key."""
        self._troubles[key] = sentence

    def over(self, key: str) -> None:
        """The trouble with this key is over; nothing happens if there is none."""
        self._troubles.pop(key, None)

    def broke(self, key: str, sentence: str) -> None:
        """A promise is broken: the run is not to end with exit code 0."""
        self._broken[key] = sentence

    def kept(self, key: str) -> None:
        """The promise with this key is kept after all; nothing happens if it was not broken."""
        self._broken.pop(key, None)

    def restore(self, broken: Mapping[str, str]) -> None:
        """Go on with the broken promises that an earlier coordinator has written down."""
        self._broken = dict(broken)
