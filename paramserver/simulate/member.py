"""What all simulated workers do alike: compute, push to all servers, pull from all servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paramserver.core.claims import Standing
from paramserver.core.events import AtLeast, Exactly, Want
from paramserver.core.names import Name
from paramserver.simulate.blame import NOTHING, Chain, Part, longer
from paramserver.simulate.clock import Process, Signal, VirtualClock, every
from paramserver.simulate.server import Answer, Host, Server
from paramserver.simulate.stragglers import Factors

All = Signal[tuple[list[Answer], Answer]]


class Member:
    """One worker: its host, its pace, and the chain of what it has waited for. ``rank`` counts from 0."""

    def __init__(
        self,
        clock: VirtualClock,
        rank: int,
        servers: Sequence[Server],
        host: Host,
        compute_s: float,
        factors: Factors,
        call_s: float,
    ) -> None:
        self.clock, self.rank, self.ident = clock, rank, rank + 1
        self.servers, self.call_s = servers, call_s
        self.chain: Chain = NOTHING
        self.versions = [0] * len(servers)
        # When each slice was begun and done.
        self.spans: list[tuple[float, float]] = []
        self.standing: Standing | None = None
        self._host, self._compute_s, self._factors = host, compute_s, factors

    def sleep(self, seconds: float, part: Part) -> Process[None]:
        """Spend time on something."""
        signal: Signal[None] = Signal()
        self.clock.after(seconds, lambda: signal.set(None))
        yield signal
        self.chain = longer(self.chain, part, seconds)

    def compute(self) -> Process[None]:
        """Compute one slice."""
        seconds = self._compute_s * next(self._factors)
        self.spans.append((self.clock.now, self.clock.now + seconds))
        yield from self.sleep(seconds, Part.COMPUTE)

    def push(self, name: Name, clock: int) -> All:
        """Begin to push a contribution to every server, each worker to another one first."""
        count = len(self.servers)
        answers = []
        for turn in range(count):
            server = self.servers[(self.rank + turn) % count]
            base = self.versions[server.index]
            answers.append(server.push(self._host, name, self.ident, base, clock, self.chain))
        return every(answers)

    def wait_all(self, pushes: Sequence[All]) -> Process[None]:
        """Wait for several pushes."""
        for push in pushes:
            waits = not push.done
            _, last = yield push
            if waits:
                self.chain = last.chain

    def asking(self, want: Want) -> tuple[All, Callable[[], None]]:
        """Ask every server for weights; the signal of all answers, and what calls the questions off."""
        asked = [server.pull(self._host, self.ident, want, self.standing, self.chain) for server in self.servers]

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
                self.servers[s].pull(self._host, self.ident, Exactly(oldest), self.standing, self.chain)[0]
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
