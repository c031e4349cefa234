"""The checkpoints of a job: what becomes of each version that servers copy.

A version is a checkpoint when all shards have written their copies and the manifest is written last. Otherwise it is
given up. The coordinator performs :class:`Command` after command, those of several versions at the same time, and
reports how they ended. What belongs to another timeline than the present one changes nothing.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

# For so many seconds a caller may try a version again that was copied while the mode changed.
CHANGED_S = 120.0
# The same for one that the storage did not take: a place may be away for a moment just when the job ends.
STORAGE_S = 5.0
# Versions of a timeline of which it is known what has become of them.
_VERSIONS = 10_000
# Servers keep a few copies, so nobody speaks of a version that was settled before so many others.
_REMEMBERED = 1000


class Copy(enum.Enum):
    """The state of a shard's copy of a version, as the shard reports it."""

    WRITING = enum.auto()
    SAVED = enum.auto()
    FAILED = enum.auto()
    # The server had no room for another copy.
    SKIPPED = enum.auto()


class State(enum.Enum):
    """Where a version stands."""

    # Some shard copies it.
    COPIED = enum.auto()
    # All shards have written their copies, and the manifest is being written.
    COMPLETING = enum.auto()
    # Some shard could not write its copy, or the manifest could not be written.
    GIVING_UP = enum.auto()
    # It is a checkpoint.
    SAVED = enum.auto()
    # It will never be a checkpoint of this timeline, unless a caller tries again.
    GIVEN_UP = enum.auto()


# ---- events


@dataclass(frozen=True, slots=True)
class Part:
    """The copy of one version on one shard. ``revision``: of the setting under which it was made.

    ``facts``: what the manifest says about the files. Nothing is decided by it.
    """

    timeline: int
    version: int
    copy: Copy
    revision: int = 0
    reason: str = ""
    facts: object = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Reported:
    """A shard tells of all its copies. ``shards``: how many there are. ``revision``: of the setting in force.

    ``newest``: the newest version that the shard has made on the present timeline; -1: none, or it is on another one.
    """

    shard: int
    parts: Sequence[Part]
    shards: int
    revision: int = 0
    newest: int = -1


@dataclass(frozen=True, slots=True)
class Written:
    """The manifest is written. ``nbytes``: of all files."""

    timeline: int
    version: int
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class NotWritten:
    """The manifest could not be written."""

    timeline: int
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Told:
    """:class:`GiveUp` has been performed."""

    timeline: int
    version: int


@dataclass(frozen=True, slots=True)
class NotCopied:
    """Not all shards copy this version, which was named for all."""

    timeline: int
    version: int


Event = Reported | Written | NotWritten | Told | NotCopied

# ---- commands


@dataclass(frozen=True, slots=True)
class WriteManifest:
    """Make sure that no other coordinator leads, then write the manifest. Ends with Written or NotWritten.

    ``parts``: the copies, in the order of shards.
    """

    version: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Announce:
    """The version is a checkpoint: write that down."""

    version: int
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Say that the version will not be a checkpoint. Ends with Told. ``shard``: the one that said so; -1: none."""

    version: int
    reason: str
    shard: int = -1


@dataclass(frozen=True, slots=True)
class SayChanged:
    """Say that the mode or the staleness changed while the shards copied this version."""

    version: int


@dataclass(frozen=True, slots=True)
class SayLost:
    """Say that the ``shard`` has no copy of this version: mostly, a server has died, and its backup was promoted."""

    version: int
    shard: int


@dataclass(frozen=True, slots=True)
class Release:
    """These versions are saved or given up: servers let go of their copies."""

    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prune:
    """Remove old checkpoints, but none of these versions."""

    kept: frozenset[int]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Remove the files of a version that was given up, as soon as no server writes any."""

    version: int


Command = WriteManifest | Announce | GiveUp | SayChanged | SayLost | Release | Prune | Sweep


