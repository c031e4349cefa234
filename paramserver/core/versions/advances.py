"""Which schedulers of a script advance when, and the order in which the schedulers of one optimizer have advanced.

Schedulers of one optimizer change the same numbers, one after the other. So all of them are put back together, and they
advance in the order of plain torch: those of a step after each update, those between two epochs where the epoch ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from paramserver import errors

# How many schedulers a script may prepare.
MOST = 32


@dataclass(frozen=True, slots=True)
class Advances:
    """The numbers of the schedulers that advance in each step, and of those between two epochs, each in its order.

    >>> Advances((0, 2), (1,)).encode()
    '0 2;1'
    """

    per_step: tuple[int, ...] = ()
    between: tuple[int, ...] = ()

    def encode(self) -> str:
        """As text, which is never empty."""
        return ";".join(" ".join(map(str, part)) for part in (self.per_step, self.between))

    def with_per_step(self, number: int) -> Advances:
        """This scheduler advances in each step, too."""
        return self if number in self.per_step else replace(self, per_step=(*self.per_step, number))

    def with_between(self, number: int) -> Advances:
        """This scheduler advances between two epochs, too."""
        return self if number in self.between else replace(self, between=(*self.between, number))


@lru_cache(maxsize=64)  # workers and servers read the same few texts with each contribution
def decode(text: str) -> Advances | None:
    """What :meth:`Advances.encode` has written; None for an empty text. Raises ProtocolError for any other text."""
    if not text:
        return None
    parts = [part.split(" ") if part else [] for part in text.split(";")] if len(text) <= 256 else []
    numbers = [word for part in parts for word in part]
    if len(parts) != 2 or not all(word.isascii() and word.isdigit() and int(word) < MOST for word in numbers):
        raise errors.ProtocolError(f"{text[:40]!r} does not say which schedulers advance")
    per_step, between = (tuple(map(int, part)) for part in parts)
    if len(set(per_step)) < len(per_step) or len(set(between)) < len(between):
        raise errors.ProtocolError(f"{text[:40]!r} names a scheduler twice")
    return Advances(per_step, between)


@dataclass(frozen=True, slots=True)
class Call:
    """The script has called ``step()`` of a scheduler between two epochs, or (``inside``) in the loop with arguments.

    ``epochs``: so many epochs were over. ``position``: so many updates were done. ``given``: the arguments.
    """

    number: int
    epochs: int
    position: int
    given: Any = None
    inside: bool = False


@dataclass(frozen=True, slots=True)
class Back:
    """Put all schedulers and the optimizer's hyper-parameters back to where they began."""


@dataclass(frozen=True, slots=True)
class Advance:
    """Advance this scheduler once. ``call``: the call of the script; None: an update has been made."""

    number: int
    call: Call | None = None


Move = Back | Advance


class Advancing:
    """The advances of the schedulers of one optimizer, in order, up to where the job stands.

    >>> line = Advancing()
    >>> line.advance_in_steps((0,))
    >>> line.record(Call(1, epochs=1, position=2))
    >>> [move.number for move in line.to(position=3, epochs=1)]
    [0, 0, 1, 0]
    """

    def __init__(self) -> None:
        self._per_step: tuple[int, ...] = ()
        self._calls: list[Call] = []  # by position, and at one position as they came
        # How many updates, and how many of the calls, the schedulers have advanced by.
        self._updates, self._made = 0, 0
        # The schedulers have advanced in another order than the calls and numbers now say, and have to begin anew.
        self._stray = False

    @property
    def updates(self) -> int:
        """By how many updates the schedulers of each step have advanced."""
        return self._updates

    def advance_in_steps(self, numbers: tuple[int, ...]) -> None:
        """These schedulers advance with each update, in this order."""
        if numbers != self._per_step:
            self._stray = self._stray or self._updates > 0 or self._made > 0
            self._per_step = numbers

    def record(self, call: Call) -> None:
        """The script makes this call, or has made it earlier in the job; the next `to` advances by it."""
        index = bisect_right(self._calls, call.position, key=_position)
        self._calls.insert(index, call)
        if index < self._made or (self._per_step and call.position < self._updates):
            self._stray = True

    def forget(self, epochs: int) -> None:
        """The script does all epochs after the first ``epochs`` again, and will make their calls again."""
        kept = [call for call in self._calls if call.epochs <= epochs]
        if len(kept) < len(self._calls):
            self._stray = self._stray or any(call.epochs > epochs for call in self._calls[: self._made])
            self._calls = kept

    def to(self, position: int, epochs: int) -> Iterator[Move]:
        """The moves from where the schedulers are to where so many updates and epochs put them."""
        if self._stray or self._beyond(position, epochs):
            self._calls = [call for call in self._calls if not (call.inside and call.position > position)]
            self._stray, self._updates, self._made = False, 0, 0
            yield Back()
        while True:
            following = self._next(epochs)
            until = position if following is None else min(position, following.position)
            if self._per_step and self._updates < until:
                self._updates += 1
                for number in self._per_step:
                    yield Advance(number)
            elif following is not None:
                self._made += 1
                yield Advance(following.number, following)
            else:
                return

    def _beyond(self, position: int, epochs: int) -> bool:
        """Whether the schedulers have advanced further."""
        if self._per_step and self._updates > position:
            return True
        last = self._calls[self._made - 1] if self._made else None
        return last is not None and (last.epochs > epochs or (last.inside and last.position > position))

    def _next(self, epochs: int) -> Call | None:
        following = self._calls[self._made] if self._made < len(self._calls) else None
        return following if following is not None and following.epochs <= epochs else None


def _position(call: Call) -> int:
    return call.position
