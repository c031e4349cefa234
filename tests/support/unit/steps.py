"""Steps as servers and workers report them, for the state machine of blame: healthy ones, with causes put in."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from paramserver.core.blame.facts import Blamed, Held, Made, Worked
from paramserver.core.blame.judge import RIPE_S, Judge
from paramserver.core.blame.spent import Spent

NAMES = {10 + rank: f"worker-{rank}" for rank in range(4)}
USUAL = Spent(data=0.02, compute=0.3, send=0.001, wait=0.02, receive=0.005, other=0.01, gc=0.001, starved=0.002)
LINK_S, MAKING_S = 0.01, 0.02


@dataclass
class Run:
    """A synchronous run. ``late``: by (worker, step), what its time was instead of the usual; ``links``: the same of
    its messages; ``slow``: by (shard, step), what the server's making took more, and what of it the server lost.
    """

    steps: int = 30
    jitter: float = 0.1
    seed: int = 0
    shards: int = 2
    late: dict[tuple[int, int], Spent] = field(default_factory=dict)
    links: dict[tuple[int, int], float] = field(default_factory=dict)
    slow: dict[tuple[int, int], tuple[float, float, float]] = field(default_factory=dict)
    joined: dict[int, int] = field(default_factory=dict)
    judge: Judge = field(default_factory=Judge)

    def play(self) -> list[Blamed]:
        """Everything that is blamed."""
        chance = random.Random(self.seed)
        records: dict[int, list[Worked]] = {worker: [] for worker in NAMES}
        found: list[Blamed] = []
        now = 0.0
        for step in range(self.steps):
            workers = [worker for worker in NAMES if step >= self.joined.get(worker, 0)]
            arrivals = []
            for worker in workers:
                usual = replace(USUAL, compute=USUAL.compute * (1 + self.jitter * chance.random()))
                spent = self.late.get((worker, step), usual)
                link = LINK_S + self.links.get((worker, step), 0.0)
                records[worker].append(
                    Worked(step, replace(spent, wait=spent.wait + link), step == self.joined.get(worker))
                )
                arrivals.append((spent.busy + link, worker))
            (others, before), (last, worker) = sorted(arrivals)[-2:]
            for shard in range(self.shards):
                more, starved, paused = self.slow.get((shard, step), (0.0, 0.0, 0.0))
                at = list(NAMES).index(worker)
                made = Made(
                    step,
                    shard,
                    f"server-{shard}",
                    others,
                    last,
                    last + MAKING_S + more,
                    worker,
                    before,
                    worker,
                    at,
                    at + 1,
                    starved,
                    paused,
                )
                self.judge.made(made, now)
            now += last + MAKING_S
            found += self.judge.look(now, NAMES, lambda who: records[who][-64:])
        return found + self.judge.look(now + RIPE_S, NAMES, lambda who: records[who][-64:])


@dataclass
class Clocks:
    """An asynchronous run in which ``by`` holds the others at clock 12 for ``seconds``.

    ``spent``: where its time went meanwhile; ``after``: the same of the next slice.
    """

    spent: Spent
    seconds: float
    by: int = 11
    first: bool = False
    after: Spent = USUAL
    judge: Judge = field(default_factory=Judge)

    def play(self) -> list[Blamed]:
        """Everything that is blamed."""
        own = {12: self.spent, 13: self.after}
        records: Callable[[int], list[Worked]] = lambda who: [  # noqa: E731
            Worked(clock, own.get(clock, USUAL) if who == self.by else USUAL, self.first and who == self.by)
            for clock in range(5, 14)
        ]
        for worker in NAMES:
            if worker != self.by:
                self.judge.held(Held(worker, self.by, 12, self.seconds), 1.0)
        return self.judge.look(1.0 + RIPE_S, NAMES, records)
