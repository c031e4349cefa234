"""Which server is told which placement, and when: commands to servers, whoever dies and whichever answer is lost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from paramserver.core.job.holders import CaughtUp, Cover, Holders, Promote, ServerGone, ServersThere
from paramserver.core.procedures.placing import (
    Begins,
    Changed,
    Command,
    Done,
    Event,
    Facts,
    Failed,
    Look,
    MakeReady,
    Placing,
    Rest,
    StepDown,
    Tell,
    ToServer,
    WriteDown,
)

# Two servers with one backup each: member numbers 11 and 12.
TWO = Facts({11: 0, 12: 1}, 0.0)


def begun(seats: Facts = TWO) -> tuple[Placing, list[Command]]:
    """All primaries have published; the commands that follow."""
    placing = Placing(Holders.plan(len(seats.servers), 1))
    return placing, placing.handle(Begins(sorted(seats.servers.values())), seats)


def follow(placing: Placing, *events: Event) -> list[list[Command]]:
    return [placing.handle(event, TWO) for event in events]


def test_a_placement_is_written_down_then_backups_are_ready_then_primaries_hear_of_them() -> None:
    placing, first = begun()
    assert first == [Changed(), WriteDown(11, 1), WriteDown(12, 1)]
    (backup_0,), (backup_1,) = (held.backups for held in placing.holders.shards)
    assert follow(placing, Done(11), Done(12)) == [[MakeReady(11, 1, 1)], [MakeReady(12, 0, 1)]]
    assert follow(placing, Done(12), Done(11)) == [[Tell(12, 1, {1: ()})], [Tell(11, 1, {0: (backup_0,)})]]
    assert follow(placing, Done(12), Done(12), Done(11)) == [[Tell(12, 1, {1: (backup_1,)})], [], []]
    assert [placing.heard(11), placing.heard(12), placing.heard(13)] == [1, 1, -1]


def test_a_server_that_hangs_delays_no_other_server() -> None:
    placing, _ = begun()
    follow(placing, Done(11), Done(11), Done(11))
    assert [placing.heard(11), placing.heard(12)] == [1, -1]


def test_backups_are_promoted_and_the_others_hear_of_it_when_it_is_written_down() -> None:
    placing, _ = begun()
    follow(placing, Done(11), Done(12), Done(12), Done(11), Done(12), Done(12), Done(11))
    for shard, held in enumerate(placing.holders.shards):
        placing.handle(CaughtUp(shard, held.backups[0].server, held.backups[0].since), replace(TWO, halted=True))
    number = placing.holders.number + 1
    left = replace(TWO, servers={12: 1})
    gone = placing.handle(ServerGone(0, [1]), left)
    assert gone == [Promote(0, 1), Changed(), WriteDown(12, number)]
    assert placing.handle(Done(12), left) == [Tell(12, number, {0: (), 1: ()})]
    assert placing.handle(Done(11), left) == [], "the answer of a server that is gone"


@pytest.mark.parametrize("fenced", [False, True])
def test_a_server_does_not_answer_or_obeys_another_coordinator(fenced: bool) -> None:
    placing, _ = begun()
    follow(placing, Done(11))
    answer = Failed(11, "why", fenced)
    then: Command = StepDown("why") if fenced else Rest(11, "why")
    assert placing.handle(answer, TWO) == [then]
    assert follow(placing, Look([0, 1]) if fenced else Done(11)) == [[MakeReady(11, 1, 1)]]


def test_a_refusal_says_nothing_while_the_job_goes_back() -> None:
    placing, _ = begun()
    follow(placing, Done(11))
    assert placing.handle(Failed(11, "another timeline", fenced=True), replace(TWO, halted=True)) == []


def test_the_answer_to_a_command_of_an_earlier_timeline_says_nothing() -> None:
    """Else this coordinator would step down, since a server has left that timeline while it was asked."""
    placing, _ = begun()
    follow(placing, Done(11))
    placing.pause(stay=True)
    assert follow(placing, Begins([0, 1])) == [[Changed()]], "one command at a time"
    again = follow(placing, Failed(11, "this shard is on timeline 1", fenced=True), Done(12))
    number = placing.holders.number
    assert again == [[WriteDown(11, number)], [WriteDown(12, number)]]


def test_a_lost_server_is_replaced_after_some_seconds() -> None:
    placing, _ = begun(Facts({11: 0, 12: 1, 13: 2}, 0.0))
    left = Facts({11: 0, 12: 1}, 1.0)
    placing.handle(ServerGone(2, [0, 1]), left)
    number = placing.holders.number
    placing.handle(Look([0, 1]), replace(left, now=10.9))
    assert placing.holders.number == number
    placing.handle(Look([0, 1]), replace(left, now=11.1))
    assert placing.holders.number > number


# ---- random schedules


class World:
    """Servers and a network: a command is carried out or not, and its answer comes or not."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.count = chance, chance.randint(2, 4)
        self.placing = Placing(Holders.plan(self.count, chance.randint(1, min(2, self.count - 1))))
        self.members = {11 + index: index for index in range(self.count)}
        self.newest = 11 + self.count
        self.now, self.halted = 0.0, False
        # By member number: the command on its way; the backups that it is ready for; and what it was told last.
        self.doing: dict[int, ToServer] = {}
        self.ready: dict[int, set[tuple[int, int]]] = {}
        self.told: dict[int, Tell] = {}
        self.written = -1
        # Member numbers of servers with a command of an earlier timeline.
        self.old: set[int] = set()

    def present(self) -> list[int]:
        return sorted(self.members.values())

    def happen(self, event: Event) -> None:
        """The machine hears of an event. All that it commands has to follow the rules."""
        for command in self.placing.handle(event, Facts(dict(self.members), self.now, self.halted)):
            assert not isinstance(command, StepDown), "no other coordinator leads"
            if not isinstance(command, (WriteDown, MakeReady, Tell, Rest)):
                continue
            assert command.server not in self.doing, "one command at a time"
            assert isinstance(command, Rest) or (self.placing.begun and not self.halted)
            self.doing[command.server] = command
            if isinstance(command, (MakeReady, Tell)):
                assert self.written >= self.placing.holders.number, "a server hears what is not written down"
            if isinstance(command, Tell):
                for shard, backups in command.shards.items():
                    for one in backups:
                        assert one.whole or self.is_ready(shard, one.server, one.since), "it hears of it too early"

    def is_ready(self, shard: int, server: int, since: int) -> bool:
        return any((shard, since) in self.ready.get(i, ()) for i, at in self.members.items() if at == server)

    def answer(self, ident: int, faults: bool = True) -> None:
        """A command comes to its end: it is lost, or its answer is lost, or nothing is."""
        command = self.doing.pop(ident)
        if ident in self.old:
            self.old.discard(ident)
            self.happen(Failed(ident, "this shard is on another timeline", fenced=True))
            return
        lost = faults and not isinstance(command, Rest) and self.chance.random() < 0.3
        if not lost or self.chance.random() < 0.5:
            match command:
                case WriteDown(_, number):
                    self.written, lost = max(self.written, number), False
                case MakeReady(_, shard, since):
                    self.ready.setdefault(ident, set()).add((shard, since))
                case Tell():
                    self.told[ident] = command
        elif isinstance(command, WriteDown):
            self.doing[ident] = command  # the store answers later
            return
        self.happen(Failed(ident, "no answer") if lost else Done(ident))

    def catches_up(self) -> None:
        """A primary brings its shard to a backup of which it was told."""
        found = [
            CaughtUp(shard, one.server, one.since)
            for ident, told in self.told.items()
            for shard, backups in told.shards.items()
            for one in backups
            if ident in self.members and one.server in self.present() and not one.whole
        ]
        if found:
            self.happen(self.chance.choice(found))

    def dies(self) -> None:
        ident = self.chance.choice(sorted(self.members))
        index = self.members.pop(ident)
        self.doing.pop(ident, None)
        self.old.discard(ident)
        if self.placing.begun:
            self.happen(ServerGone(index, self.present()))

    def comes(self) -> None:
        free = sorted({*range(self.count)} - {*self.present()})
        if free:
            self.newest += 1
            self.members[self.newest] = self.chance.choice(free)
            self.happen(ServersThere(self.present()))

    def another_timeline(self) -> None:
        self.placing.pause(stay=self.chance.random() < 0.5)
        self.told.clear()
        self.ready.clear()
        self.old = {ident for ident, command in self.doing.items() if isinstance(command, (MakeReady, Tell))}

    def step(self) -> None:
        self.now += self.chance.random()
        what = self.chance.random()
        if what < 0.5 and self.doing:
            self.answer(self.chance.choice(sorted(self.doing)))
        elif what < 0.8:
            self.catches_up()
        elif what < 0.82 and len(self.members) > 1:
            self.dies()
        elif what < 0.88:
            self.comes()
        elif what < 0.885:
            self.another_timeline()
        elif what < 0.9:
            self.halted = not self.halted
        else:
            self.happen(Begins(self.present()) if self.chance.random() < 0.5 else Look(self.present()))

    def settle(self) -> None:
        """No more deaths: all servers come, and answer in the end."""
        self.halted = False
        while len(self.members) < self.count:
            self.comes()
        if any(held.lost for held in self.placing.holders.shards):
            self.another_timeline()  # the job goes back
        self.happen(Begins(self.present()))
        for number in range(90):
            self.now += 11.0
            self.happen(Look(self.present()))
            for ident in sorted(self.doing):
                self.answer(ident, faults=number < 30)
            self.catches_up()


def test_in_the_end_every_server_knows_the_newest_placement_whatever_happened() -> None:
    for seed in range(200):
        world = World(random.Random(seed))
        for _ in range(world.chance.randint(20, 300)):
            world.step()
        world.settle()
        holders = world.placing.holders
        assert not world.doing, f"seed {seed}"
        assert {holders.state(shard) for shard in range(len(holders))} == {Cover.REPLICATED}, f"seed {seed}"
        for ident, index in world.members.items():
            assert world.placing.heard(ident) == world.told[ident].number == holders.number, f"seed {seed}"
            mine = {shard: holders.shards[shard].backups for shard in holders.shards_of(index)}
            assert world.told[ident].shards == mine, f"seed {seed}"
