"""The commands of transcripts: a whole job made of pure cores, without tensors, network, threads or clocks."""

from __future__ import annotations

from paramserver.core.job.membership import Disconnected, Renewed, Role, Tick
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.core.versions.counted import in_all
from paramserver.core.versions.events import (
    AtClock,
    AtLeast,
    ConsistencyAborted,
    ConsistencyCommitted,
    ConsistencyPrepared,
    Joining,
    Want,
)
from paramserver.core.versions.names import AsyncName, Name, SyncName
from paramserver.core.versions.ranges import complement
from paramserver.core.work.leases import SliceLeases
from paramserver.core.work.slices import SyncSchedule
from paramserver.core.work.stealing import Ask, Assignment
from tests.support.transcripts.coordinator import Coordinator
from tests.support.transcripts.shard import Shard

Options = dict[str, str]


class Cores:
    """One job. :meth:`run` takes a command. Each method ``_do_...`` is one; its docstring shows how it is written."""

    def __init__(self) -> None:
        self._now = 0.0
        self._said: list[str] = []
        self._who: dict[int, str] = {}
        self._setting = Consistency(Mode.SYNC)
        self._shards: dict[str, Shard] = {}
        self._calls = 0
        self._dead: set[str] = set()
        self._coordinator: Coordinator | None = self._new_coordinator()
        self._record = self._coordinator

    def run(self, command: str) -> list[str]:
        """Everything that follows from a command: messages first, then each fact that changed, indented.

        Raises ValueError for a command that does not exist, AssertionError for one that makes no sense now.
        """
        words = command.split()
        options = dict(word.split("=", 1) for word in words[1:] if "=" in word)
        names = [word for word in words[1:] if "=" not in word]
        perform = getattr(self, f"_do_{words[0].replace('-', '_')}", None)
        if perform is None:
            raise ValueError(f"there is no command {words[0]!r}")
        before = self._facts()
        self._said = []
        perform(names, options)
        return [*self._said, *_changes(before, self._facts())]

    # ---- members

    def _do_job(self, names: list[str], options: Options) -> None:
        """job mode=async staleness=1 epoch-slices=8 step-slices=4"""
        mode = Mode(options.get("mode", "sync"))
        self._setting = Consistency(mode, _number(options, "staleness"))
        slices, step = _number(options, "epoch-slices") or 0, _number(options, "step-slices") or 1
        self._leader.schedule = SyncSchedule(slices, step)
        if mode is Mode.ASYNC:
            self._leader.leases = SliceLeases(slices)

    def _do_join(self, names: list[str], options: Options) -> None:
        """join worker; join server index=0"""
        role = Role(names[0])
        self._leader.join(role, _number(options, "index"), self._now)
        name = self._leader.names(role)[_number(options, "index") or -1]
        self._dead.discard(name)
        self._leader.handle(Renewed(self._number_of(name)), self._now)
        if role is Role.SERVER:
            self._shards[name] = self._new_shard(name)

    def _do_start(self, names: list[str], options: Options) -> None:
        """start: version 0 is complete on all servers"""
        for shard in self._shards.values():
            shard.members(self._leader.members.generation, self._leader.workers())
            shard.activate(0, 0)

    def _do_kill(self, names: list[str], options: Options) -> None:
        """kill worker-0; kill coordinator"""
        (name,) = names
        self._say(f"{name} is dead")
        if name == "coordinator":
            self._record, self._coordinator = self._leader, None
            return
        self._dead.add(name)
        self._shards.pop(name, None)
        self._leader.handle(Disconnected(self._number_of(name)), self._now)

    def _do_after(self, names: list[str], options: Options) -> None:
        """after 2.5: so many seconds pass, in which everybody alive reports"""
        self._now += float(names[0])
        self._say(f"it is {self._now:g} s")
        if self._coordinator is None:
            return
        for role in (Role.SERVER, Role.WORKER):
            for member in self._coordinator.members.of(role):
                if member.name not in self._dead:
                    self._coordinator.handle(Renewed(member.ident), self._now)
        self._coordinator.handle(Tick(), self._now)

    def _do_look(self, names: list[str], options: Options) -> None:
        """look: is the job stuck?"""
        self._leader.look({name: shard.state.version for name, shard in self._shards.items()}, self._now)

    # ---- contributions and versions

    def _do_push(self, names: list[str], options: Options) -> None:
        """push worker-0 step=0 slices=0-1 of=4; push worker-0 epoch=0 slice=3 clock=0; to=server-0"""
        name, worker = _name(options), self._number_of(names[0])
        self._calls += 1
        for shard in self._reached(options):
            timeline = _number(options, "timeline")
            timeline = self._record.timeline if timeline is None else timeline
            shard.push(self._calls, name, worker, timeline, _number(options, "clock") or 0)

    def _do_pull(self, names: list[str], options: Options) -> None:
        """pull worker-0 version=1 place=0 workers=2 slice-s=0.1; pull worker-0 clock=1; pull worker-0 joining"""
        worker = self._number_of(names[0])
        want: Want
        if "version" in options:
            want, words = AtLeast(int(options["version"])), f"version {options['version']} or later"
        elif "clock" in options:
            want, words = AtClock(int(options["clock"])), f"weights for clock {options['clock']}"
        else:
            want, words = Joining(), "weights to begin with"
        self._calls += 1
        for shard in self._reached(options):
            shard.pull(self._calls, worker, want, words, self._record.timeline)
            if "place" in options:
                shard.given(_assignment(worker, options))

    def _do_ask(self, names: list[str], options: Options) -> None:
        """ask worker-1 step=0 of=4 finished=2,3 place=1 workers=2 slice-s=0.1"""
        worker = self._number_of(names[0])
        finished = frozenset(int(index) for index in options.get("finished", "").split(",") if index)
        ask = Ask(_assignment(worker, options), int(options["step"]), int(options["of"]), finished)
        self._shards["server-0"].ask(ask, self._now)  # the first server speaks for all

    def _do_built(self, names: list[str], options: Options) -> None:
        """built: the versions in the making stand; to=server-0: that of one server"""
        for shard in self._reached(options):
            if shard.building is not None:
                shard.built(self._now)

    # ---- leases of slices

    def _do_lease(self, names: list[str], options: Options) -> None:
        """lease worker-0 want=2 epoch=0: slices of epochs up to this one"""
        worker = self._number_of(names[0])
        self._leader.lease(worker, _number(options, "want") or 1, _number(options, "epoch") or 0)

    def _do_done(self, names: list[str], options: Options) -> None:
        """done worker-0 epoch=0 slices=0-1"""
        self._leader.done(self._number_of(names[0]), _async_names(options))

    def _do_holding(self, names: list[str], options: Options) -> None:
        """holding worker-0 epoch=0 slices=2-3; holding worker-0"""
        worker = self._number_of(names[0])
        self._leader.handle(Renewed(worker), self._now)
        self._leader.holding(worker, _async_names(options) if options else [])

    # ---- another coordinator, another timeline, another mode

    def _do_take_over(self, names: list[str], options: Options) -> None:
        """take-over: another coordinator goes on, from the record and from what the servers say"""
        self._say("another coordinator takes over")
        leader = self._coordinator = self._new_coordinator()
        leader.take_over(self._record, max(s.state.generation for s in self._shards.values()), self._now)
        before, self._record = self._record, leader
        if before.leases is not None and before.schedule is not None:
            done = in_all([shard.state.counted() for shard in self._shards.values()])
            leader.leases = SliceLeases.restored(before.schedule.slices_per_epoch, 0, done)

    def _do_go_back(self, names: list[str], options: Options) -> None:
        """go-back version=2: all servers begin another timeline with the checkpoint of this version"""
        version = int(options["version"])
        self._leader.timeline += 1
        for name in self._shards:
            self._shards[name] = shard = self._new_shard(name)
            shard.state.restore((), int(options["applied"]))
            self._say(f"coordinator -> {name}: begin timeline {self._leader.timeline} with version {version}")
            shard.members(self._leader.members.generation, self._leader.workers())
            shard.activate(self._leader.timeline, version)

    def _do_prepare(self, names: list[str], options: Options) -> None:
        """prepare async staleness=1 revision=1 from=3; to=server-0"""
        revision, version = int(options["revision"]), int(options["from"])
        wanted = Consistency(Mode(names[0]), _number(options, "staleness"), revision, version)
        for shard in self._reached(options):
            self._say(f"coordinator -> {shard.name}: prepare {wanted} from version {version}")
            shard.handle(ConsistencyPrepared(wanted))
            yes = shard.state.changeover.scheduled == wanted
            self._say(f"{shard.name} -> coordinator: {'prepared' if yes else 'no, I am past that version'}")

    def _do_commit(self, names: list[str], options: Options) -> None:
        """commit revision=1; to=server-0"""
        for shard in self._reached(options):
            self._say(f"coordinator -> {shard.name}: commit revision {options['revision']}")
            shard.handle(ConsistencyCommitted(int(options["revision"])))

    def _do_abort(self, names: list[str], options: Options) -> None:
        """abort revision=1; to=server-0"""
        for shard in self._reached(options):
            self._say(f"coordinator -> {shard.name}: abort revision {options['revision']}")
            shard.handle(ConsistencyAborted(int(options["revision"])))

    def _do_lease_from(self, names: list[str], options: Options) -> None:
        """lease-from version=3: the job is asynchronous from this version on"""
        schedule = self._leader.schedule
        assert schedule is not None, "there is no data"
        epoch, left = schedule.position(int(options["version"]))
        done = complement(left, schedule.slices_per_epoch)
        self._leader.leases = SliceLeases(schedule.slices_per_epoch, epoch, done)

    def _do_drain(self, names: list[str], options: Options) -> None:
        """drain: lease no more slices of an epoch that is not finished"""
        leases = self._leader.leases
        assert leases is not None, "the job is synchronous"
        leases.paused = True
        self._say(f"coordinator: {'all' if leases.drained() else 'not all'} leased slices are done")

    def _do_steps_from(self, names: list[str], options: Options) -> None:
        """steps-from version=5: the job is synchronous from this version on"""
        schedule, leases = self._leader.schedule, self._leader.leases
        assert schedule is not None, "there is no data"
        assert leases is not None, "the job is synchronous"
        epoch, left = leases.position()
        version = int(options["version"])
        made = SyncSchedule(schedule.slices_per_epoch, schedule.slices_per_step, version, epoch, left)
        self._leader.schedule, self._leader.leases = made, None
        slices = ", ".join(map(str, made.step(version).slices))
        self._say(f"coordinator: step {version} consists of slices {slices} of epoch {epoch}")

    # ---- the rest

    @property
    def _leader(self) -> Coordinator:
        assert self._coordinator is not None, "there is no coordinator"
        return self._coordinator

    def _new_coordinator(self) -> Coordinator:
        return Coordinator(self._who, self._say, self._tell_members)

    def _new_shard(self, name: str) -> Shard:
        return Shard(name, self._setting, self._who, self._say)

    def _tell_members(self) -> None:
        generation, workers = self._leader.members.generation, self._leader.workers()
        names = ", ".join(self._leader.names(Role.WORKER)) or "none"
        for shard in self._shards.values():
            if shard.state.active:
                self._say(f"coordinator -> {shard.name}: workers of generation {generation}: {names}")
                shard.members(generation, workers)

    def _reached(self, options: Options) -> list[Shard]:
        only = options.get("to")
        return [shard for name, shard in self._shards.items() if only is None or name == only]

    def _number_of(self, name: str) -> int:
        """The number of the last member that had this name."""
        return max(number for number, known in self._who.items() if known == name)

    def _say(self, line: str) -> None:
        self._said.append(line)

    def _facts(self) -> dict[str, dict[str, str]]:
        found = {name: shard.facts() for name, shard in self._shards.items()}
        if self._coordinator is not None:
            found["coordinator"] = self._coordinator.facts()
        return found


def _changes(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> list[str]:
    lines = []
    for who in sorted(after):
        old, new = before.get(who, {}), after[who]
        for fact in [*new, *(fact for fact in old if fact not in new)]:
            if old.get(fact) != new.get(fact):
                lines.append(f"  {who}: {fact}: {new.get(fact, 'none')}")
    return lines


def _number(options: Options, name: str) -> int | None:
    return int(options[name]) if name in options else None


def _range(options: Options) -> tuple[int, int]:
    """The slices of a command, half-open; both ends are given there."""
    first, _, last = (options.get("slices") or options["slice"]).partition("-")
    return int(first), int(last or first) + 1


def _name(options: Options) -> Name:
    lo, hi = _range(options)
    if "step" in options:
        return SyncName(int(options["step"]), lo, hi, int(options["of"]))
    return AsyncName(int(options["epoch"]), lo)


def _async_names(options: Options) -> list[AsyncName]:
    return [AsyncName(int(options["epoch"]), index) for index in range(*_range(options))]


def _assignment(worker: int, options: Options) -> Assignment:
    return Assignment(worker, int(options["place"]), int(options["workers"]), float(options["slice-s"]))
