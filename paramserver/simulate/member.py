"""What all simulated workers do alike: compute, push to all servers, pull from all servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paramserver.core.claims import Standing
from paramserver.core.events import AtLeast, Exactly, Want
from paramserver.core.names import Name
from paramserver.simulate.blame import NOTHING, Chain, Part, longer
from paramserver.simulate.clock import Process, Signal, VirtualClock, every
from paramserver.simulate.hosts import Program
from paramserver.simulate.server import Answer, Push, Server
from paramserver.simulate.stragglers import Factors

All = Signal[tuple[list[Answer], Answer]]
# Gradients come one after the other during the backward pass, in so many steps.
_BACKWARD_STEPS = 16


class Member:
    """One worker: its process, its pace, and the chain of what it has waited for. ``rank`` counts from 0.

    ``hand_s``: to put the gradients of a slice in their place. ``threads``: what computing keeps busy of the host's
    processors; 0 if something else computes. ``backward``: the part of a slice that is the backward pass.
    """

    def __init__(
        self,
        clock: VirtualClock,
        rank: int,
        servers: Sequence[Server],
        program: Program,
        compute_s: float,
        factors: Factors,
        call_s: float,
        hand_s: float = 0.0,
        threads: float = 1.0,
        backward: float = 0.0,
    ) -> None:
        self.clock, self.rank, self.ident = clock, rank, rank + 1
        self.servers, self.call_s, self.program = servers, call_s, program
        self.chain: Chain = NOTHING
        self.versions = [0] * len(servers)
        # When each slice was begun and done.
        self.spans: list[tuple[float, float]] = []
        self.standing: Standing | None = None
        self._compute_s, self._factors, self._hand_s = compute_s, factors, hand_s
        self._threads, self._backward = threads, backward

    def _spend(self, seconds: float, part: Part, threads: float) -> Process[None]:
        """Spend time on something that so many threads compute."""
        began_at = self.clock.now
        signal: Signal[None] = Signal()
        if threads:
            self.program.host.cores.run(seconds, lambda: signal.set(None), threads)
        else:
            self.clock.after(seconds, lambda: signal.set(None))
        yield signal
        self.chain = longer(self.chain, part, self.clock.now - began_at)

    def compute(self, early: Sequence[Push] = ()) -> Process[None]:
        """Compute one slice. ``early``: contributions that leave meanwhile, up to their last gradients."""
        seconds, began_at = self._compute_s * next(self._factors), self.clock.now
        if not early:
            yield from self._spend(seconds, Part.COMPUTE, self._threads)
        else:
            yield from self._spend((1 - self._backward) * seconds, Part.COMPUTE, self._threads)
            for step in range(1, _BACKWARD_STEPS + 1):
                yield from self._spend(self._backward * seconds / _BACKWARD_STEPS, Part.COMPUTE, self._threads)
                for push in early if step < _BACKWARD_STEPS else ():
                    push.ready(step / _BACKWARD_STEPS, self.chain)
        self.spans.append((began_at, self.clock.now))
        if self._hand_s:
            yield from self._spend(self._hand_s, Part.COPIES, 1.0)

    def begin(self, name: Name, clock: int) -> list[Push]:
        """Begin a contribution to every server, each worker with another one first."""
        count = len(self.servers)
        turned = [self.servers[(self.rank + turn) % count] for turn in range(count)]
        return [server.push(self.program, name, self.ident, self.versions[server.index], clock) for server in turned]

    def complete(self, pushes: Sequence[Push]) -> All:
        """Everything is computed: the rest of a contribution leaves."""
        for push in pushes:
            push.ready(1.0, self.chain)
        return every([push.answer for push in pushes])

    def push(self, name: Name, clock: int) -> All:
        """Push a contribution to every server."""
        return self.complete(self.begin(name, clock))

    def wait_all(self, pushes: Sequence[All]) -> Process[None]:
        """Wait for several pushes."""
        for push in pushes:
            waits = not push.done
            _, last = yield push
            if waits:
                self.chain = last.chain

    def asking(self, want: Want, ahead: bool = False) -> tuple[All, Callable[[], None]]:
        """Ask every server for weights; the signal of all answers, and what calls the questions off.

        ``ahead``: they may be sent while they are made.
        """
        asked = [
            server.pull(self.program, self.ident, want, self.standing, self.chain, ahead) for server in self.servers
        ]

        def call_off() -> None:
            for _, one in asked:
                one()

        return every([answer for answer, _ in asked]), call_off

    def pull(self, want: Want) -> Process[list[Answer]]:
        """What every server answers, by server."""
        answers: list[Answer]
        answers, last = yield self.asking(want)[0]
        self.chain = last.chain
        self.versions = [answer.version for answer in answers]
        return answers

    def agreed(self, answers: list[Answer]) -> Process[list[Answer]]:
        """One version, the same of all servers, as `worker.links` sees to it: the oldest, or a later one."""
        answers = list(answers)
        while len({answer.version for answer in answers}) > 1:
            oldest = min(answer.version for answer in answers)
            ahead = [server for server, answer in enumerate(answers) if answer.version > oldest]
            asked = [
                self.servers[s].pull(self.program, self.ident, Exactly(oldest), self.standing, self.chain)[0]
                for s in ahead
            ]
            again, last = yield every(asked)
            self.chain = last.chain
            if any(answer.gone for answer in again):
                answers = yield from self.pull(AtLeast(oldest + 1))
                continue
            for server, answer in zip(ahead, again, strict=True):
                answers[server] = answer
        self.versions = [answer.version for answer in answers]
        return answers
