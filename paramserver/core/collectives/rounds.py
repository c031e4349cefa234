"""The rounds of process groups on one server, as a state machine.

A *round* is one piece of a collective, such as four megabytes of an all-reduce. All of its ranks come to it, each with
a contribution or without one. When the last rank has come, the round is complete. The result is made from the
contributions in the order of ranks, so the order in which ranks arrive changes nothing.

A rank may repeat what it has sent, since an answer may be lost. Therefore a round stays known until all of its ranks
have said that they have its result.

The slices of a step have rounds, too: a slice then is a rank of the group of its timeline, whoever computes the slice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

# More is a mistake or an attack.
MAX_RANKS = 65_536
# Groups at a time, and numbers that are kept of all ranks and channels of a group.
MAX_GROUPS, MAX_NUMBERS = 4096, 1 << 20


class RoundsError(ValueError):
    """The request of a rank is refused; the text says why, in words for the user."""


class StepOverError(RoundsError):
    """A slice of a step that is over, whose rounds are forgotten: nobody comes there any more."""


class UnknownGroupError(RoundsError):
    """The group has not opened at this server: another process was here when it did."""


@dataclass(frozen=True, slots=True, order=True)
class RoundName:
    """``number``: counts the rounds of ``channel``: "" for those of all ranks, otherwise messages between two ranks."""

    group: str
    channel: str
    number: int
    piece: int


@dataclass(frozen=True, slots=True)
class Terms:
    """On what all ranks of a round must agree. ``what``: the collective in words. ``ranks``: in rising order.

    ``nbytes``: of each contribution. ``kind``: what a rank is, in words.
    """

    what: str
    ranks: Sequence[int]
    reduction: int
    dtype: str
    nbytes: int
    kind: str = "rank"


@dataclass(frozen=True, slots=True)
class Complete:
    """All ranks of a round are there: make the result from the contributions of ``givers``, in this order."""

    name: RoundName
    givers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The ranks of a round disagree: all of them are told ``why``."""

    name: RoundName
    why: str


@dataclass(frozen=True, slots=True)
class Forget:
    """No rank will ask for these rounds again."""

    names: tuple[RoundName, ...]


Effect = Complete | Refused | Forget


@dataclass(slots=True)
class _Round:
    terms: Terms
    first: int
    came: dict[int, bool] = field(default_factory=dict)
    # Why the ranks disagree; empty while they agree.
    refused: str = ""


@dataclass(slots=True)
class _Group:
    size: int
    # Numbers below which a rank has all results, by channel and rank.
    done: dict[str, dict[int, int]] = field(default_factory=dict)
    numbers: int = 0
    names: dict[str, set[RoundName]] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    used_at: float = 0.0


