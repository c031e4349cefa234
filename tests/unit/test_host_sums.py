"""The sums of a host: siblings are added, sums leave once, and each offer is answered once, in any order of events."""

from __future__ import annotations

import random

import pytest

from paramserver.core.versions.host_sums import (
    LEAST_PATIENCE_S,
    Add,
    Added,
    Answer,
    Drop,
    Effect,
    Event,
    Expects,
    HostSums,
    Leaves,
    Offers,
    Push,
    Pushed,
    Tick,
    Withdraws,
)
from paramserver.core.versions.reduction import Node, cover, is_node
from paramserver.core.work.slices import assign


def sums(workers: int, of: int, step: int = 0, patience_s: float = 0.0) -> HostSums:
    """Workers that have one slice each, the first of ``of``."""
    host = HostSums()
    for worker in range(workers):
        host.handle(Expects(worker, step, of, worker, worker + 1, patience_s), 0.0)
    return host


def offer(slice_: int, of: int, step: int = 0, key: bytes = b"") -> Offers:
    return Offers(slice_, 10 + slice_, step, of, (slice_, slice_ + 1), key)


def test_four_workers_push_one_sum() -> None:
    host = sums(4, 8)
    assert host.handle(offer(1, 8), 0.0) == []
    assert host.handle(offer(2, 8), 0.0) == []
    assert host.handle(offer(0, 8), 0.0) == [Add(0, (0, 1), (1, 2))]
    assert host.handle(offer(3, 8), 0.0) == [Add(0, (2, 3), (3, 4))]
    assert host.handle(Added(0, (2, 3), (3, 4)), 0.0) == []
    assert host.handle(Added(0, (0, 1), (1, 2)), 0.0) == [Add(0, (0, 2), (2, 4))]
    assert host.handle(Added(0, (0, 2), (2, 4)), 0.0) == [Push(0, (0, 4))]
    assert host.handle(Pushed(0, (0, 4), True), 0.0) == [Answer(call, True) for call in (10, 11, 12, 13)]


def test_a_contribution_without_a_sibling_on_this_host_is_its_workers_own() -> None:
    """Slices 0 to 2 of 8: the last one has its sibling elsewhere."""
    host = sums(3, 8)
    assert host.handle(offer(2, 8), 0.0) == [Drop(0, (2, 3)), Answer(12, False)]


def test_a_sum_is_pushed_when_its_sibling_is_elsewhere() -> None:
    host = sums(2, 4)
    host.handle(offer(0, 4), 0.0)
    host.handle(offer(1, 4), 0.0)
    assert host.handle(Added(0, (0, 1), (1, 2)), 0.0) == [Push(0, (0, 2))]


def test_a_push_that_fails_is_each_workers_own() -> None:
    host = sums(2, 2)
    host.handle(offer(0, 2), 0.0)
    host.handle(offer(1, 2), 0.0)
    host.handle(Added(0, (0, 1), (1, 2)), 0.0)
    assert host.handle(Pushed(0, (0, 2), False), 0.0) == [Answer(10, False), Answer(11, False)]


def test_a_sum_that_cannot_be_made_is_each_workers_own() -> None:
    host = sums(2, 2)
    host.handle(offer(0, 2), 0.0)
    host.handle(offer(1, 2), 0.0)
    assert host.handle(Added(0, (0, 1), (1, 2), well=False), 0.0) == [Answer(10, False), Answer(11, False)]


def test_contributions_with_other_facts_are_not_added() -> None:
    host = sums(2, 2)
    assert host.handle(offer(0, 2, key=b"a"), 0.0) == []
    given_back = [Drop(0, (0, 1)), Answer(10, False), Drop(0, (1, 2)), Answer(11, False)]
    assert host.handle(offer(1, 2, key=b"b"), 0.0) == given_back


@pytest.mark.parametrize("patience_s", [0.0, 2.0])
def test_patience(patience_s: float) -> None:
    """A worker that is late is not waited for in the next step either, until it is in time again."""
    least = max(patience_s, LEAST_PATIENCE_S)
    host = sums(2, 2, 0, patience_s)
    host.handle(offer(0, 2), 1.0)
    assert (host.due or 0.0) == 1.0 + least
    assert host.handle(Tick(), 1.0 + 0.9 * least) == []
    assert host.handle(Tick(), 1.0 + least) == [Drop(0, (0, 1)), Answer(10, False)]
    assert host.due is None
    assert host.handle(offer(1, 2), 9.0) == [Drop(0, (1, 2)), Answer(11, False)]

    for step, late_s, waits in ((1, 2 * least, False), (2, 0.5 * least, False), (3, 0.0, True)):
        now = 10.0 * step
        for worker in range(2):
            host.handle(Expects(worker, step, 2, worker, worker + 1, patience_s), now)
        assert (host.handle(offer(0, 2, step), now) == []) == waits, step
        host.handle(offer(1, 2, step), now + late_s)


