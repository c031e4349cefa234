"""A whole asynchronous job in one loop: real shards and leases, imagined workers, a network that a seed makes go wrong.

Whatever can happen next waits in a list, and the seed says what does: a message arrives, a version stands, a worker
moves on. Messages are late; pushes arrive twice, even long after; answers are lost, and the call is repeated. Workers
join, die (between two shards as well), are taken for dead and come back.

One thing is taken for granted: the pulls and idle messages of a worker reach a shard in the order in which it sent
them, as they do on one connection. Pushes overtake each other and everything else.
"""

from __future__ import annotations

import random
from typing import Any

from paramserver.core.shards.shard import ShardState
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.core.versions.events import (
    Activated,
    AnswerPull,
    AnswerPush,
    Arrived,
    AtClock,
    Build,
    Built,
    CallGone,
    DropBuffer,
    DropVersion,
    Event,
    Joining,
    MembersChanged,
    Outcome,
    PullAsked,
    Refuse,
    WentIdle,
)
from paramserver.core.versions.names import AsyncName
from paramserver.core.work.leases import SliceLeases
from tests.support.cluster.imagined import COMPUTE, GONE, IDLE, PULL, PUSH, REST, SEEK, Tally, Worker
from tests.support.schedules.rules import Rules

# What a message is. READMITTED tells a worker that it is a member again, under another number.
PUSHED, PULLED, IDLED, MEMBERS, BUILT, CALL_GONE, READMITTED = range(7)
Message = tuple[int, int, Worker | None, Any]  # (what, shard, of whom, what it says)

_NOISE = 0.08
_MAX_ACTIONS_PER_SLICE = 400
_ANY = -1


