"""Taking a job over from a coordinator that is gone: whom the next one asks, whose answer counts, and what follows.

The record says who the members are. Where the record and servers differ, the servers are right: their shards hold the
weights, and the names of all counted contributions. The machine is for one attempt; another attempt begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paramserver.core.job.holders import Found, Holders
from paramserver.core.job.membership import Member

# A server that cannot be reached for so long is taken for gone, if others have its shards.
UNREACHABLE_S = 0.2
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Record:
    """The record of the job, without its members.

    ``model``: a model is registered. ``described``: its description was found. ``ready``: version 0 was published.
    ``loading``: a ``ctx.load`` is under way. ``recovering``: the job goes back. ``servers``: how many hold the model.
    ``checkpoints``: the job keeps checkpoints.
    """

    model: bool
    described: bool
    ready: bool
    timeline: int
    placement: int
    servers: int
    checkpoints: bool
    loading: bool = False
    recovering: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a server on one shard. ``recorded``: the shard belongs to the model in the record."""

    shard: int
    incarnation: int
    recorded: bool
    backup: bool
    active: bool
    timeline: int
    placement: int
    generation: int = 0
    term: int = 0


# ---- events


@dataclass(frozen=True, slots=True)
class Told:
    """The answer to :class:`Ask`: by member number, the reports of servers that answered.

    ``newcomers``: so many servers without a shard ask to join.
    """

    answers: Mapping[int, Sequence[Report]]
    newcomers: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """The command has been performed."""


@dataclass(frozen=True, slots=True)
class NotHeard:
    """Some server has not taken the command."""


Event = Told | Done | NotHeard

# ---- commands


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask these servers how their shards stand, after ``rest_s`` seconds; tell for whom the job waits."""

    servers: tuple[Member, ...]
    rest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Number:
    """No number of the earlier coordinator is used again: the next generation is above ``generation``.

    ``term``: the highest term that a server has heard of.
    """

    generation: int
    term: int


@dataclass(frozen=True, slots=True)
class Promote:
    """Take over the model; backups take the place of the servers ``gone``. ``published``: there is a version."""

    gone: tuple[Member, ...]
    published: bool


@dataclass(frozen=True, slots=True)
class Obey:
    """Tell all servers of this coordinator: from then on they refuse the earlier one, so their next answers stand."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish version 0 on all servers: the earlier coordinator may have done so on some only."""


@dataclass(frozen=True, slots=True)
class LookForCheckpoints:
    """Find the checkpoints of this timeline. The record may lack the newest ones."""


@dataclass(frozen=True, slots=True)
class GoOn:
    """The job goes on where the servers stand. ``published``: there is a version."""

    published: bool


@dataclass(frozen=True, slots=True)
class GoBack:
    """The job goes back to a checkpoint when all servers are there. ``lost``: their shards are lost."""

    lost: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Fail:
    """The job cannot be taken over, now or later."""

    reason: str


@dataclass(frozen=True, slots=True)
class Later:
    """This attempt has failed; another one may not. ``late``: the time is up."""

    reason: str
    late: bool = False


@dataclass(frozen=True, slots=True)
class StepDown:
    """A server has heard of another coordinator of this ``term``, which is this coordinator's or a higher one."""

    reason: str
    term: int


Command = Ask | Number | Promote | Obey | Publish | LookForCheckpoints | GoOn | GoBack | Fail | Later | StepDown
_ENDS = (GoOn, GoBack, Fail, Later, StepDown)