def test_a_worker_that_has_not_begun_the_step_yet_is_waited_for() -> None:
    host = sums(2, 2)
    host.handle(Expects(0, 1, 2, 0, 1), 1.0)
    assert host.handle(offer(0, 2, 1), 1.0) == []
    assert (host.due or 0.0) == 1.0 + LEAST_PATIENCE_S
    host.handle(Expects(1, 1, 2, 1, 2), 1.1)
    assert host.handle(offer(1, 2, 1), 1.1) == [Add(1, (0, 1), (1, 2))]


def test_a_worker_that_offers_nothing_is_not_waited_for() -> None:
    """It hurries, since others take its slices."""
    host = sums(2, 2)
    host.handle(offer(0, 2), 0.0)
    assert host.handle(Expects(1, 0, 2, 0, 0), 0.0) == [Drop(0, (0, 1)), Answer(10, False)]


def test_a_worker_that_leaves_is_not_waited_for_and_what_it_offered_counts() -> None:
    host = sums(3, 4)
    host.handle(offer(0, 4), 0.0)
    host.handle(offer(1, 4), 0.0)
    assert host.handle(Leaves(1), 0.0) == []
    assert host.handle(Added(0, (0, 1), (1, 2)), 0.0) == [Push(0, (0, 2))]
    host = sums(2, 2)
    host.handle(offer(0, 2), 0.0)
    assert host.handle(Leaves(1), 0.0) == [Drop(0, (0, 1)), Answer(10, False)]


def test_an_offer_that_is_withdrawn_is_forgotten_and_a_sum_with_it_is_not() -> None:
    host = sums(2, 2)
    host.handle(offer(0, 2), 0.0)
    assert host.handle(Withdraws(10), 0.0) == [Drop(0, (0, 1))]
    assert host.handle(offer(1, 2), 0.0) == [Drop(0, (1, 2)), Answer(11, False)]
    host = sums(2, 2)
    host.handle(offer(0, 2), 0.0)
    host.handle(offer(1, 2), 0.0)
    host.handle(Withdraws(10), 0.0)
    assert host.handle(Added(0, (0, 1), (1, 2)), 0.0) == [Push(0, (0, 2))]
    assert host.handle(Pushed(0, (0, 2), True), 0.0) == [Answer(11, True)]


def test_the_next_step_ends_the_former_one() -> None:
    """Whoever begins a step has heard that all servers have published its version."""
    host = sums(4, 4)
    host.handle(offer(0, 4), 0.0)
    host.handle(offer(2, 4), 0.0)
    host.handle(offer(3, 4), 0.0)
    over = [Answer(10, True), Drop(0, (0, 1)), Answer(12, True), Answer(13, True)]
    assert host.handle(Expects(0, 1, 4, 0, 1), 0.0) == over
    assert host.handle(Added(0, (2, 3), (3, 4)), 0.0) == [Drop(0, (2, 4))]
    assert host.handle(Pushed(0, (2, 4), True), 0.0) == []
    assert host.handle(offer(1, 4), 0.0) == [Drop(0, (1, 2)), Answer(11, True)]


def test_an_offer_that_overlaps_is_not_taken() -> None:
    host = sums(2, 4)
    host.handle(offer(0, 4), 0.0)
    twice = Offers(1, 99, 0, 4, (0, 2))
    assert host.handle(twice, 0.0) == [Drop(0, (0, 2)), Answer(99, False)]