class Schedule:
    """One run of one seed; what is not given is drawn.

    ``staleness`` None is unbounded. ``faults`` False: nobody comes or goes and no message is lost or repeated.
    ``trusting``: a newcomer begins at the furthest of the shards' slowest clocks, without asking the others for it.
    """

    def __init__(
        self,
        seed: int,
        *,
        staleness: int | None = _ANY,
        workers: int = 0,
        slices: int = 0,
        faults: bool = True,
        trusting: bool = False,
    ) -> None:
        self.replay = f"Schedule({seed}, {staleness=}, {workers=}, {slices=}, {faults=}, {trusting=})"
        self.rng = rng = random.Random(seed)
        self.chance = rng.random
        self.tally = Tally(schedules=1)
        self.trusting = trusting
        self.slices, self.epochs = slices or rng.randint(2, 6), rng.choice((1, 1, 2))
        bound = rng.choice((0, 1, 2, 3, None)) if staleness == _ANY else staleness
        count = workers or rng.randint(1, 4)
        self.workers = [Worker(ident) for ident in range(1, count + 1)]
        self.members = frozenset(worker.ident for worker in self.workers)
        self.generation = 1
        self.next_ident, self.next_call = count + 1, 1
        self.leases = SliceLeases(self.slices)
        self.edition = 0  # rises when somebody who looked for slices in vain should look again
        self.shards = [
            ShardState(Consistency(Mode.ASYNC, bound), self.members, 1) for _ in range(rng.choice((1, 1, 2, 2, 3)))
        ]
        self.all = (1 << len(self.shards)) - 1
        self.rules = Rules(bound, self.shards, self.workers)
        self.buffers: list[dict[int, AsyncName]] = [{} for _ in self.shards]
        self.calls: dict[int, tuple[Worker, Any, bool]] = {}  # (whose, what, its answer will be lost)
        self.flight: list[Message] = []
        self.late: list[Message] = []  # arrive when all is over
        self.lost: list[int] = []  # numbers of the dead that nobody has missed yet
        self.log: list[tuple[str, int, int, AsyncName | None]] = []  # (what, worker, clock, slice)
        self.noise = _NOISE if faults else 0.0
        times = sorted(rng.randrange(80) for _ in range(rng.randint(0, 4) if faults else 0))
        self.plan = [(time, rng.choice(("join", "die", "die", "evict"))) for time in times]
        for shard in range(len(self.shards)):
            self.happen(shard, Activated(0))

    # ---- the loop

    def run(self) -> Tally:
        """Play it to its end; raises AssertionError if a rule is broken. Every error carries what shows it again."""
        try:
            self.play()
        except Exception as error:
            error.add_note(f"replay with {self.replay}")
            raise
        return self.tally

    def play(self) -> None:
        flight, lost, tally = self.flight, self.lost, self.tally
        limit = _MAX_ACTIONS_PER_SLICE * self.slices * self.epochs + 4000
        while True:
            tally.actions += 1
            if tally.actions > limit:
                self.rules.fail("it never ends")
            if self.plan and self.plan[0][0] <= tally.actions:
                self.fault(self.plan.pop(0)[1])
            ready = [worker for worker in self.workers if self.runnable(worker)]
            move = int(self.chance() * (len(flight) + len(ready) + len(lost)))
            if move < len(flight):
                flight[move], flight[-1] = flight[-1], flight[move]
                self.deliver(flight.pop())
            elif (move := move - len(flight)) < len(ready):
                self.step(ready[move])
            elif lost:
                self.remove(lost.pop())
            elif not self.proceed():
                break
        self.rules.end([AsyncName(e, i) for e in range(self.epochs) for i in range(self.slices)], self.buffers)

    def runnable(self, worker: Worker) -> bool:
        """Could this worker move on by itself?"""
        state = worker.state
        if state == COMPUTE:
            return True
        return (state == SEEK or (state == REST and worker.edition != self.edition)) and worker.ident in self.members

    def proceed(self) -> bool:
        """Nothing moves: false if that is the end, otherwise see to it that it goes on."""
        stuck = [(w.ident, w.state, w.clock) for w in self.workers if w.state != GONE]
        if stuck:
            self.rules.fail(f"D16: nobody can move: workers (number, state, clock) {stuck} wait for ever")
        if not self.leases.finished(self.epochs - 1):
            self.join()  # all are dead
        elif self.late:
            self.deliver(self.late.pop())
        else:
            return False
        return True

    # ---- what workers do

    def step(self, worker: Worker) -> None:
        if worker.state == COMPUTE:
            worker.state, worker.todo = PUSH, self.all
            for shard in range(len(self.shards)):
                self.send_push(worker, shard)
            return
        self.report(worker)
        while not self.seek(worker):
            if worker.epoch < self.epochs - 1 and self.leases.nothing_left(worker.epoch):
                worker.epoch += 1
            elif self.leases.finished(self.epochs - 1):
                self.leave(worker)
                return self.remove(worker.ident)
            elif worker.state == REST:
                worker.edition = self.edition
                return
            else:
                return self.rest(worker)

    def seek(self, worker: Worker) -> bool:
        names = self.leases.lease(worker.ident, worker.epoch, int(self.chance() * 3) + 1, len(self.members))
        worker.queue.extend(names)
        if names and worker.state == SEEK and worker.clock is not None:
            self.begin(worker)
        elif names:
            self.send_pulls(worker)
        return bool(names)

    def rest(self, worker: Worker) -> None:
        """Others hold what is left: keep nobody waiting meanwhile."""
        self.tally.idles += 1
        self.leave(worker)
        worker.state, worker.clock, worker.todo = IDLE, None, self.all
        for shard in range(len(self.shards)):
            self.flight.append((IDLED, shard, worker, worker.ident))

    def leave(self, worker: Worker) -> None:
        worker.state, worker.at_work = GONE, False
        self.log.append(("gone", worker.ident, 0, None))

    def report(self, worker: Worker) -> None:
        if worker.done:
            self.leases.complete(worker.done)
            worker.done = []
            self.edition += 1

    def begin(self, worker: Worker) -> None:
        worker.state = COMPUTE
        if worker.at_work and worker.clock is not None:
            self.log.append(("start", worker.ident, worker.clock, worker.queue[0]))

    def send_push(self, worker: Worker, shard: int) -> None:
        self.flight.append((PUSHED, shard, worker, (worker.queue[0], worker.clock, worker.ident)))

    def send_pulls(self, worker: Worker) -> None:
        worker.state, worker.todo = PULL, self.all
        worker.round += 1
        worker.seen, worker.whole = 0, True
        for shard in range(len(self.shards)):
            self.send_pull(worker, shard)

    def send_pull(self, worker: Worker, shard: int) -> None:
        self.flight.append((PULLED, shard, worker, (worker.round, worker.clock, worker.ident)))

    def pushed(self, worker: Worker) -> None:
        """Every shard has the slice."""
        assert worker.clock is not None
        worker.last = worker.queue.pop(0)
        worker.done.append(worker.last)
        worker.clock += 1
        if self.chance() < 0.3:
            self.report(worker)
        self.send_pulls(worker)

    def pulled(self, worker: Worker) -> None:
        """Every shard has let it in."""
        if worker.clock is None or worker.seen > worker.clock:
            again = worker.clock is not None or not self.trusting
            worker.clock = worker.seen
            if again:  # begin where the furthest shard is, once all of them agree
                return self.send_pulls(worker)
        if worker.whole and worker.ident in self.members:  # else it counts from its next pull
            self.rules.let_in(worker)
            worker.at_work = True
            self.log.append(("let in", worker.ident, worker.clock, None))
        if worker.queue:
            self.begin(worker)
        else:
            worker.state = SEEK

    # ---- what befalls them

    def fault(self, kind: str) -> None:
        alive = [worker for worker in self.workers if worker.state != GONE]
        present = [worker for worker in alive if worker.ident in self.members]
        if kind == "join" and len(alive) < 5:
            self.join()
        elif kind == "die" and alive:
            self.die(self.rng.choice(alive))
        elif kind == "evict" and present:
            self.evict(self.rng.choice(present))

    def join(self) -> None:
        self.tally.joins += 1
        worker = Worker(self.next_ident)
        self.next_ident += 1
        self.workers.append(worker)
        self.change(self.members | {worker.ident})

    def die(self, worker: Worker) -> None:
        """From one moment to the next: what it has sent arrives, or not."""
        self.tally.deaths += 1
        self.tally.deaths_between_shards += worker.state == PUSH and 0 < worker.todo < self.all
        self.leave(worker)
        self.flight[:] = [m for m in self.flight if m[2] is not worker or self.chance() < 0.5]
        for call, (caller, _, _) in self.calls.items():
            if caller is worker and self.chance() < 0.5:
                self.flight.extend((CALL_GONE, shard, None, call) for shard in range(len(self.shards)))
        if worker.ident in self.members:
            self.lost.append(worker.ident)

    def evict(self, worker: Worker) -> None:
        """It is taken for dead, but was only away; it comes back under another number and goes on where it stood."""
        self.tally.evictions += 1
        worker.at_work = False
        self.log.append(("gone", worker.ident, 0, None))
        self.remove(worker.ident)
        self.flight.append((READMITTED, 0, worker, None))

    def readmit(self, worker: Worker) -> None:
        if worker.state == GONE:
            return
        worker.ident = self.next_ident
        self.next_ident += 1
        self.change(self.members | {worker.ident})
        if worker.state == PULL:
            worker.whole = worker.todo == self.all
            for shard in range(len(self.shards)):
                if worker.todo >> shard & 1:
                    self.send_pull(worker, shard)

    def remove(self, ident: int) -> None:
        if self.leases.give_back(ident):
            self.edition += 1
        self.change(self.members - {ident})

    def change(self, members: frozenset[int]) -> None:
        self.members = members
        self.generation += 1
        for shard in range(len(self.shards)):
            self.flight.append((MEMBERS, shard, None, MembersChanged(self.generation, members)))

    # ---- messages arrive

    def deliver(self, message: Message) -> None:
        kind, shard, worker, content = message
        if kind == BUILT:
            self.built(shard, content)
        elif kind == MEMBERS:
            self.happen(shard, content)
        elif kind == CALL_GONE:
            self.happen(shard, CallGone(content))
        elif worker is None:
            raise AssertionError(f"a message of nobody: {message}")
        elif kind == PUSHED:
            self.deliver_push(message, shard, worker)
        elif kind == PULLED:
            self.deliver_pull(shard, worker, content)
        elif kind == IDLED:
            self.deliver_idle(shard, worker, content)
        else:
            self.readmit(worker)

    def deliver_push(self, message: Message, shard: int, worker: Worker) -> None:
        name, clock, ident = message[3]
        luck = self.chance()
        if luck < self.noise / 2:
            self.tally.repeated += 1
            (self.late if luck < self.noise / 4 else self.flight).append(message)
        call = self.next_call
        self.next_call += 1
        self.calls[call] = (worker, name, self.noise / 2 <= luck < self.noise)
        self.tally.duplicates_in_making += name in self.buffers[shard].values()
        self.buffers[shard][call] = name
        self.happen(shard, Arrived(call, name, call, ident, 0, clock))

    def deliver_pull(self, shard: int, worker: Worker, content: tuple[int, int | None, int]) -> None:
        _, clock, ident = content
        want = Joining() if clock is None else AtClock(clock)
        luck = self.chance()
        twice = luck < self.noise / 2
        self.tally.repeated += twice
        for _ in range(1 + twice):
            call = self.next_call
            self.next_call += 1
            self.calls[call] = (worker, content, self.noise / 2 <= luck < self.noise)
            self.happen(shard, PullAsked(call, ident, want, 0))
        self.tally.parked += call in self.calls

    def deliver_idle(self, shard: int, worker: Worker, ident: int) -> None:
        twice = self.chance() < self.noise
        self.tally.repeated += twice
        for _ in range(1 + twice):
            self.happen(shard, WentIdle(ident))
        if worker.state == IDLE:
            worker.todo &= ~(1 << shard)
            if not worker.todo:
                worker.state = REST

    # ---- what shards do

    def happen(self, shard: int, event: Event) -> None:
        for effect in self.shards[shard].handle(event):
            if type(effect) is AnswerPush:
                self.answer_push(shard, effect)
            elif type(effect) is AnswerPull:
                self.answer_pull(shard, effect)
            elif type(effect) is Build:
                self.flight.append((BUILT, shard, None, effect))
            elif type(effect) is DropBuffer:
                del self.buffers[shard][effect.buffer]
            elif type(effect) is Refuse:
                self.tally.fenced += 1
                del self.calls[effect.call]
            else:
                assert type(effect) is DropVersion
        self.rules.moved(shard)

    def built(self, shard: int, build: Build) -> None:
        assert tuple(self.buffers[shard].pop(buffer) for buffer in build.buffers) == build.names
        self.rules.applied(shard, build)
        for name in build.names:
            if self.rules.everywhere(name):
                assert isinstance(name, AsyncName)
                self.log.append(("in", 0, 0, name))
        self.happen(shard, Built(build.version))

    def answer_push(self, shard: int, answer: AnswerPush) -> None:
        worker, name, lost = self.calls.pop(answer.call)
        self.rules.push_answered(shard, name, answer.outcome)
        self.tally.duplicates += answer.outcome is Outcome.DUPLICATE
        if worker.state != PUSH or worker.queue[0] != name:
            return
        if lost:
            self.tally.lost_answers += 1
            self.send_push(worker, shard)
        elif worker.todo >> shard & 1:
            worker.todo &= ~(1 << shard)
            if not worker.todo:
                self.pushed(worker)

    def answer_pull(self, shard: int, answer: AnswerPull) -> None:
        worker, (number, clock, ident), lost = self.calls.pop(answer.call)
        if worker.state != PULL or (number, ident) != (worker.round, worker.ident) or not worker.todo >> shard & 1:
            return
        self.rules.pull_answered(shard, worker, clock)
        if lost:
            self.tally.lost_answers += 1
            self.send_pull(worker, shard)
            return
        worker.seen = max(worker.seen, answer.min_clock)
        worker.todo &= ~(1 << shard)
        if not worker.todo:
            self.pulled(worker)
