"""A change of mode or staleness of a running job: the order of the commands, and what follows when one of them fails.

The change is prepared on all shards, and then committed on all, at a version boundary that is the same on every shard.
In between no shard publishes the version of the boundary. Until the first commit the change can be taken back.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from paramserver import errors
from paramserver.core.versions.consistency import Consistency, Mode

# Versions from the newest version to the boundary. Doubled when some shard was past the boundary.
_MARGIN = 2
_ATTEMPTS = 12

# ---- events


@dataclass(frozen=True, slots=True)
class Wished:
    """A setting is wished for. ``now``: the setting in force. ``leased``: workers hold leases of slices."""

    setting: Consistency
    now: Consistency
    leased: bool = False


@dataclass(frozen=True, slots=True)
class Agreed:
    """An earlier coordinator has committed this setting on all shards. ``now``: the setting in force."""

    setting: Consistency
    now: Consistency


@dataclass(frozen=True, slots=True)
class Done:
    """The command has been performed."""


@dataclass(frozen=True, slots=True)
class Told:
    """The answer to :class:`Ask` and :class:`AwaitBoundary`: the versions of all shards."""

    versions: Collection[int]


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to :class:`Prepare`. ``by_all``: no shard was past the boundary."""

    by_all: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The command has failed, or was cancelled."""

    error: BaseException


Event = Wished | Agreed | Done | Told | Answered | Failed

# ---- commands


@dataclass(frozen=True, slots=True)
class Drain:
    """Lease no more slices, and wait until all leased slices are done."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask all shards for their versions."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """All shards get ready for this setting, and hold the version of its boundary back."""

    proposal: Consistency


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Shards that are prepared go on without this setting: present servers now, the others when they are back."""

    proposal: Consistency


@dataclass(frozen=True, slots=True)
class Commit:
    """All shards take this setting on at its boundary. ``again``: a moment later, since some shard did not answer."""

    proposal: Consistency
    again: bool = False


@dataclass(frozen=True, slots=True)
class AwaitBoundary:
    """Ask all shards for their versions in a moment. ``again``: somewhat later, since some shard did not answer."""

    again: bool = False


@dataclass(frozen=True, slots=True)
class PutInForce:
    """All shards have this setting: the job has it, too. ``other_mode``: slices are dealt out in another way now."""

    setting: Consistency
    other_mode: bool


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Raise the error. ``resume``: lease slices again, since nothing has changed."""

    error: BaseException
    resume: bool


Command = Drain | Ask | Prepare | TakeBack | Commit | AwaitBoundary | PutInForce | GiveUp


