"""What becomes of a version that shards copy: whatever fails, is repeated, comes late, or dies with a server."""

from __future__ import annotations

import random

import pytest

from paramserver.core.procedures.checkpointing import (
    CHANGED_S,
    STORAGE_S,
    Announce,
    Checkpointing,
    Command,
    Copy,
    Event,
    GiveUp,
    NotCopied,
    NotWritten,
    Part,
    Prune,
    Release,
    Reported,
    SayChanged,
    SayLost,
    Sweep,
    Told,
    WriteManifest,
    Written,
)

TIMELINE = 3


def fresh() -> Checkpointing:
    core = Checkpointing()
    core.begin(TIMELINE)
    return core


def part(version: int, copy: Copy = Copy.SAVED, revision: int = 0, reason: str = "") -> Part:
    return Part(TIMELINE, version, copy, revision, reason)


def told(core: Checkpointing, shard: int, *parts: Part, newest: int = -1, revision: int = 0) -> tuple[Command, ...]:
    """One of two shards reports."""
    return core.handle(Reported(shard, parts, 2, revision, newest))


def completing(version: int = 10) -> Checkpointing:
    core = fresh()
    assert told(core, 0, part(version)) == ()
    assert told(core, 1, part(version)) == (WriteManifest(version, (part(version), part(version))),)
    return core


def test_a_manifest_is_written_when_all_shards_have_written_their_copies() -> None:
    core = fresh()
    assert told(core, 1, part(10)) == ()
    assert told(core, 0, part(10, Copy.WRITING)) == ()
    assert told(core, 1, part(10)) == ()
    assert told(core, 0, part(10)) == (WriteManifest(10, (part(10), part(10))),)
    assert told(core, 0, part(10)) == (), "a report is repeated"
    assert (core.settling(10), core.settled(10), core.safe(10)) == (True, False, False)
    done = core.handle(Written(TIMELINE, 10, 500))
    assert done == (Announce(10, 500), Release((10,)), Prune(frozenset({10})))
    assert (core.settling(10), core.saved(10), core.safe(10), core.safe(9), core.safe(11)) == (
        False,
        True,
        True,
        True,
        False,
    )
    assert core.handle(Written(TIMELINE, 10, 500)) == (), "an answer is repeated"


def test_pruning_spares_versions_that_are_still_written() -> None:
    core = completing()
    told(core, 0, part(5, Copy.WRITING), part(20, Copy.WRITING))
    told(core, 1, part(30, Copy.FAILED))
    assert core.handle(Written(TIMELINE, 10))[-1] == Prune(frozenset({5, 10, 20, 30}))


@pytest.mark.parametrize(("copy", "again"), [(Copy.FAILED, False), (Copy.SKIPPED, True)])
def test_a_copy_that_is_not_written_gives_the_version_up(copy: Copy, again: bool) -> None:
    core = fresh()
    told(core, 1, part(10))
    assert told(core, 0, part(10, copy, reason="disk full")) == (GiveUp(10, "disk full", 0),)
    assert told(core, 0, part(10, copy, reason="disk full")) == (), "it is given up once"
    assert not core.settled(10), "waiters hear of it when the newest checkpoint was looked at"
    assert core.handle(Told(TIMELINE, 10)) == (Release((10,)), Sweep(10))
    assert (core.gave_up(10), core.given_up()) == (True, [10])
    assert core.try_again(10, 1e9) is again
    assert core.gave_up(10) is not again


def test_a_failure_counts_more_than_a_lack_of_room() -> None:
    core = fresh()
    assert told(core, 1, part(10, Copy.SKIPPED), part(11)) == (GiveUp(10, "not written", 1),)
    assert told(core, 0, part(11, Copy.FAILED, reason="disk full")) == (GiveUp(11, "disk full", 0),)
    core.handle(Told(TIMELINE, 11))
    assert not core.try_again(11, STORAGE_S)


def test_a_manifest_that_is_not_written_gives_the_version_up() -> None:
    core = completing()
    assert core.handle(NotWritten(TIMELINE, 10, "another coordinator leads")) == (
        GiveUp(10, "another coordinator leads"),
    )
    assert core.handle(Told(TIMELINE, 10)) == (Release((10,)), Sweep(10))
    assert not core.safe(10)


def test_copies_of_another_setting_are_no_checkpoint() -> None:
    """The position in the data would not fit the counts."""
    core = fresh()
    told(core, 0, part(10, revision=1), revision=2)
    assert told(core, 1, part(10, revision=2), revision=2) == (SayChanged(10), Release((10,)), Sweep(10))
    assert core.try_again(10, CHANGED_S - 1)
    told(core, 0, part(10, revision=2), revision=2)
    assert isinstance(told(core, 1, part(10, revision=2), revision=2)[0], WriteManifest)


def test_a_copy_of_a_settled_version_is_let_go() -> None:
    core = completing()
    core.handle(Written(TIMELINE, 10))
    core.handle(NotCopied(TIMELINE, 20))
    assert told(core, 0, part(10), part(20, Copy.WRITING)) == (Release((10, 20)), Sweep(20))


def test_a_version_that_not_all_shards_copy_is_given_up_for_now() -> None:
    core = fresh()
    told(core, 0, part(10, Copy.WRITING))
    assert core.handle(NotCopied(TIMELINE, 10)) == (Release((10,)), Sweep(10))
    assert core.try_again(10, 1e9)
    done = completing()
    assert done.handle(NotCopied(TIMELINE, 10)) == (), "the answer was lost, but all shards have copied it"


