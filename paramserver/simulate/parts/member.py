"""The common part of simulated workers: compute, push to all shards, pull from all shards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from paramserver.core.versions.events import AtLeast, Exactly, Want
from paramserver.core.versions.names import Name, SyncName
from paramserver.core.work.stealing import Advice, Ask, Assignment
from paramserver.core.work.unpublished import Unpublished
from paramserver.simulate.machinery.blame import NOTHING, Chain, Part, longer
from paramserver.simulate.machinery.clock import Process, Signal, VirtualClock, every
from paramserver.simulate.parts.hosts import Program
from paramserver.simulate.parts.requests import Pull, Push, Request, Steal
from paramserver.simulate.parts.rest import Rest
from paramserver.simulate.parts.stragglers import Factors
from paramserver.simulate.servers.calls import Answer
from paramserver.simulate.servers.shard import Shard

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
        shards: Sequence[Shard],
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
        self.call_s, self.program = call_s, program
        self.chain: Chain = NOTHING
        self.versions = [0] * len(shards)
        # Contributions that this worker has brought again to shards that moved.
        self.again = 0
        # By index: the server of each shard, and the open requests to it.
        self._shards, self._requests = list(shards), [list[Request]() for _ in shards]
        # Contributions that may be in no version yet: the pushes of each, by shard.
        self._unpublished: Unpublished[list[Push]] = Unpublished()
        self._nonces = itertools.count()
        # When each slice was begun and done.
        self.spans: list[tuple[float, float]] = []
        self.assignment: Assignment | None = None
        # Seconds that this worker has waited for weights in the middle of the last slice.
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

    def __len__(self) -> int:
        """The number of shards."""
        return len(self._shards)

    def moved(self, index: int, shard: Shard) -> None:
        """A shard is at another server now: requests are made again, and so are pushes that are in no version."""
        self._shards[index] = shard
        again = [request for request in self._requests[index] if not request.over]
        again += [pushes[index] for pushes in self._unpublished.moved(index)]
        self.again += sum(isinstance(request, Push) for request in again)
        self._requests[index].clear()
        for request in again:
            self._request(index, request)

    def _request(self, index: int, request: Request) -> None:
        open_ = self._requests[index]
        open_[:] = [one for one in open_ if not one.over]
        open_.append(request)
        request.to(self._shards[index])

    def begin(self, name: Name, clock: int) -> list[Push]:
        """Begin a contribution to every shard. Each worker begins with another shard."""
        count, nonce, pushes = len(self), next(self._nonces), list[Push]()

        def opened(index: int) -> Push:
            def heard(push: Push) -> None:
                if isinstance(name, SyncName):
                    self._unpublished.counted(nonce, name.step, index, pushes)

            return Push(self.program, self.ident, name, self.versions[index], clock, heard)

        pushes += [opened(index) for index in range(count)]
        turned = [(self.rank + turn) % count for turn in range(count)]
        for index in turned:
            self._request(index, pushes[index])
        return [pushes[index] for index in turned]

    def steal(self, index: int, ask: Ask) -> Signal[Advice]:
        """Ask a shard for a slice."""
        question = Steal(self.program, ask)
        self._request(index, question)
        return question.answer

    def complete(self, pushes: Sequence[Push], chain: Chain | None = None) -> All:
        """All gradients are computed: the rest of a contribution leaves. ``chain``: if it is not this worker's."""
        for push in pushes:
            push.ready(1.0, self.chain if chain is None else chain)
        return every([push.answer for push in pushes])

    def push(self, name: Name, clock: int, chain: Chain | None = None) -> All:
        """Push a contribution to every shard."""
        return self.complete(self.begin(name, clock), chain)

    def wait_all(self, pushes: Sequence[All]) -> Process[None]:
        """Wait for several pushes."""
        for push in pushes:
            waits = not push.done
            _, last = yield push
            if waits:
                self.chain = last.chain

    def asking(self, want: Want, ahead: bool = False, chain: Chain | None = None) -> tuple[All, Callable[[], None]]:
        """Ask every shard for weights; the signal of all answers, and a function that calls the questions off.

        ``ahead``: they may be sent while they are made. ``chain``: of a question for all workers of the host.
        """
        return _all([self._ask(index, want, ahead, self._begins, chain=chain) for index in range(len(self))])

    def headers(self, want: Want) -> tuple[All, Callable[[], None]]:
        """Ask every shard for its version; as :meth:`asking`."""
        return _all([self._ask(index, want, bare=True) for index in range(len(self))])

    def _ask(
        self,
        index: int,
        want: Want,
        ahead: bool = False,
        begins: bool = False,
        bare: bool = False,
        chain: Chain | None = None,
    ) -> Pull:
        # Only a question for this worker alone names the slice that the worker computes.
        said = self.assignment if chain is None else None
        pull = Pull(self.program, self.ident, want, said, chain or self.chain, ahead, begins, bare)
        self._request(index, pull)
        return pull

    def pull(self, want: Want) -> Process[list[Answer]]:
        """The answers of all shards, by index."""
        answers: list[Answer]
        answers, last = yield self.asking(want)[0]
        self.chain = last.chain
        self._takes(answers)
        return answers

    def _takes(self, answers: Sequence[Answer]) -> None:
        """Go on with these."""
        self.versions = [answer.version for answer in answers]
        self._unpublished.published(min(self.versions))
        self._rests = [answer.rest for answer in answers if answer.rest is not None]

    def agreed(self, answers: list[Answer]) -> Process[list[Answer]]:
        """One version, the same of all shards, as in `worker.links`: the oldest version, or a later version."""
        answers, self.chain = yield from self.agree(answers, self.chain)
        self._takes(answers)
        return answers

    def agree(self, answers: list[Answer], chain: Chain, bare: bool = False) -> Process[tuple[list[Answer], Chain]]:
        """Like :meth:`agreed`, but does not go on with the answers. Returns also their chain. ``bare``: no weights."""
        answers = list(answers)
        while len({answer.version for answer in answers}) > 1:
            oldest = min(answer.version for answer in answers)
            ahead = [index for index, answer in enumerate(answers) if answer.version > oldest]
            asked = [self._ask(index, Exactly(oldest), bare=bare).answer for index in ahead]
            again, last = yield every(asked)
            if any(answer.gone for answer in again):
                want, begins = AtLeast(oldest + 1), self._begins
                asked = [self._ask(index, want, begins=begins, bare=bare).answer for index in range(len(self))]
                answers, last = yield every(asked)
            else:
                for index, answer in zip(ahead, again, strict=True):
                    answers[index] = answer
            chain = last.chain
        return answers, chain


def _all(asked: Sequence[Pull]) -> tuple[All, Callable[[], None]]:
    """The signal of all answers, and a function that calls the questions off."""

    def call_off() -> None:
        for one in asked:
            one.call_off()

    return every([one.answer for one in asked]), call_off
