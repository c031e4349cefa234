"""A step costs a shard the same for each of many workers: parked pulls are left alone until it is their turn."""

from __future__ import annotations

import random

import pytest

from paramserver.core.shards.clocks import Clocks
from paramserver.core.shards.published import Published
from paramserver.core.shards.pulls import Pulls
from paramserver.core.shards.shard import ShardState
from paramserver.core.versions.consistency import Consistency, Mode, Policies
from paramserver.core.versions.events import (
    Activated,
    AnswerPull,
    Arrived,
    AtClock,
    AtLeast,
    Built,
    Effect,
    Joining,
    PullAsked,
)
from paramserver.core.versions.names import AsyncName, SyncName

WORKERS = 100


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[PullAsked]:
    """The pulls that were looked at."""
    found: list[PullAsked] = []
    right = Pulls._answer

    def answer(self: Pulls, published: Published, policies: Policies, pull: PullAsked) -> Effect | None:
        found.append(pull)
        return right(self, published, policies, pull)

    monkeypatch.setattr(Pulls, "_answer", answer)
    return found


def active(mode: Mode) -> ShardState:
    state = ShardState(Consistency(mode, 0 if mode is Mode.ASYNC else None), range(1, WORKERS + 1))
    state.handle(Activated(0))
    return state


def test_a_synchronous_pull_is_looked_at_when_it_comes_and_when_its_version_stands(looks: list[PullAsked]) -> None:
    state = active(Mode.SYNC)
    for worker in range(WORKERS):
        state.handle(Arrived(worker, SyncName(0, worker, worker + 1, WORKERS), worker, worker + 1, 0))
        assert not any(isinstance(e, AnswerPull) for e in state.handle(PullAsked(worker, worker + 1, AtLeast(1), 0)))
    assert sum(isinstance(effect, AnswerPull) for effect in state.handle(Built(1))) == WORKERS
    assert len(looks) == 2 * WORKERS


def test_a_pull_at_a_clock_is_looked_at_when_it_comes_and_when_the_slowest_clock_moves(looks: list[PullAsked]) -> None:
    """Versions that others make meanwhile change nothing for it."""
    state = active(Mode.ASYNC)
    for worker in range(WORKERS):
        state.handle(PullAsked(worker, worker + 1, Joining(), 0))
    looks.clear()
    answered = 0
    for worker in range(WORKERS):
        state.handle(Arrived(WORKERS + worker, AsyncName(0, worker), worker, worker + 1, 0))
        effects = state.handle(Built(worker + 1))
        effects += state.handle(PullAsked(2 * WORKERS + worker, worker + 1, AtClock(1), 0))
        answered += sum(isinstance(effect, AnswerPull) for effect in effects)
    assert answered == WORKERS
    # The last one moves the slowest clock with its contribution, when the others' pulls are parked.
    assert len(looks) == 2 * WORKERS - 1


def test_the_slowest_clock_is_known_after_each_change() -> None:
    """Random changes, so that the slowest worker goes on, leaves, or is one of several."""
    clocks, chance = Clocks(), random.Random(7)
    for _ in range(3000):
        worker = chance.randrange(6)
        if chance.random() < 0.1:
            clocks.drop(worker)
        else:
            clocks.raise_to(worker, max(clocks.of.values(), default=0) + chance.randrange(-3, 2))
        assert clocks.slowest == min(clocks.of.values(), default=None)
    assert max(clocks.of.values()) > 100, "the clocks stood still"