class Rounds:
    """All rounds of all groups on one server. Times are seconds of any clock."""

    def __init__(self, idle_s: float) -> None:
        """``idle_s``: a group from which nothing was heard for so long is forgotten when another group opens."""
        self._idle_s = idle_s
        self._groups: dict[str, _Group] = {}
        self._rounds: dict[RoundName, _Round] = {}
        # Of the group of slices, if there is one: the timeline, and the group's name.
        self._timeline: tuple[int, str] | None = None

    @property
    def groups(self) -> int:
        """How many groups are known."""
        return len(self._groups)

    @property
    def known(self) -> int:
        """How many rounds are known."""
        return len(self._rounds)

    def open(self, group: str, size: int, now: float) -> list[Effect]:
        """A rank opens its group of ``size`` ranks. Raises RoundsError if another rank has given another size."""
        if not 1 <= size <= MAX_RANKS:
            raise RoundsError(f"a process group of {size} ranks: 1 to {MAX_RANKS} are possible")
        effects = self._forget_idle(now)
        if group not in self._groups and len(self._groups) >= MAX_GROUPS:
            effects += self._forget(min(self._groups, key=lambda name: self._groups[name].used_at))
        found = self._groups.setdefault(group, _Group(size, used_at=now))
        if found.size != size:
            raise RoundsError(f"one rank says that the group has {found.size} ranks, another one says {size}")
        return effects

    def follow(self, timeline: int, size: int, now: float) -> tuple[str, list[Effect]]:
        """A slice comes in this timeline, in which a step has ``size`` slices or fewer. Returns the name of its group.

        The group of an earlier timeline is forgotten. Raises RoundsError if this timeline is an earlier one.
        """
        former = self._timeline
        if former is not None and timeline < former[0]:
            raise RoundsError(f"the job has gone back: timeline {timeline} is over, and timeline {former[0]} has begun")
        name, effects = f"slices of timeline {timeline}", list[Effect]()
        if former is not None and timeline > former[0]:
            effects += self._forget(former[1])
        effects += self.open(name, size, now)
        self._timeline = timeline, name
        return name, effects

    def come(
        self, name: RoundName, terms: Terms, rank: int, gives: bool, now: float, done: int | None = None
    ) -> list[Effect]:
        """``rank`` comes to a round, with a contribution or without one.

        ``done``: the rank has the results of all rounds of this channel below this number. Raises UnknownGroupError,
        StepOverError, and RoundsError for a rank that does not belong to the round.
        """
        group = self._groups.get(name.group)
        if group is None:
            raise UnknownGroupError("this server does not know the process group")
        group.used_at = now
        if rank not in terms.ranks or not _within(terms.ranks, group.size):
            raise RoundsError(
                f"{terms.kind} {rank} does not belong to {terms.what} of {terms.kind}s {_listed(terms.ranks)}"
            )
        if terms.kind == "slice" and name.number < max(group.done.get(name.channel, {}).values(), default=0):
            raise StepOverError(f"{terms.what}: the step is over, other workers have computed its slices")
        effects = self._is_done(group, name, terms, rank, name.number if done is None else done)
        found = self._rounds.get(name)
        if found is None:
            found = self._rounds[name] = _Round(terms, rank)
            group.names.setdefault(name.channel, set()).add(name)
        elif not found.refused and found.terms != terms:
            found.refused = _difference(found, rank, terms)
            effects.append(Refused(name, found.refused))
        if found.refused or rank in found.came:
            return effects
        found.came[rank] = gives
        if len(found.came) == len(found.terms.ranks):
            effects.append(Complete(name, tuple(one for one in found.terms.ranks if found.came[one])))
        return effects

    def missing(self, name: RoundName) -> tuple[int, ...]:
        """The ranks that have not come to a round."""
        found = self._rounds.get(name)
        return tuple(rank for rank in found.terms.ranks if rank not in found.came) if found is not None else ()

    def refusal(self, name: RoundName) -> str:
        """Why the ranks of a round disagree; empty if they do not."""
        found = self._rounds.get(name)
        return found.refused if found is not None else ""

    def late(self, name: RoundName, wait_s: float) -> str:
        """In words: for which ranks a round has waited in vain."""
        ranks, found = self.missing(name), self._rounds.get(name)
        what = found.terms.what if found is not None else "the collective"
        return (
            f"{what} has waited {wait_s:g} s for rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)}: look there "
            "for an error, or for a collective that is left out"
        )

    def leave(self, group: str, rank: int) -> list[Effect]:
        """``rank`` will not come any more. When all ranks have left, the group is forgotten."""
        found = self._groups.get(group)
        if found is None or not 0 <= rank < found.size:
            return []
        found.left.add(rank)
        return self._forget(group) if len(found.left) >= found.size else []

    def drop(self, names: Collection[RoundName]) -> list[Effect]:
        """Forget these rounds: nobody waits for them any more. A rank that comes after all begins its round anew."""
        gone = tuple(name for name in names if name in self._rounds)
        for name in gone:
            del self._rounds[name]
            group = self._groups[name.group]
            group.names[name.channel].discard(name)
            if not group.names[name.channel]:
                del group.names[name.channel]
        return [Forget(gone)] if gone else []

    def _is_done(self, group: _Group, name: RoundName, terms: Terms, rank: int, number: int) -> list[Effect]:
        done = group.done.get(name.channel, {})
        if number <= done.get(rank, 0):
            return []
        if rank not in done:
            if group.numbers >= MAX_NUMBERS:
                raise RoundsError(f"a process group has {group.numbers} numbers of ranks and channels, and no more fit")
            group.numbers += 1
        done[rank] = number
        group.done[name.channel] = done
        least = min(done.get(one, 0) for one in terms.ranks)
        return self.drop(sorted(one for one in group.names.get(name.channel, ()) if one.number < least))

    def _forget_idle(self, now: float) -> list[Effect]:
        idle = [name for name, group in self._groups.items() if now - group.used_at > self._idle_s]
        return [effect for name in idle for effect in self._forget(name)]

    def _forget(self, group: str) -> list[Effect]:
        if group not in self._groups:
            return []
        names = tuple(sorted(name for mine in self._groups.pop(group).names.values() for name in mine))
        for name in names:
            del self._rounds[name]
        return [Forget(names)] if names else []


def _within(ranks: Sequence[int], size: int) -> bool:
    """Whether all ranks are ranks of a group of this size."""
    if isinstance(ranks, range):
        return ranks.stop <= size
    return all(0 <= one < size for one in ranks)


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} others" if len(ranks) > 8 else shown


def _difference(found: _Round, rank: int, terms: Terms) -> str:
    first, second, kind = found.terms.what, terms.what, terms.kind
    if first == second:
        first, second = (
            f"{one.what} with {one.nbytes} bytes of {one.kind}s {_listed(one.ranks)}" for one in (found.terms, terms)
        )
    return (
        f"{kind} {found.first} calls {first}, and {kind} {rank} calls {second}: all {kind}s must call the same "
        "collectives in the same order, with tensors of the same size and type"
    )
