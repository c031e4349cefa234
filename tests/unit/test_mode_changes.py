"""Mode and staleness change: which command follows which, whatever fails, is cancelled, or dies meanwhile."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from paramserver import errors
from paramserver.core.procedures.mode_change import (
    Agreed,
    Answered,
    Ask,
    AwaitBoundary,
    Command,
    Commit,
    Done,
    Drain,
    Event,
    Failed,
    GiveUp,
    ModeChange,
    Prepare,
    PutInForce,
    TakeBack,
    Told,
    Wished,
)
from paramserver.core.versions.consistency import Consistency, Mode

SYNC, ASYNC, BOUNDED = Consistency(Mode.SYNC), Consistency(Mode.ASYNC), Consistency(Mode.ASYNC, 4)
LOST, FENCED = errors.UnavailableError("no answer"), errors.FencedError("another coordinator leads")
YES, NO = Answered(by_all=True), Answered(by_all=False)


def commands(machine: ModeChange, *events: Event) -> list[Command | None]:
    return [machine.handle(event) for event in events]


def test_to_asynchronous_mode_a_little_ahead_of_the_newest_version() -> None:
    machine, agreed = ModeChange(0), replace(BOUNDED, revision=1, from_version=9)
    found = commands(machine, Wished(BOUNDED, SYNC), Told({6, 7}), YES, Done(), Told({8, 9}), Told({9}), Done())
    assert found == [
        Ask(),
        Prepare(agreed),
        Commit(agreed),
        AwaitBoundary(),
        AwaitBoundary(),
        PutInForce(agreed, other_mode=True),
        None,
    ]
    assert (machine.wanted, machine.coming, machine.under_way) == (None, None, False)


def test_to_synchronous_mode_when_all_slices_are_done() -> None:
    machine, agreed = ModeChange(3), replace(SYNC, revision=4, from_version=7)
    found = commands(machine, Wished(SYNC, ASYNC, leased=True), Done(), Told({7}), YES, Done(), Done())
    assert found == [Drain(), Ask(), Prepare(agreed), Commit(agreed), PutInForce(agreed, other_mode=True), None]


def test_another_staleness_is_not_tied_to_a_version() -> None:
    machine, agreed = ModeChange(0), replace(BOUNDED, revision=1)
    found = commands(machine, Wished(BOUNDED, ASYNC, leased=True), YES, Done(), Done())
    assert found == [Prepare(agreed), Commit(agreed), PutInForce(agreed, other_mode=False), None]


def test_the_setting_in_force_is_no_change() -> None:
    assert commands(ModeChange(0), Wished(BOUNDED, replace(BOUNDED, revision=5))) == [None]


def test_shards_that_are_past_the_boundary_are_asked_for_one_that_is_further_ahead() -> None:
    machine = ModeChange(0)
    boundaries = []
    command = machine.handle(Wished(ASYNC, SYNC))
    while not isinstance(command, GiveUp):
        match command:
            case Ask():
                command = machine.handle(Told({100}))
            case Prepare(proposal):
                boundaries.append((proposal.revision, proposal.from_version - 100))
                command = machine.handle(NO)
            case _:
                assert isinstance(command, TakeBack)
                assert machine.aborted == boundaries[-1][0]
                command = machine.handle(Done())
    assert boundaries == [(n + 1, 2 << n) for n in range(12)]
    assert "the shards did not agree on a version boundary" in str(command.error)


def test_shards_at_different_versions_cannot_become_synchronous() -> None:
    machine = ModeChange(0)
    command = commands(machine, Wished(SYNC, ASYNC), Told({8, 7}))[-1]
    assert isinstance(command, GiveUp)
    assert "the shards stand at different versions [7, 8]" in str(command.error)
    assert command.resume


@pytest.mark.parametrize("error", [LOST, FENCED, asyncio.CancelledError()])
@pytest.mark.parametrize(
    ("before", "taken_back"),
    [((), False), ((Done(),), False), ((Done(), Told({7})), True)],
    ids=["drain", "ask", "prepare"],
)
def test_before_the_first_commit_a_failure_changes_nothing(
    error: BaseException, before: tuple[Event, ...], taken_back: bool
) -> None:
    machine = ModeChange(0)
    found = commands(machine, Wished(SYNC, ASYNC, leased=True), *before, Failed(error))
    if taken_back:  # servers that are prepared would wait for ever
        assert found[-1] == TakeBack(replace(SYNC, revision=1, from_version=7))
        found = commands(machine, Failed(LOST))
    assert found[-1] == GiveUp(error, resume=True)
    assert (machine.wanted, machine.coming, machine.under_way) == (None, None, False)


def test_after_the_first_commit_the_change_is_not_taken_back() -> None:
    wish = replace(BOUNDED)
    machine, agreed = ModeChange(0), replace(BOUNDED, revision=1, from_version=9)
    commands(machine, Wished(wish, SYNC), Told({7}), YES)
    assert machine.committed is wish
    found = commands(machine, Failed(LOST), Done(), Failed(LOST), Told({8}), Failed(asyncio.CancelledError()))
    assert found[:4] == [Commit(agreed, again=True), AwaitBoundary(), AwaitBoundary(again=True), AwaitBoundary()]
    assert isinstance(found[4], GiveUp)
    assert not found[4].resume
    assert machine.wanted == machine.coming == agreed


def test_another_timeline_begins_while_a_change_is_prepared() -> None:
    """No shard holds the boundary any more. The setting in force is brought back on the next timeline."""
    machine, cancelled = ModeChange(0), asyncio.CancelledError()
    commands(machine, Wished(ASYNC, SYNC), Told({7}))
    machine.close(SYNC)
    assert commands(machine, Failed(cancelled)) == [GiveUp(cancelled, resume=True)]
    assert machine.wanted == SYNC


# ---- random schedules


class Shard:
    """One shard: its version, the setting with which it made each version, and what it is prepared for."""

    def __init__(self) -> None:
        self.version = 0
        self.setting = SYNC
        self.made: dict[int, Mode] = {}
        self.prepared: Consistency | None = None
        self.committed = False
        self.away = False

    def make(self) -> None:
        """Make the next version, unless the change that it is prepared for may still be taken back."""
        coming = self.prepared
        if coming is not None and not self.committed and coming.from_version <= self.version + 1:
            return
        self.made[self.version] = self.setting.mode
        self.version += 1
        self.arrive()

    def arrive(self) -> None:
        """The change that all have agreed on counts from this version on."""
        if self.prepared is not None and self.committed and self.prepared.from_version <= self.version:
            self.setting, self.prepared, self.committed = self.prepared, None, False

    def prepare(self, proposal: Consistency) -> bool:
        if self.version >= max(proposal.from_version, 1) and proposal.from_version != self.version:
            return False
        self.prepared, self.committed = proposal, False
        return True

    def take_back(self, revision: int) -> None:
        if self.prepared is not None and self.prepared.revision <= revision and not self.committed:
            self.prepared = None

    def commit(self, proposal: Consistency) -> None:
        if self.prepared is not None and self.prepared.revision == proposal.revision:
            self.committed = True
            self.arrive()

    @property
    def newest(self) -> Consistency:
        return self.prepared if self.prepared is not None and self.committed else self.setting


class World:
    """A job whose coordinators change between both modes again and again."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.shards = [Shard() for _ in range(chance.randint(1, 3))]
        self.machine, self.in_force = ModeChange(0), SYNC
        self.command: Command | None = None
        self.drained, self.finished, self.faults = False, 0, True
        self.revisions: set[int] = set()

    def train(self) -> None:
        """Synchronous shards make the same versions; asynchronous ones until all slices are done."""
        shard = self.chance.choice(self.shards)
        if not self.drained and not shard.away and shard.version <= min(one.version for one in self.shards) + 2:
            shard.make()

    def fails(self) -> bool:
        return self.faults and self.chance.random() < 0.15

    def reach(self, present: bool = False) -> list[Shard]:
        """The shards that a call reaches, before one of them does not answer. Raises UnavailableError."""
        if not present and any(shard.away for shard in self.shards):
            raise LOST
        return [shard for shard in self.shards if not shard.away]

    def perform(self, command: Command) -> Event:
        lost = self.fails()
        match command:
            case Drain():
                self.drained = True
                if lost:
                    raise asyncio.CancelledError
                newest = max(shard.version for shard in self.shards)
                for shard in self.reach():
                    for _ in range(newest - shard.version):
                        shard.make()
            case Ask() | AwaitBoundary():
                return Told({shard.version for shard in self.reach()})
            case Prepare(proposal):
                assert proposal.revision not in self.revisions, "no number is used twice"
                self.revisions.add(proposal.revision)
                reached = self.reach()
                answers = [shard.prepare(proposal) for shard in reached if not (lost and self.chance.random() < 0.5)]
                if lost:
                    raise self.chance.choice([LOST, asyncio.CancelledError()])
                return Answered(all(answers))
            case TakeBack(proposal):
                for shard in self.reach(present=True):
                    shard.take_back(proposal.revision)
            case Commit(proposal):
                for shard in self.reach():
                    if not (lost and self.chance.random() < 0.5):
                        shard.commit(proposal)
                if lost:
                    raise LOST
            case PutInForce(setting):
                assert min(shard.version for shard in self.shards) >= setting.from_version, "not everywhere in force"
                self.in_force, self.drained, self.finished = setting, False, self.finished + 1
        return Done()

    def step(self) -> None:
        """The coordinator performs one command."""
        if self.command is None:
            wish = ASYNC if self.in_force.mode is Mode.SYNC else SYNC
            leased = self.in_force.mode is Mode.ASYNC
            self.command = self.machine.handle(Wished(wish, self.in_force, leased))
        elif isinstance(self.command, GiveUp):
            assert self.command.resume, "what is agreed comes into force"
            self.drained, self.command = False, None
        else:
            try:
                event = self.perform(self.command)
            except (errors.UnavailableError, asyncio.CancelledError) as error:
                event = Failed(error)
            self.command = self.machine.handle(event)

    def comes_back(self, shard: Shard) -> None:
        """A server that was away hears which change was taken back."""
        shard.away = False
        shard.take_back(self.machine.aborted)

    def another_coordinator(self) -> None:
        """Takes over, when all servers are there. It knows what the servers say."""
        for shard in self.shards:
            shard.away = False
        scheduled = [shard.prepared.revision for shard in self.shards if shard.prepared is not None]
        newest = max((shard.newest for shard in self.shards), key=lambda one: one.revision)
        self.machine = ModeChange(self.in_force.revision)
        self.drained, self.command = False, None
        self.revisions.clear()  # commands carry the term, too
        for command in self.machine.settle(newest, scheduled):
            self.insist(command)
        if newest.revision > self.in_force.revision:
            self.drained = newest.mode is Mode.SYNC  # workers are given no slices before the job goes on
            self.command = self.machine.handle(Agreed(newest, self.in_force))

    def insist(self, command: Command) -> None:
        faults, self.faults = self.faults, False
        self.perform(command)
        self.faults = faults


def test_all_shards_make_each_version_in_the_same_mode_whatever_happened() -> None:
    changes = 0
    for seed in range(200):
        world = World(random.Random(seed))
        for _ in range(300):
            what = world.chance.random()
            if what < 0.45:
                world.train()
            elif what < 0.9:
                world.step()
            elif what < 0.94:
                world.chance.choice(world.shards).away = True
            elif what < 0.99:
                world.comes_back(world.chance.choice(world.shards))
            else:
                world.another_coordinator()
        world.faults = False
        for shard in world.shards:
            world.comes_back(shard)
        before = world.finished
        for _ in range(400):
            world.train()
            world.step()
        assert world.finished > before, f"seed {seed}: some shard waits for ever"
        changes += world.finished
        made = [shard.made for shard in world.shards]
        for version in range(min(shard.version for shard in world.shards)):
            assert len({one[version] for one in made}) == 1, f"seed {seed}: version {version}"
    assert changes > 1500
