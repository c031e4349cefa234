"""The common part of simulated workers: compute, push to all servers, pull from all servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paramserver.core.versions.events import AtLeast, Exactly, Want
from paramserver.core.versions.names import Name
from paramserver.core.work.stealing import Assignment
from paramserver.simulate.machinery.blame import NOTHING, Chain, Part, longer
from paramserver.simulate.machinery.clock import Process, Signal, VirtualClock, every
from paramserver.simulate.parts.hosts import Program
from paramserver.simulate.parts.rest import Rest
from paramserver.simulate.parts.server import Answer, Push, Server
from paramserver.simulate.parts.stragglers import Factors

All = Signal[tuple[list[Answer], Answer]]
# Weights are read one after the other during the forward pass, and gradients come so during the backward pass.
_STEPS = 16


class Member:
    """One worker: its process, its pace, and the chain of its waits. ``rank`` counts from 0.

    ``hand_s``: to put the gradients of a slice in their place. ``threads``: processors of the host that computing
    keeps busy; 0 if a GPU computes. ``backward``: the part of a slice that is the backward pass.
    ``begins``: the forward pass begins before all weights are there.
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
        begins: bool = False,
    ) -> None:
        self.clock, self.rank, self.ident = clock, rank, rank + 1
        self.servers, self.call_s, self.program = servers, call_s, program
        self.chain: Chain = NOTHING
        self.versions = [0] * len(servers)
        # When each slice was begun and done.
        self.spans: list[tuple[float, float]] = []
        self.assignment: Assignment | None = None
        # How long it has waited for weights in the midst of the last slice.
        self.stalled_s = 0.0
        self._rests: list[Rest] = []
        self._begins = begins
        self._compute_s, self._factors, self._hand_s = compute_s, factors, hand_s
        self._threads, self._backward = threads, backward

    def _spend(self, seconds: float, part: Part, threads: float) -> Process[None]:
        """Spend time on work that keeps so many threads busy."""
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
        seconds, self.stalled_s = self._compute_s * next(self._factors), 0.0
        backward_s = self._backward * seconds if early or self._rests else 0.0
        began_at = yield from self._forward(seconds - backward_s)
        for step in range(1, _STEPS + 1) if backward_s else ():
            yield from self._spend(backward_s / _STEPS, Part.COMPUTE, self._threads)
            for push in early if step < _STEPS else ():
                push.ready(step / _STEPS, self.chain)
        self.spans.append((began_at, self.clock.now))
        if self._hand_s:
            yield from self._spend(self._hand_s, Part.COPIES, 1.0)

    def _forward(self, seconds: float) -> Process[float]:
        """The forward pass, as weights come; since when it has computed without a pause."""
        began_at, rests, self._rests = self.clock.now, self._rests, []
        steps = _STEPS if rests else 1
        for step in range(1, steps + 1):
            for rest in rests:
                if (waits := rest.until(step / steps)) is not None:
                    stopped_at = self.clock.now
                    if stopped_at > began_at:
                        self.spans.append((began_at, stopped_at))
                    self.chain = yield waits
                    began_at = self.clock.now
                    self.stalled_s += began_at - stopped_at
            yield from self._spend(seconds / steps, Part.COMPUTE, self._threads)
        return began_at

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
        """Ask every server for weights; the signal of all answers, and a function that calls the questions off.

        ``ahead``: they may be sent while they are made.
        """
        asked = [
            server.pull(self.program, self.ident, want, self.assignment, self.chain, ahead, self._begins)
            for server in self.servers
        ]

        def call_off() -> None:
            for _, one in asked:
                one()

        return every([answer for answer, _ in asked]), call_off

    def pull(self, want: Want) -> Process[list[Answer]]:
        """The answers of all servers, by server."""
        answers: list[Answer]
        answers, last = yield self.asking(want)[0]
        self.chain = last.chain
        self._takes(answers)
        return answers

    def _takes(self, answers: Sequence[Answer]) -> None:
        """Go on with these."""
        self.versions = [answer.version for answer in answers]
        self._rests = [answer.rest for answer in answers if answer.rest is not None]

    def agreed(self, answers: list[Answer]) -> Process[list[Answer]]:
        """One version, the same of all servers, as `worker.links` sees to it: the oldest, or a later one."""
        answers = list(answers)
        while len({answer.version for answer in answers}) > 1:
            oldest = min(answer.version for answer in answers)
            ahead = [server for server, answer in enumerate(answers) if answer.version > oldest]
            asked = [
                self.servers[s].pull(self.program, self.ident, Exactly(oldest), self.assignment, self.chain)[0]
                for s in ahead
            ]
            again, last = yield every(asked)
            self.chain = last.chain
            if any(answer.gone for answer in again):
                answers = yield from self.pull(AtLeast(oldest + 1))
                continue
            for server, answer in zip(ahead, again, strict=True):
                answers[server] = answer
        self._takes(answers)
        return answers
