"""A whole synchronous job in one loop: real shards, imagined workers, members that come and go.

Contributions are expressions: slice 3 is the number 3, a sum is the pair of what was added. So a version tells which
slices it was made of and in which order they were added, and every bit of the real thing depends on nothing else.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from paramserver.core.shards.shard import ShardState
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.core.versions.events import (
    Activated,
    AnswerPull,
    AnswerPush,
    Arrived,
    AtLeast,
    Build,
    Built,
    DropBuffer,
    DropVersion,
    Event,
    Exactly,
    MembersChanged,
    PullAsked,
    Refuse,
    Want,
)
from paramserver.core.versions.names import SyncName
from paramserver.core.versions.reduction import Node, cover, fold_order, sibling, split
from paramserver.core.work.slices import SyncSchedule, assign

PUSHED, PULLED, BUILT, MEMBERS, VIEW = range(5)
Expression = Any  # a number, or a pair of expressions
_NOISE = 0.08
_MAX_ACTIONS = 5000


def canonical(node: Node, of: int) -> Expression:
    """The sum of a node, as the tree says it."""
    return node[0] if node[1] - node[0] == 1 else tuple(canonical(half, of) for half in split(node, of))


def fold(parts: dict[Node, Expression], of: int) -> Expression:
    """Add up parts in the fixed order; raises ValueError if they are not one node, each slice once."""
    sums = dict(parts)
    for left, right, whole in fold_order(list(sums), of):
        sums[whole] = (sums.pop(left), sums.pop(right))
    (result,) = sums.values()
    return result


class Worker:
    """One worker: the range of each step that is its own, and what it has of it."""

    def __init__(self, ident: int, view: tuple[int, ...], merges: bool) -> None:
        self.ident = ident
        self.view = view  # the members, as far as it knows
        self.merges = merges
        self.version = -1
        self.range = (0, 0)
        self.done: set[int] = set()
        self.held: dict[Node, Expression] = {}
        self.of = 0  # slices of its step; 0: it has none of them
        self.want: dict[int, Want] = {}  # by shard, what it has asked for and not got
        self.got: dict[int, int] = {}  # by shard, the version it got


class Steps:
    """One run of one seed. ``impatient``: whoever finds the shards apart waits for the newest version of them."""

    def __init__(self, seed: int, impatient: bool = False) -> None:
        self.replay = f"Steps({seed}, {impatient=})"
        self.impatient = impatient
        self.rng = rng = random.Random(seed)
        self.chance = rng.random
        self.counts: Counter[str] = Counter()
        self.schedule = SyncSchedule(rng.randint(1, 12), rng.randint(1, 9))
        self.last = rng.randint(2, 6)  # the version at which the job is over
        count = rng.randint(1, 4)
        self.members = tuple(range(1, count + 1))
        self.generation, self.next_ident, self.next_call = 1, count + 1, 1
        self.workers = [Worker(ident, self.members, rng.random() < 0.7) for ident in self.members]
        self.shards = [ShardState(Consistency(Mode.SYNC), self.members, 1) for _ in range(rng.choice((1, 2, 2, 3)))]
        self.buffers: list[dict[int, Expression]] = [{} for _ in self.shards]
        self.calls: dict[int, Any] = {}
        self.flight: list[tuple[int, int, Any]] = []
        self.late: list[tuple[int, int, Any]] = []
        times = sorted(rng.randrange(60) for _ in range(rng.randint(0, 4)))
        self.plan = [(time, rng.choice(("join", "die", "die", "evict"))) for time in times]
        for shard in range(len(self.shards)):
            self.happen(shard, Activated(0))
        for worker in self.workers:
            self.arrive(worker, 0)

    # ---- the loop

    def run(self) -> Counter[str]:
        """Play it to its end; raises AssertionError if a rule is broken. Every error carries what shows it again."""
        try:
            self.play()
        except Exception as error:
            error.add_note(f"replay with {self.replay}")
            raise
        return self.counts

    def play(self) -> None:
        flight, actions = self.flight, 0
        while any(shard.version < self.last for shard in self.shards) or flight or self.late:
            actions += 1
            assert actions < _MAX_ACTIONS, "it never ends"
            if self.plan and self.plan[0][0] <= actions:
                self.fault(self.plan.pop(0)[1])
            ready = [worker for worker in self.workers if self.runnable(worker)]
            moves = len(flight) + len(ready)
            if moves == 0 and any(shard.version < self.last for shard in self.shards):
                assert not self.members, f"nobody can move: {[str(shard.missing()) for shard in self.shards]}"
                self.join()
            elif moves == 0 or (self.late and self.chance() < 0.02):
                self.deliver(*self.late.pop())
            else:
                move = int(self.chance() * moves)
                if move < len(flight):
                    flight[move], flight[-1] = flight[-1], flight[move]
                    self.deliver(*flight.pop())
                else:
                    self.compute(ready[move - len(flight)])
        for shard in self.shards:
            assert (shard.version, len(shard.pulls)) == (self.last, 0)
        assert not any(self.buffers), f"buffers that nobody needs: {self.buffers}"

    # ---- what workers do

    def size(self, version: int) -> int:
        return len(self.schedule.step(version).slices)

    def open_slices(self, worker: Worker) -> list[int]:
        return [i for i in range(*worker.range) if i not in worker.done]

    def runnable(self, worker: Worker) -> bool:
        return not worker.want and worker.version < self.last and bool(self.open_slices(worker))

    def arrive(self, worker: Worker, version: int) -> None:
        """It has a version, the same of all shards, and begins its part of that step."""
        assert version > worker.version, "a worker never goes back"
        worker.version = version
        worker.done.clear()
        worker.held.clear()
        self.look(worker)

    def look(self, worker: Worker) -> None:
        """It learns which part of the step is its own; what it holds for merging goes out as it is."""
        for node, expression in sorted(worker.held.items()):
            self.push(worker, node, expression)
        worker.held.clear()
        worker.range, worker.of = (0, 0), 0
        if worker.version < self.last and worker.ident in worker.view:
            worker.of = self.size(worker.version)
            worker.range = assign(worker.of, len(worker.view))[worker.view.index(worker.ident)]
        if not self.open_slices(worker) and worker.version < self.last:
            self.finish(worker)

    def compute(self, worker: Worker) -> None:
        index = self.rng.choice(self.open_slices(worker))
        worker.done.add(index)
        if not worker.merges or not worker.of:
            self.push(worker, (index, index + 1), index)
        else:
            node = index, index + 1
            worker.held[node] = index
            while (other := sibling(node, worker.of)) in worker.held:
                assert other is not None
                left, right = sorted((node, other))
                node = left[0], right[1]
                worker.held[node] = (worker.held.pop(left), worker.held.pop(right))
            if node in cover(*worker.range, worker.of):
                self.push(worker, node, worker.held.pop(node))
        if not self.open_slices(worker):
            self.finish(worker)

    def finish(self, worker: Worker) -> None:
        """Nothing of this step is its own any more: send what is held, and wait for the next version."""
        for node, expression in sorted(worker.held.items()):
            self.push(worker, node, expression)
        worker.held.clear()
        self.pull(worker, {shard: AtLeast(worker.version + 1) for shard in range(len(self.shards))})

    def push(self, worker: Worker, node: Node, expression: Expression) -> None:
        name = SyncName(worker.version, *node, self.size(worker.version))
        self.counts["larger nodes"] += name.slices > 1
        for shard in range(len(self.shards)):
            self.flight.append((PUSHED, shard, (worker, name, expression)))

    def pull(self, worker: Worker, want: dict[int, Want]) -> None:
        worker.want |= want
        for shard, wanted in want.items():
            self.flight.append((PULLED, shard, (worker, worker.version, wanted)))

    def pulled(self, worker: Worker) -> None:
        """All shards have answered: go on if it is one version, otherwise fetch the one that all shards have."""
        choice = max(worker.got.values()) if self.impatient else min(worker.got.values())
        others = [shard for shard, version in worker.got.items() if version != choice]
        if not others:
            worker.got.clear()
            return self.arrive(worker, choice)
        self.counts["shards apart"] += 1
        self.pull(worker, {shard: Exactly(choice) for shard in others})

    # ---- what befalls them

    def fault(self, kind: str) -> None:
        self.counts[kind] += 1
        if kind == "join":
            self.join()
        elif self.members:
            ident = self.rng.choice(self.members)
            if kind == "die":  # what it has sent arrives, or not; who is only evicted goes on for ever
                gone = next(worker for worker in self.workers if worker.ident == ident)
                self.workers.remove(gone)
                self.flight[:] = [
                    m for m in self.flight if m[0] != PUSHED or m[2][0] is not gone or self.chance() < 0.5
                ]
            self.change(tuple(member for member in self.members if member != ident))

    def join(self) -> None:
        worker = Worker(self.next_ident, (), self.chance() < 0.7)
        self.next_ident += 1
        self.workers.append(worker)
        self.pull(worker, {shard: AtLeast(0) for shard in range(len(self.shards))})
        self.change((*self.members, worker.ident))

    def change(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.generation += 1
        for shard in range(len(self.shards)):
            self.flight.append((MEMBERS, shard, MembersChanged(self.generation, frozenset(members))))
        for worker in self.workers:
            self.flight.append((VIEW, self.generation, (worker, members)))

    # ---- messages

    def deliver(self, kind: int, shard: int, content: Any) -> None:
        if kind == PUSHED:
            luck = self.chance()
            if luck < _NOISE:
                self.counts["repeated"] += 1
                (self.late if luck < _NOISE / 2 else self.flight).append((kind, shard, content))
            worker, name, expression = content
            call = self.call(content)
            self.buffers[shard][call] = expression
            self.happen(shard, Arrived(call, name, call, worker.ident, 0))
        elif kind == PULLED:
            worker, _, wanted = content
            if self.chance() < _NOISE:  # the answer is lost, the call comes again
                self.counts["repeated"] += 1
                self.happen(shard, PullAsked(self.call(None), worker.ident, wanted, 0))
            self.happen(shard, PullAsked(self.call(content), worker.ident, wanted, 0))
        elif kind == BUILT:
            self.happen(shard, Built(content))
        elif kind == MEMBERS:
            self.happen(shard, content)
        else:
            self.see(content[0], content[1], shard)

    def see(self, worker: Worker, members: tuple[int, ...], generation: int) -> None:
        if worker not in self.workers or generation < self.generation:
            return
        worker.view = members
        if worker.version >= 0:
            worker.want.clear()  # as SyncPace does: it stops waiting and looks again
            worker.got.clear()
            self.look(worker)

    def call(self, content: Any) -> int:
        call = self.next_call
        self.next_call += 1
        self.calls[call] = content
        return call

    # ---- what shards do

    def happen(self, shard: int, event: Event) -> None:
        state = self.shards[shard]
        for effect in state.handle(event):
            match effect:
                case AnswerPush(call, outcome):
                    self.counts[outcome.value] += 1
                    del self.calls[call]
                case AnswerPull(call, version):
                    self.answer(shard, self.calls.pop(call), version)
                case Refuse(call):
                    self.refused(shard, self.calls.pop(call), effect)
                case DropBuffer(buffer):
                    del self.buffers[shard][buffer]
                case Build():
                    self.build(shard, effect)
                case DropVersion():
                    pass
        state.check_invariants()

    def build(self, shard: int, build: Build) -> None:
        """Here the real thing adds gradients: the sum must be the one that the tree says, each slice once."""
        of = self.size(build.version - 1)
        parts: dict[Node, Expression] = {}
        for name, buffer in zip(build.names, build.buffers, strict=True):
            assert isinstance(name, SyncName)
            assert (name.step, name.of) == (build.version - 1, of), f"{name} in version {build.version}"
            parts[(name.lo, name.hi)] = self.buffers[shard].pop(buffer)
        assert fold(parts, of) == canonical((0, of), of), f"version {build.version} is {fold(parts, of)}"
        self.counts["mixed"] += 1 < len(parts) < of
        self.flight.append((BUILT, shard, build.version))

    def answer(self, shard: int, content: Any, version: int) -> None:
        if content is None:
            return
        worker, base, wanted = content
        if worker in self.workers and worker.version == base and worker.want.get(shard) == wanted:
            del worker.want[shard]
            worker.got[shard] = version
            if not worker.want:
                self.pulled(worker)

    def refused(self, shard: int, content: Any, refusal: Refuse) -> None:
        """Refused are those who are behind (gone), ahead of a shard (never), or members no more (fenced)."""
        self.counts[refusal.refusal.value] += 1
        assert refusal.refusal.value in ("gone", "fenced"), refusal
        if content is None or content[0] not in self.workers:
            return
        worker, base, wanted = content
        if worker.version == base and worker.want.get(shard) == wanted:
            worker.want.clear()
            worker.got.clear()
            if refusal.refusal.value == "gone":
                assert isinstance(wanted, Exactly)
                self.pull(worker, {k: AtLeast(wanted.version + 1) for k in range(len(self.shards))})
            else:
                self.workers.remove(worker)
