"""The rules that every state of an asynchronous job must keep, judged by the workers' own clocks and by ledgers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from paramserver.core.shards.shard import ShardState
from paramserver.core.versions.events import (
    Build,
    Outcome,
)
from paramserver.core.versions.names import AsyncName, Name
from tests.support.cluster.imagined import PUSH, Worker


class Rules:
    """What is known of one schedule. Every method raises AssertionError if a rule is broken."""

    def __init__(self, staleness: int | None, shards: Sequence[ShardState], workers: Sequence[Worker]) -> None:
        self.staleness = staleness
        self.shards = shards
        self.workers = workers
        self.ledgers: list[dict[Name, int]] = [{} for _ in shards]
        self.accepted = [0 for _ in shards]
        self.floors = [0 for _ in shards]
        self.spread = 0

    def moved(self, shard: int) -> None:
        """After every event: the slowest clock never moves back, and the shard does not contradict itself."""
        state = self.shards[shard]
        if state.pulls.floor < self.floors[shard]:
            self.fail(f"the slowest clock of shard {shard} moved back from {self.floors[shard]} to {state.pulls.floor}")
        self.floors[shard] = state.pulls.floor
        state.check_invariants()

    def applied(self, shard: int, build: Build) -> None:
        """A version stands: it holds one more slice, which is new."""
        ledger = self.ledgers[shard]
        for name in build.names:
            if name in ledger:
                self.fail(f"{name} is applied twice on shard {shard}")
            ledger[name] = 1
        if build.version != len(ledger):
            self.fail(f"D13: version {build.version} of shard {shard} has {len(ledger)} contributions")

    def everywhere(self, name: Name) -> bool:
        """Do all shards have it?"""
        return all(name in ledger for ledger in self.ledgers)

    def push_answered(self, shard: int, name: Name, outcome: Outcome) -> None:
        """Nobody is told that a slice counts before it does."""
        if name not in self.ledgers[shard]:
            self.fail(f"shard {shard} answers {outcome.value} to {name} before it is applied")
        if outcome is Outcome.ACCEPTED:
            self.accepted[shard] += 1

    def pull_answered(self, shard: int, worker: Worker, clock: int | None) -> None:
        """D02, a worker sees what it has done itself; D03, and all that the others have done up to the bound."""
        ledger = self.ledgers[shard]
        if worker.last is not None and worker.last not in ledger:
            self.fail(f"D02: worker {worker.ident} pulls from shard {shard} and misses its own {worker.last}")
        if clock is None or self.staleness is None:
            return
        for other in self.workers:
            if other.at_work and other is not worker and other.clock is not None:
                there = other.state == PUSH and other.queue[0] in ledger
                if other.clock + there < clock - self.staleness:
                    self.fail(
                        f"D03: worker {worker.ident} pulls at clock {clock} from shard {shard}, which lacks the "
                        f"contribution of worker {other.ident} at {other.clock}; the bound is {self.staleness}"
                    )

    def let_in(self, worker: Worker) -> None:
        """D01: all shards let a worker begin its next slice, and nobody is further from anybody than the bound."""
        assert worker.clock is not None
        for other in self.workers:
            if other.at_work and other is not worker and other.clock is not None:
                ahead = worker.clock - other.clock
                if other.state == PUSH and self.everywhere(other.queue[0]):
                    ahead -= 1  # it has finished, and does not know it yet
                self.spread = max(self.spread, ahead)
                # Who waits for weights has finished a slice more than the one it was let in for.
                if self.staleness is not None and not -self.staleness - 1 <= ahead <= self.staleness:
                    self.fail(
                        f"D01: worker {worker.ident} is let in at clock {worker.clock}, {ahead} ahead of worker "
                        f"{other.ident}; the bound is {self.staleness}"
                    )

    def end(self, slices: Sequence[AsyncName], left: Sequence[object]) -> None:
        """Every slice is counted once on every shard, acknowledged once, and no buffer is ``left``."""
        for shard, state in enumerate(self.shards):
            if self.ledgers[shard] != dict.fromkeys(slices, 1):
                self.fail(f"shard {shard} lacks {sorted(set(slices) - set(self.ledgers[shard]))}")
            counts = (self.accepted[shard], state.counters.applied, state.version, len(slices))
            if len(set(counts)) > 1:
                self.fail(f"D13: acknowledged, applied, version and slices of shard {shard} are {counts}")
            if left[shard]:
                self.fail(f"shard {shard} keeps buffers that nobody needs: {left[shard]}")

    def fail(self, text: str) -> NoReturn:
        """A rule is broken."""
        raise AssertionError(text)