class World:
    """Workers of one host in random order. Checks what is promised in each moment."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.now = chance, 0.0
        self.host = HostSums()
        # The parts that lie with the seat, by step and node: the slices in each.
        self.held: dict[tuple[int, Node], list[Node]] = {}
        self.open: dict[int, tuple[int, Node]] = {}
        self.todo: list[Event] = []
        self.answered: set[int] = set()
        self.pushed: list[tuple[int, Node, int]] = []
        self.calls = 0

    def tell(self, event: Event) -> None:
        for effect in self.host.handle(event, self.now):
            self.perform(effect)

    def offers(self, worker: int, step: int, of: int, node: Node, key: bytes) -> None:
        self.calls += 1
        self.open[self.calls] = step, node
        # The shell keeps bytes under a name once.
        if (step, node) not in self.held:
            self.held[step, node] = [node]
            self.tell(Offers(worker, self.calls, step, of, node, key))
        else:
            del self.open[self.calls]

    def perform(self, effect: Effect) -> None:
        match effect:
            case Add(step, left, right):
                assert left[1] == right[0]
                assert {(step, left), (step, right)} <= self.held.keys()
                self.todo.append(Added(step, left, right, self.chance.random() < 0.9))
            case Push(step, node):
                assert len(self.held[step, node]) > 1, "only sums are pushed here"
                self.pushed.append((step, node, len(self.held[step, node])))
                self.todo.append(Pushed(step, node, self.chance.random() < 0.9))
            case Drop(step, node):
                del self.held[step, node]
            case Answer(call):
                assert call not in self.answered
                self.answered.add(call)
                self.open.pop(call, None)

    def ends(self, event: Event) -> None:
        """What was begun is done: the shell has added the bytes, or lets go of those that were pushed."""
        match event:
            case Added(step, left, right, well):
                parts = self.held.pop((step, left)) + self.held.pop((step, right))
                assert sorted(parts) == parts
                if well:
                    self.held[step, (left[0], right[1])] = parts
            case Pushed(step, node):
                del self.held[step, node]
        self.tell(event)


@pytest.mark.parametrize("seed", range(300))
def test_in_any_order_each_offer_is_answered_once_and_nothing_is_kept(seed: int) -> None:
    chance = random.Random(seed)
    world = World(chance)
    on_host, of = chance.randint(1, 5), chance.randint(1, 12)
    everybody = on_host + chance.randint(0, 3)
    ranges = assign(of, everybody)
    first = chance.randint(0, everybody - on_host)
    patience_s = chance.choice([0.0, 1.0])
    present = set(range(on_host))
    for step in range(4):
        work: list[tuple[int, Node]] = []
        for worker in sorted(present, key=lambda _: chance.random()):
            lo, hi = ranges[first + worker]
            world.tell(Expects(worker, step, of, lo, hi, patience_s))
            work += [(worker, node) for node in (cover(lo, hi, of) if lo < hi else ())]
        chance.shuffle(work)
        while work or world.todo:
            world.now += chance.choice([0.0, 0.01, 0.3])
            what = chance.random()
            if world.todo and what < 0.4:
                world.ends(world.todo.pop(chance.randrange(len(world.todo))))
            elif work and what < 0.8:
                worker, node = work.pop()
                if worker in present:
                    world.offers(worker, step, of, node, b"b" if chance.random() < 0.05 else b"a")
            elif what < 0.83 and world.open:
                call = chance.choice(sorted(world.open))
                del world.open[call]
                world.tell(Withdraws(call))
            elif what < 0.85 and len(present) > 1 and chance.random() < 0.3:
                present.discard(gone := chance.choice(sorted(present)))
                world.tell(Leaves(gone))
            else:
                world.tell(Tick())
            if not world.todo and not work:
                break
        while world.todo or world.host.due is not None:
            if world.todo:
                world.ends(world.todo.pop(chance.randrange(len(world.todo))))
            else:
                due = world.host.due
                assert due is not None
                world.now = max(world.now, due)
                world.tell(Tick())
        assert world.open == {}
        assert world.held == {}
    slices = [(step, slice_) for step, node, _ in world.pushed for slice_ in range(*node)]
    assert len(slices) == len(set(slices)), "no slice leaves twice"
    assert all(is_node(*node, of) for _, node, _ in world.pushed)


@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("each", [1, 2, 4, 8])
def test_what_leaves_a_host_does_not_grow_with_its_workers(hosts: int, each: int) -> None:
    """A power of two: one sum."""
    of = hosts * each
    for first in range(0, of, each):
        world = World(random.Random(0))
        world.chance.random = lambda: 0.0  # type: ignore[method-assign]
        for worker in range(each):
            world.tell(Expects(worker, 0, of, first + worker, first + worker + 1))
        for worker in range(each):
            world.offers(worker, 0, of, (first + worker, first + worker + 1), b"")
        while world.todo:
            world.ends(world.todo.pop())
        assert world.pushed == ([(0, (first, first + each), each)] if each > 1 else [])
        assert not world.open
