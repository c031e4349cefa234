"""Requests of a simulated worker to shards. A request to a shard that moves to another server is made again there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from paramserver.core.versions.events import Exactly, Want
from paramserver.core.versions.names import Name
from paramserver.core.work.stealing import Advice, Ask, Assignment
from paramserver.simulate.machinery.blame import NOTHING, Chain
from paramserver.simulate.machinery.clock import Signal
from paramserver.simulate.parts.hosts import Program
from paramserver.simulate.servers.calls import Answer, Upload
from paramserver.simulate.servers.shard import Shard


class Request(Protocol):
    """One request to one shard."""

    @property
    def over(self) -> bool:
        """Whether no answer of the shard is expected any more."""

    def to(self, shard: Shard) -> None:
        """Make the request to this shard. Earlier answers do not count from now on."""


class Push:
    """A contribution to one shard. ``heard`` is called with each answer that counts."""

    def __init__(
        self, program: Program, worker: int, name: Name, base: int, clock: int, heard: Callable[[Push], None]
    ) -> None:
        self.answer: Signal[Answer] = Signal()
        self.name, self.over = name, False
        self._facts = program, name, worker, base, clock
        self._heard, self._upload = heard, Upload((), lambda *_: None, True)
        # The part of the backward pass that is over, 0 to 1, and the chain up to this moment.
        self._ready: tuple[float, Chain] = -1.0, NOTHING

    def to(self, shard: Shard) -> None:
        """Bring the computed part of the contribution to the shard."""
        upload = self._upload = shard.push(*self._facts)
        self.over = False

        def answered(answer: Answer) -> None:
            if upload is self._upload:
                self.over = True
                self._heard(self)
                self.answer.set(answer)

        upload.answer.then(answered)
        upload.ready(*self._ready)

    def ready(self, part: float, chain: Chain) -> None:
        """A part of the backward pass is over, from 0 to 1."""
        self._ready = part, chain
        self._upload.ready(part, chain)


class Pull:
    """A question for weights. ``ahead``, ``begins``, ``bare``: as in :meth:`Shard.pull`."""

    def __init__(
        self,
        program: Program,
        worker: int,
        want: Want,
        assignment: Assignment | None,
        chain: Chain,
        ahead: bool,
        begins: bool,
        bare: bool = False,
    ) -> None:
        self.answer: Signal[Answer] = Signal()
        self._program, self._worker, self._want, self._assignment = program, worker, want, assignment
        self._chain, self._ahead, self._begins, self._bare = chain, ahead, begins, bare
        self._off: Callable[[], None] = lambda: None
        self._called_off = False

    @property
    def over(self) -> bool:
        """Whether the question is called off, or answered with all weights."""
        if not self.answer.done:
            return self._called_off
        rest = self.answer.value.rest
        return rest is None or rest.complete

    def to(self, shard: Shard) -> None:
        """Ask the shard for the weights, or for the missing weights."""
        self._off()
        if not self.answer.done:
            signal, self._off = self._ask(shard, self._want, self._ahead, self._begins)
            signal.then(self.answer.set)
            return
        rest = self.answer.value.rest
        assert rest is not None, "a question that is over is not asked again"
        signal, self._off = self._ask(shard, Exactly(self.answer.value.version), False, False)
        signal.then(lambda answer: rest.all(answer.chain))

    def _ask(self, shard: Shard, want: Want, ahead: bool, begins: bool) -> tuple[Signal[Answer], Callable[[], None]]:
        return shard.pull(self._program, self._worker, want, self._assignment, self._chain, ahead, begins, self._bare)

    def call_off(self) -> None:
        """The worker does not need the answer any more."""
        self._called_off = True
        self._off()


class Steal:
    """A question of an idle worker for a slice."""

    def __init__(self, program: Program, ask: Ask) -> None:
        self.answer: Signal[Advice] = Signal()
        self._program, self._ask = program, ask

    @property
    def over(self) -> bool:
        """Whether it is answered."""
        return self.answer.done

    def to(self, shard: Shard) -> None:
        """Ask there."""
        shard.steal(self._program, self._ask).then(self.answer.set)
