"""Which schedulers of a script advance when, and the order in which the schedulers of one optimizer have advanced.

Schedulers of one optimizer change the same numbers, one after the other. So all of them are put back together, and they
advance in the order of plain torch: those of a step before or after each update, those between two epochs where the
epoch ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from paramserver import errors
from paramserver.core.versions.ways import MOST_WAYS, Way

# How many schedulers a script may prepare.
MOST = 32


@dataclass(frozen=True, slots=True)
class Advances:
    """The numbers of the schedulers that advance in each step, and of those between two epochs, each in its order.

    ``ways``: of those in each step, where it is not the plainest one, the scheduler and its way.

    >>> Advances((0, 2), (1,)).encode()
    '0 2;1'
    """

    per_step: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    ways: tuple[tuple[int, Way], ...] = ()

    def encode(self) -> str:
        """As text, which is never empty."""
        ways = [number for scheduler, way in self.ways for number in (scheduler, way.number)]
        parts = (self.per_step, self.between, *((ways,) if ways else ()))
        return ";".join(" ".join(map(str, part)) for part in parts)

    def way(self, number: int) -> Way:
        """How this scheduler advances in a step."""
        return dict(self.ways).get(number, Way())

    def with_per_step(self, number: int, way: Way | None = None) -> Advances:
        """This scheduler advances in each step, too; in this ``way`` (None: as it is known, or the plainest)."""
        per_step = self.per_step if number in self.per_step else (*self.per_step, number)
        ways = dict(self.ways)
        if way is not None:
            ways[number] = way
        return replace(self, per_step=per_step, ways=tuple(sorted(pair for pair in ways.items() if pair[1].number)))

    def with_between(self, number: int) -> Advances:
        """This scheduler advances between two epochs, too."""
        return self if number in self.between else replace(self, between=(*self.between, number))


@lru_cache(maxsize=64)  # workers and servers read the same few texts with each contribution
def decode(text: str) -> Advances | None:
    """What :meth:`Advances.encode` has written; None for an empty text. Raises ProtocolError for any other text."""
    if not text:
        return None
    parts = [part.split(" ") if part else [] for part in text.split(";")] if len(text) <= 512 else []
    numbers = [word for part in parts for word in part]
    wrong = errors.ProtocolError(f"{text[:40]!r} does not say which schedulers advance")
    if len(parts) not in (2, 3) or not all(word.isascii() and word.isdigit() and int(word) < MOST for word in numbers):
        raise wrong
    per_step, between, *rest = (tuple(map(int, part)) for part in parts)
    if len(set(per_step)) < len(per_step) or len(set(between)) < len(between):
        raise errors.ProtocolError(f"{text[:40]!r} names a scheduler twice")
    if not rest:
        return Advances(per_step, between)
    chosen, ways = rest[0][::2], rest[0][1::2]
    sound = list(chosen) == sorted(set(chosen)) and set(chosen) <= set(per_step)
    if not (chosen and sound and len(chosen) == len(ways) and all(1 <= way <= MOST_WAYS for way in ways)):
        raise wrong
    return Advances(per_step, between, tuple(zip(chosen, map(Way.of, ways), strict=True)))


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
    """Advance this scheduler once. ``call``: the call of the script; None: it advances with this ``update``, from 0."""

    number: int
    call: Call | None = None
    update: int = 0


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
        # Those that advance before an update, and those that advance after it.
        self._before: tuple[int, ...] = ()
        self._after: tuple[int, ...] = ()
        self._calls: list[Call] = []  # by position, and at one position as they came
        # How many updates, and how many of the calls, the schedulers have advanced by. With ``_ready`` those before the
        # next update have advanced for it.
        self._updates, self._made = 0, 0
        self._ready = False
        # The schedulers have advanced in another order than the calls and numbers now say, and have to begin anew.
        self._stray = False

    @property
    def updates(self) -> int:
        """By how many updates the schedulers of each step have advanced."""
        return self._updates

    def advance_in_steps(self, numbers: tuple[int, ...], before: tuple[int, ...] = ()) -> None:
        """These schedulers advance after each update, in this order, and others ``before`` it."""
        if (before, numbers) != (self._before, self._after):
            self.begin_anew()
            self._before, self._after = before, numbers

    def begin_anew(self) -> None:
        """Schedulers have advanced by other values than are known now."""
        self._stray = self._stray or self._updates > 0 or self._made > 0 or self._ready

    @property
    def _per_step(self) -> bool:
        return bool(self._before or self._after)

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

    def to(self, position: int, epochs: int, begun: bool = False) -> Iterator[Move]:
        """The moves from where the schedulers are to where so many updates and epochs put them.

        ``begun``: the script has a batch of the next update.
        """
        if self._stray or self._beyond(position, epochs, begun):
            self._calls = [call for call in self._calls if not (call.inside and call.position > position)]
            self._stray, self._ready, self._updates, self._made = False, False, 0, 0
            yield Back()
        while True:
            following = self._next(epochs)
            until = position if following is None else min(position, following.position)
            due = self._updates < until or (begun and following is None and self._updates == position)
            if self._before and not self._ready and due:
                self._ready = True
                for number in self._before:
                    yield Advance(number, update=self._updates)
            elif self._per_step and self._updates < until:
                self._ready, self._updates = False, self._updates + 1
                for number in self._after:
                    yield Advance(number, update=self._updates - 1)
            elif following is not None:
                self._made += 1
                yield Advance(following.number, following)
            else:
                return

    def _beyond(self, position: int, epochs: int, begun: bool) -> bool:
        """Whether the schedulers have advanced further."""
        if self._per_step and self._updates + (self._ready and not begun) > position:
            return True
        last = self._calls[self._made - 1] if self._made else None
        return last is not None and (last.epochs > epochs or (last.inside and last.position > position))

    def _next(self, epochs: int) -> Call | None:
        following = self._calls[self._made] if self._made < len(self._calls) else None
        return following if following is not None and following.epochs <= epochs else None


def _position(call: Call) -> int:
    return call.position