class Checkpointing:
    """The versions of the present timeline. What servers and storage say goes through :meth:`handle`."""

    def __init__(self) -> None:
        self.timeline = 0
        # The newest version that is a checkpoint; -1: none.
        self._saved_last = -1
        # By version that some shard has copied.
        self._states: dict[int, State] = {}
        # By version that is copied, and by index of the shard: what the shard said last.
        self._parts: dict[int, dict[int, Part]] = {}
        # By version that was given up for a reason that passes: for how many seconds a caller may try again.
        self._again: dict[int, float] = {}

    def begin(self, timeline: int) -> None:
        """The job goes on, on this timeline: nothing that was under way on another one counts."""
        self.timeline = timeline
        self._saved_last = -1
        self._states.clear()
        self._parts.clear()
        self._again.clear()

    def found(self, versions: Sequence[int]) -> None:
        """An earlier coordinator has completed these versions of the present timeline."""
        for version in sorted(versions):
            self._states[version] = State.SAVED
            self._saved_last = max(self._saved_last, version)

    # ---- questions

    def saved(self, version: int) -> bool:
        """Whether this version is a checkpoint."""
        return self._states.get(version) is State.SAVED

    def gave_up(self, version: int) -> bool:
        """Whether this version was given up."""
        return self._states.get(version) is State.GIVEN_UP

    def settled(self, version: int) -> bool:
        """Whether it is known what has become of this version."""
        return self.saved(version) or self.gave_up(version)

    def settling(self, version: int) -> bool:
        """Whether it is about to become known: servers may have let go of their copies."""
        return self._states.get(version) in (State.COMPLETING, State.GIVING_UP)

    def safe(self, version: int) -> bool:
        """Whether a checkpoint of this version or a later one is complete."""
        return self._saved_last >= version

    def given_up(self) -> list[int]:
        """The versions that were given up."""
        return [version for version, state in self._states.items() if state is State.GIVEN_UP]

    def try_again(self, version: int, after_s: float) -> bool:
        """Let a version that was given up be copied once more, if it failed for a reason that passes in time.

        ``after_s``: for how long the caller has tried.
        """
        may = self.gave_up(version) and after_s < self._again.pop(version, 0.0)
        if may:
            del self._states[version]
        return may

    # ---- events

    def handle(self, event: Event) -> tuple[Command, ...]:
        """Take an event in; return the commands that follow. Those about different versions are independent."""
        if isinstance(event, Reported):
            return tuple(self._reported(event))
        if event.timeline != self.timeline:
            return ()
        state = self._states.get(event.version)
        match event, state:
            case Written(_, version, nbytes), State.COMPLETING:
                return self._complete(version, nbytes)
            case NotWritten(_, version, reason), State.COMPLETING:
                self._states[version], self._again[version] = State.GIVING_UP, STORAGE_S
                return (GiveUp(version, reason),)
            case Told(_, version), State.GIVING_UP:
                return self._end(version)
            case NotCopied(_, version), None | State.COPIED | State.GIVEN_UP:
                self._again[version] = math.inf
                return self._end(version)
        return ()

    def _reported(self, event: Reported) -> Iterator[Command]:
        late: list[int] = []
        for part in event.parts:
            if part.timeline != self.timeline:
                continue
            if self.settled(part.version) or not self._has_room(part.version):
                # Also if the copy is still being written: it may wait for a part that no process has any more.
                late.append(part.version)
                continue
            self._states.setdefault(part.version, State.COPIED)
            self._parts.setdefault(part.version, {})[event.shard] = part
            yield from self._judge(part.version, event)
        yield from self._lost(event)
        if late:
            yield Release(tuple(late))
        for version in late:
            if self.gave_up(version):  # a server began its copy after the version was given up
                yield Sweep(version)

    def _has_room(self, version: int) -> bool:
        """Whether a version can be kept. Of those that are done with, the earliest ones go, but not the later half."""
        if version in self._states or len(self._states) < _VERSIONS:
            return True
        done = sorted(other for other in self._states if self.settled(other))[: -_VERSIONS // 2]
        self._drop(done)
        return bool(done)

    def _drop(self, versions: Sequence[int]) -> None:
        """Know no more what has become of these versions."""
        for version in versions:
            del self._states[version]
            self._again.pop(version, None)

    def _lost(self, event: Reported) -> Iterator[Command]:
        """A shard that is past a version and has no copy of it will never have one: a backup was promoted."""
        named = {part.version for part in event.parts}
        copied = [version for version, state in self._states.items() if state is State.COPIED]
        for version in sorted(copied):
            part = self._parts[version].get(event.shard)
            if version < event.newest and version not in named and (part is None or part.copy is not Copy.SAVED):
                self._again[version] = math.inf
                yield SayLost(version, event.shard)
                yield from self._end(version)

    def _judge(self, version: int, event: Reported) -> Iterator[Command]:
        if self._states[version] is not State.COPIED:
            return
        told = self._parts[version]
        broken = {shard: part for shard, part in sorted(told.items()) if part.copy in (Copy.FAILED, Copy.SKIPPED)}
        if broken:
            shard, part = next(iter(broken.items()))
            full = all(one.copy is Copy.SKIPPED for one in broken.values())
            self._again[version] = math.inf if full else STORAGE_S
            self._states[version] = State.GIVING_UP
            yield GiveUp(version, part.reason or "not written", shard)
        elif len(told) == event.shards and all(part.copy is Copy.SAVED for part in told.values()):
            if any(part.revision != event.revision for part in told.values()):
                self._again[version] = CHANGED_S
                yield SayChanged(version)
                yield from self._end(version)
            else:
                self._states[version] = State.COMPLETING
                yield WriteManifest(version, tuple(told[shard] for shard in sorted(told)))

    def _complete(self, version: int, nbytes: int) -> tuple[Command, ...]:
        self._states[version] = State.SAVED
        # Copies of other versions may still be on their way.
        under_way = (State.COPIED, State.COMPLETING, State.GIVING_UP)
        kept = {version, *(other for other, state in self._states.items() if state in under_way)}
        self._forget(version)
        return (Announce(version, nbytes), Release((version,)), Prune(frozenset(kept)))

    def _end(self, version: int) -> tuple[Command, ...]:
        self._states[version] = State.GIVEN_UP
        self._forget(version)
        return (Release((version,)), Sweep(version))

    def _forget(self, version: int) -> None:
        """Forget all reports on this version and earlier ones, and what has become of versions long ago."""
        self._saved_last = max(self._saved_last, version if self.saved(version) else -1)
        self._drop([other for other in self._states if self.settled(other)][:-_REMEMBERED])
        for other in [other for other in self._parts if other <= version]:
            del self._parts[other]
            if self._states.get(other) is State.COPIED:
                del self._states[other]