class ModeChange:
    """The changes of one job on one timeline, one at a time. All changes go through :meth:`handle`."""

    def __init__(self, revision: int, wanted: Consistency | None = None) -> None:
        # What is being performed; None: no change is under way.
        self.command: Command | None = None
        # The newest revision of any setting.
        self.revision = revision
        # The setting that is agreed on, or was in force before the job went back. It may be in force by now.
        self.wanted = wanted
        # A setting that is agreed on and not in force yet.
        self.coming: Consistency | None = None
        # The last revision that was taken back.
        self.aborted = 0
        # The wish of which the first COMMIT is sent, so that it can no longer be taken back.
        self.committed: Consistency | None = None
        # Whether the job ends, or all servers begin another timeline: nothing is taken back any more.
        self.closed = False
        # The setting that is wished for, and the one in force.
        self._wish = self._now = Consistency(Mode.SYNC)
        self._margin, self._attempts = _MARGIN, 0
        # Why the change is given up.
        self._error: BaseException | None = None

    @property
    def under_way(self) -> bool:
        """Whether a change is being made."""
        return self.command is not None and not isinstance(self.command, GiveUp)

    def handle(self, event: Event) -> Command | None:
        """Take an event in; return the command to perform next. None: the wished setting is in force."""
        match event:
            case Wished(setting, now, leased):
                assert not self.under_way, "one change at a time"
                self._wish, self._now = setting, now
                self._margin, self._attempts, self._error = _MARGIN, 0, None
                self.command = self._begin(leased)
            case Agreed(setting, now):
                self._wish, self._now = setting, now
                self.wanted = self.coming = setting
                self.command = self._agreed(setting)
            case Failed(error):
                self.command = self._failed(error)
            case _:
                self.command = self._next(event)
        if not self.under_way:
            self.committed = None
        return self.command

    def _begin(self, leased: bool) -> Command | None:
        if self._wish.same_as(self._now):
            return None
        if self._wish.mode is self._now.mode:
            return self._prepare(0)
        return Drain() if leased else Ask()

    def _next(self, event: Done | Told | Answered) -> Command | None:
        match self.command, event:
            case Drain(), _:
                return Ask()
            case Ask(), Told(versions):
                return self._boundary(versions)
            case Prepare(proposal), Answered(by_all):
                if not by_all:
                    return self._take_back(proposal)
                self.committed, self.wanted, self.coming = self._wish, proposal, proposal
                return Commit(proposal)
            case TakeBack(), _:
                return self._again()
            case Commit(proposal), _:
                return self._agreed(proposal)
            case AwaitBoundary(), Told(versions):
                assert self.coming is not None
                reached = all(version >= self.coming.from_version for version in versions)
                return PutInForce(self.coming, other_mode=True) if reached else AwaitBoundary()
            case PutInForce(), _:
                self.wanted = self.coming = None
        return None

    def _boundary(self, versions: Collection[int]) -> Command:
        """The version from which the other mode counts: no shard has made it, or all of them stand there."""
        if self._wish.mode is Mode.ASYNC:
            return self._prepare(max(versions) + self._margin)
        if len({*versions}) == 1:
            return self._prepare(max(versions))
        apart = f"the shards stand at different versions {sorted({*versions})}: try again"
        return GiveUp(errors.UnavailableError(apart), resume=True)

    def _prepare(self, boundary: int) -> Command:
        self._attempts += 1
        return Prepare(replace(self._wish, revision=self.next_revision(), from_version=boundary))

    def _take_back(self, proposal: Consistency) -> Command:
        self.aborted = max(self.aborted, proposal.revision)
        return TakeBack(proposal)

    def _again(self) -> Command:
        """The proposal is taken back."""
        if self._error is None and self._attempts < _ATTEMPTS:
            self._margin *= 2
            return self._prepare(0) if self._wish.mode is self._now.mode else Ask()
        apart = errors.UnavailableError("the shards did not agree on a version boundary: try again")
        return GiveUp(self._error or apart, resume=True)

    def _agreed(self, setting: Consistency) -> Command:
        if setting.mode is Mode.ASYNC and self._now.mode is Mode.SYNC:
            return AwaitBoundary()
        return PutInForce(setting, other_mode=setting.mode is not self._now.mode)

    def _failed(self, error: BaseException) -> Command:
        later = isinstance(error, errors.RetryableError)
        match self.command:
            case Prepare(proposal) if not self.closed:
                # Servers that have prepared would hold the boundary for ever, unless they begin anew.
                self._error = error
                return self._take_back(proposal)
            case Commit(proposal) if later:  # a server that comes back later must carry out the change, too
                return Commit(proposal, again=True)
            case AwaitBoundary() if later:
                return AwaitBoundary(again=True)
            case Commit() | AwaitBoundary() | PutInForce():
                return GiveUp(error, resume=False)
        return GiveUp(self._error or error, resume=True)

    def next_revision(self) -> int:
        """A revision that no setting has had."""
        self.revision += 1
        return self.revision

    # ---- timelines and coordinators

    def close(self, now: Consistency) -> None:
        """The job ends, or all servers begin another timeline. ``now``: the setting in force."""
        self.wanted, self.closed = self.wanted or now, True

    def forget(self) -> None:
        """The setting in force before the job went back cannot be brought back."""
        self.wanted = None

    def settle(self, newest: Consistency, scheduled: Collection[int]) -> list[TakeBack | Commit]:
        """After a takeover: if one shard has committed a change that all had prepared, all commit it; else none.

        ``newest``: the newest setting that some shard has or has committed. ``scheduled``: the revisions of settings
        that some shard has prepared.
        """
        self.revision = max([newest.revision, *scheduled])
        commands: list[TakeBack | Commit] = [
            TakeBack(replace(newest, revision=revision)) for revision in sorted({*scheduled} - {newest.revision})
        ]
        return [*commands, Commit(newest)] if newest.revision in scheduled else commands