def test_a_copy_that_died_with_a_server_gives_the_version_up() -> None:
    """The promoted backup is past the version, and has no copy. The other servers' copies would take room for ever."""
    core = fresh()
    told(core, 0, part(10), newest=10)
    told(core, 1, part(10, Copy.WRITING), newest=10)
    assert told(core, 1, newest=10) == (), "it may copy the version that it has just made"
    assert told(core, 1, newest=11) == (SayLost(10, 1), Release((10,)), Sweep(10))


def test_what_a_dead_server_has_written_counts() -> None:
    core = fresh()
    told(core, 1, part(10), newest=10)
    told(core, 0, part(10, Copy.WRITING), newest=12)
    assert told(core, 1, newest=12) == ()
    assert isinstance(told(core, 0, part(10), newest=12)[0], WriteManifest)


@pytest.mark.parametrize("event", [Written(TIMELINE, 10), NotWritten(TIMELINE, 10, "x"), NotCopied(TIMELINE, 10)])
def test_what_another_timeline_has_left_says_nothing(event: Event) -> None:
    """Otherwise version 10 of the present timeline would never be saved."""
    core = completing()
    core.begin(TIMELINE + 1)
    assert core.handle(event) == ()
    assert told(core, 0, part(10, Copy.FAILED)) == ()
    assert not core.settled(10)


def test_what_an_earlier_coordinator_has_completed_is_not_saved_again() -> None:
    core = fresh()
    core.found([10])
    assert core.safe(10)
    assert told(core, 0, part(10)) == (Release((10,)),)


class World:
    """Two shards and a storage. Reports are late or lost, storage fails, servers die, the job goes back."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.core = fresh()
        self.timeline, self.versions = TIMELINE, [0, 0]
        # By shard and version: its copy.
        self.copies: list[dict[int, Copy]] = [{}, {}]
        self.left: list[tuple[int, Command]] = []
        self.manifests: set[tuple[int, int]] = set()
        self.announced: set[tuple[int, int]] = set()

    def do(self, commands: tuple[Command, ...]) -> None:
        self.left += [(self.timeline, command) for command in commands]

    def step(self) -> None:
        chance, shard = self.chance, self.chance.randrange(2)
        copies = self.copies[shard]
        match chance.choice(["make", "write", "write", "report", "report", "perform", "perform", "perform", "rare"]):
            case "make" if self.versions[shard] <= self.versions[1 - shard]:
                self.versions[shard] += 1
                if self.versions[shard] % 2 == 0:
                    room = sum(copy is not Copy.SKIPPED for copy in copies.values()) < 2
                    copies[self.versions[shard]] = Copy.WRITING if room else Copy.SKIPPED
            case "write":
                for version, copy in copies.items():
                    if copy is Copy.WRITING and chance.random() < 0.5:
                        copies[version] = Copy.FAILED if chance.random() < 0.05 else Copy.SAVED
            case "report":
                self.report(shard)
            case "perform" if self.left:
                self.perform(*self.left.pop(chance.randrange(len(self.left))))
            case "rare" if chance.random() < 0.1:
                copies.clear()  # the server dies, and its backup is promoted
            case "rare" if chance.random() < 0.05:
                self.timeline += 1
                self.core.begin(self.timeline)
                self.copies, self.versions = [{}, {}], [min(self.versions) // 2 * 2] * 2

    def report(self, shard: int) -> None:
        parts = [Part(self.timeline, version, copy) for version, copy in self.copies[shard].items()]
        self.do(self.core.handle(Reported(shard, parts, 2, 0, self.versions[shard])))

    def perform(self, timeline: int, command: Command) -> None:
        match command:
            case WriteManifest(version, parts):
                assert all(one.copy is Copy.SAVED for one in parts)
                assert len(parts) == 2
                assert (timeline, version) not in self.manifests
                good = self.chance.random() < 0.9
                if good:
                    self.manifests.add((timeline, version))
                self.do(self.core.handle(Written(timeline, version) if good else NotWritten(timeline, version, "x")))
            case Announce(version):
                self.announced.add((timeline, version))
            case GiveUp(version):
                self.do(self.core.handle(Told(timeline, version)))
            case Release(versions) if timeline == self.timeline and self.chance.random() < 0.8:
                assert all(self.core.settled(version) for version in versions)
                for copies in self.copies:
                    for version in versions:
                        copies.pop(version, None)
            case Sweep(version):
                assert timeline != self.timeline or self.core.gave_up(version)
            case _:
                pass


def test_random_schedules() -> None:
    """What is announced has a manifest; nothing is both saved and given up; no copy is kept for ever."""
    saved = lost = 0
    for seed in range(300):
        world = World(seed)
        for _ in range(250):
            world.step()
        core = world.core
        for _ in range(40):  # everything comes to an end
            world.versions = [max(world.versions) + 1 if max(world.versions) % 2 == 0 else max(world.versions)] * 2
            for shard in (0, 1):
                for version, copy in world.copies[shard].items():
                    if copy is Copy.WRITING:
                        world.copies[shard][version] = Copy.SAVED
                world.report(shard)
            while world.left:
                world.perform(*world.left.pop(0))
        assert world.copies == [{}, {}], f"seed {seed}"
        assert world.announced <= world.manifests
        assert {v for t, v in world.manifests if t == world.timeline} == {
            v for v in range(max(world.versions) + 1) if core.saved(v)
        }
        assert not any(core.saved(version) for version in core.given_up())
        saved, lost = saved + len(world.announced), lost + len(core.given_up())
    assert saved > 300
    assert lost > 100