class Takeover:
    """One attempt. All changes go through :meth:`handle`; the first command is :attr:`command`.

    ``holders`` hears which servers are primaries. ``term``: this coordinator's. ``known_term``: the highest one that
    this process has heard of, 0 if it has not asked yet. Servers are waited for until ``patience_s`` after ``now``.
    """

    def __init__(
        self,
        record: Record,
        holders: Holders,
        servers: Sequence[Member],
        term: int,
        known_term: int,
        now: float,
        patience_s: float,
    ) -> None:
        self._record, self._holders, self._servers = record, holders, tuple(servers)
        self._term, self._known_term = term, known_term
        self._patience_s = patience_s
        # Whether the servers obey this coordinator. Before, their answers may be overtaken by an earlier command.
        self._obeyed = False
        # By member number: the reports of a server, by shard.
        self._told: dict[int, dict[int, Report]] = {}
        # A server is on another timeline. It is not lost: it goes back with the others.
        self._strayed = False
        self._gone: tuple[Member, ...] = ()
        self._lost: tuple[Member, ...] = ()
        self._began = now
        self.command: Command = self._begin()

    @property
    def over(self) -> bool:
        """Whether the attempt has ended."""
        return isinstance(self.command, _ENDS)

    @property
    def waiting_for(self) -> str:
        """The servers that have not answered, in words."""
        return _names(self._silent(), with_address=True) or "servers that never joined"

    def sources(self) -> dict[int, int]:
        """By shard, the member number of the server whose report counts: of its primary.

        Before servers obey: or of the backup that is to be the primary. The earlier coordinator has written that down,
        and died before that server has heard of it.
        """
        found: dict[int, Report] = {}
        sources: dict[int, int] = {}
        for ident, reports in self._told.items():
            for shard, report in reports.items():
                newer = shard not in found or report.placement > found[shard].placement
                if not report.backup and newer:
                    found[shard], sources[shard] = report, ident
        if not self._obeyed:
            for server in self._servers:
                for shard in self._holders.shards_of(server.index):
                    if shard in self._told.get(server.ident, ()):
                        sources.setdefault(shard, server.ident)
        return sources

    def handle(self, event: Event, now: float) -> Command:
        """Take an event in; return the command to perform next."""
        match self.command, event:
            case Ask(), Told():
                self.command = self._heard(event, now)
            case Number(), _:
                self.command = self._judge()
            case Promote(), _:
                self.command = Obey()
            case Obey(), NotHeard():
                self.command = Later("a server did not hear of the new coordinator")
            case Obey(), _:
                self.command = Publish() if self._published() else self._ask_again(now)
            case Publish(), _:
                self.command = self._ask_again(now)
            case LookForCheckpoints(), _:
                self.command = GoOn(self._published())
        return self.command

    # ---- asking

    def _begin(self) -> Command:
        if not self._record.model:
            return GoOn(published=False)
        if not self._record.described:
            return Fail("the store has lost the description of the model: the job cannot be taken over")
        return Ask(self._servers)

    def _ask_again(self, now: float) -> Command:
        """Ask all servers that are left once more, since from now on their answers stand."""
        gone = {server.ident for server in self._gone}
        self._servers = tuple(server for server in self._servers if server.ident not in gone)
        self._told, self._strayed, self._gone, self._lost = {}, False, (), ()
        self._obeyed, self._began = True, now
        return Ask(self._servers)

    def _published(self) -> bool:
        """The earlier coordinator may have published version 0 on some servers only, or not have written that down."""
        active = any(self._told[ident][shard].active for shard, ident in self.sources().items())
        return self._record.ready or active

    def _silent(self) -> tuple[Member, ...]:
        return tuple(server for server in self._servers if server.ident not in self._told)

    def _heard(self, told: Told, now: float) -> Command:
        for server in self._silent():
            if server.ident in told.answers and (refusal := self._take(server, told.answers[server.ident])):
                return refusal
        record, silent, sources = self._record, self._silent(), self.sources()
        if not silent and len(sources) == len(self._holders):
            return self._enough()
        there = [server.index for server in self._servers if server not in silent]
        covered = bool(silent) and all(self._holders.covered(server.index, there) for server in silent)
        if covered and now - self._began > UNREACHABLE_S:
            self._gone = silent
            return self._enough()
        if not covered and silent and record.checkpoints and told.newcomers >= len(silent):
            self._lost = silent
            return self._enough()
        if not record.checkpoints and told.newcomers >= record.servers:
            return Fail("all servers have begun anew: the model is gone")
        if now - self._began >= self._patience_s:
            why = f"the job cannot be taken over: no answer within {self._patience_s:.0f} s from {self.waiting_for}"
            return Later(why, late=True)
        # Also those that have answered, if some shard has no primary: a promoted backup is about to become one.
        again = silent if silent else self._forget()
        return Ask(again, UNREACHABLE_S if covered or not silent else _RETRY_S)

    def _forget(self) -> tuple[Member, ...]:
        self._told, self._strayed = {}, False
        return self._servers

    def _take(self, server: Member, reports: Sequence[Report]) -> Fail | None:
        record = self._record
        others = [one.index for one in self._servers if one.index != server.index]
        replaceable = record.checkpoints or self._holders.covered(server.index, others)
        if replaceable and any(report.incarnation != server.incarnation for report in reports):
            return None  # another process at its address, which asks to join
        if not all(self._as_recorded(server, report) for report in reports):
            if not replaceable:
                return Fail(
                    f"{server.name} at {server.address} has begun anew: its shard of the model is gone, and "
                    "the job cannot be taken over"
                )
            primary = self._holders.shards_of(server.index)
            self._strayed = self._strayed or any(not one.backup or one.shard in primary for one in reports)
        self._told[server.ident] = {report.shard: report for report in reports}
        for report in reports:
            if not report.backup and report.active and report.placement > record.placement:
                self._holders.handle(Found(report.shard, server.index))
        return None

    def _as_recorded(self, server: Member, report: Report) -> bool:
        """Whether a server still has the shard that the record speaks of."""
        same = report.incarnation == server.incarnation and (report.recorded or report.backup)
        return same and (not self._record.ready or (report.active and report.timeline == self._record.timeline))

    # ---- what follows

    def _enough(self) -> Command:
        """Each shard is accounted for."""
        if self._obeyed:
            if self._lost or self._strayed or self._gone:
                names = _names([*self._lost, *self._gone]) or "a server that is on another timeline"
                return Later(f"{names} was lost just now")
            return LookForCheckpoints()
        reports = [self._told[ident][shard] for shard, ident in self.sources().items()]
        term = max((report.term for report in reports), default=0)
        if not self._known_term and term >= self._term:
            return StepDown(f"the store has forgotten term {term}, which a server has heard of", term)
        return Number(max((report.generation for report in reports), default=0), term)

    def _judge(self) -> Command:
        record = self._record
        if record.loading and not record.checkpoints:
            why = "the coordinator was lost in the middle of ctx.load, and there is no checkpoint: set checkpoint.dir"
            return Fail(why)
        # The version before a load is in a checkpoint. While a job goes back, its record and the servers may speak of
        # different moments: it goes back again.
        back = record.loading or (record.recovering and record.checkpoints)
        if self._lost or self._strayed or back:
            return GoBack(self._lost)
        return Promote(self._gone, self._published())


def _names(servers: Sequence[Member], with_address: bool = False) -> str:
    return ", ".join(f"{one.name} at {one.address}" if with_address else one.name for one in servers)
