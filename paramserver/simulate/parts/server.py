"""A simulated server: the real state machine of a shard, and the time that its calls, sums and updates take."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paramserver.core.layout.thresholds import REST_BYTES
from paramserver.core.versions import drafts
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.core.versions.events import (
    Activated,
    AnswerPull,
    AnswerPush,
    Arrived,
    Build,
    Built,
    CallGone,
    DropBuffer,
    DropVersion,
    Effect,
    Event,
    PullAsked,
    Refusal,
    Refuse,
    Want,
)
from paramserver.core.versions.names import Name
from paramserver.core.versions.shard import ShardState
from paramserver.core.work.stealing import Advice, Ask, Assignment, Stealing
from paramserver.simulate.costs import Costs
from paramserver.simulate.machinery.blame import NOTHING, Chain, Part, longer
from paramserver.simulate.machinery.clock import Signal, VirtualClock
from paramserver.simulate.machinery.cores import Thread
from paramserver.simulate.parts.hosts import Network, Program, Transfer
from paramserver.simulate.parts.pieces import Piece
from paramserver.simulate.parts.rest import Rest

TIMELINE = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a worker. ``server``: its index; ``chain``: up to the moment when the worker has the answer."""

    server: int
    chain: Chain
    version: int = 0
    min_clock: int = 0
    taken: tuple[int, ...] = ()
    gone: bool = False
    rest: Rest | None = None


class Push:
    """A contribution on its way to one server; ``answer`` comes as the state machine says."""

    def __init__(self, pieces: Sequence[Piece], send: Callable[[int, Chain], None], all_at_once: bool) -> None:
        self.answer: Signal[Answer] = Signal()
        # Those of which the backward pass makes the gradients last come last.
        self._left = sorted(range(len(pieces)), key=lambda piece: -pieces[piece].ready)
        self._pieces, self._send, self._all_at_once = pieces, send, all_at_once

    def ready(self, part: float, chain: Chain) -> None:
        """This part of the backward pass is over, 0 to 1: the pieces that are ready leave."""
        if self._all_at_once:
            if part >= 1.0:
                self._send(0, chain)
            return
        while self._left and self._pieces[self._left[-1]].ready <= part:
            self._send(self._left.pop(), chain)


@dataclass(slots=True, eq=False)
class _Delivery:
    """Weights on their way to a worker that asked: pieces of one draft (its number), or of a version that was none (0).

    ``answer`` is set when all are known.
    """

    draft: int
    sent: set[int] = field(default_factory=set)
    coming: set[int] = field(default_factory=set)
    answer: Callable[[Chain], None] | None = None
    # If the answer is sent before all pieces: it hears of the pieces that come later.
    rest: Rest | None = None


@dataclass(slots=True, eq=False)
class _Call:
    answer: Signal[Answer]
    caller: Program
    assignment: Assignment | None = None
    ahead: bool = False
    begins: bool = False
    asked: bool = False
    # Of a pull over the network.
    transfer: Transfer | None = None
    delivery: _Delivery | None = None


@dataclass(slots=True, eq=False)
class _Brought:
    """A contribution: its number while it arrives, its worker, and on which version it was computed."""

    part: int
    worker: int
    base: int


# Called with the server, the version that it has published, the chain of time, and the worker that came last.
OnBuilt = Callable[[int, int, Chain, int], None]


class Server:
    """One server. ``pieces``: its part of the model; ``apply_ns``: of its optimizer, ``threads``: for arithmetic."""

    def __init__(
        self,
        clock: VirtualClock,
        index: int,
        consistency: Consistency,
        workers: Sequence[int],
        program: Program,
        network: Network,
        costs: Costs,
        apply_ns: float,
        pieces: Sequence[Piece],
        on_built: OnBuilt,
        threads: int = 1,
    ) -> None:
        self.index, self.program = index, program
        self.state = ShardState(consistency, workers)
        self.state.handle(Activated(TIMELINE))
        # Updates of others that each asynchronous contribution did not know of, as it is counted.
        self.behind: list[int] = []
        self._clock, self._costs, self._network = clock, costs, network
        self._pieces = pieces
        self._params = sum(piece.nbytes for piece in pieces) / 4
        self._apply_ns = apply_ns
        self._faster = costs.faster(threads)
        self._thread = Thread(program.host.cores, self._faster)
        self._drafts = drafts.DraftState(range(len(pieces)), sum(piece.nbytes for piece in pieces))
        self._drafts.handle(drafts.Opened(0))
        # The present draft (0: none), the number of its contributions, and which pieces are made.
        self._draft, self._draft_parts, self._made = 0, 0, list[int]()
        # By version, the draft that it was.
        self._was: dict[int, int] = {}
        self._stealing = Stealing()
        self._stealing.begin(0, 0.0)
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self._brought: dict[int, _Brought] = {}
        self._on_built = on_built

    # ---- calls of workers

    def push(self, caller: Program, name: Name, worker: int, base: int, clock: int) -> Push:
        """A worker begins to send a contribution, computed on version ``base``."""
        part = next(self._numbers)
        near = self.program.near(caller)
        at_once = near or not self._pieces
        transfer = None if at_once else self._network.open(caller, self.program, self._costs.push_bytes_s)
        left = len(self._pieces)

        def send(piece: int, chain: Chain) -> None:
            if transfer is None:
                whole(chain)
            else:
                transfer.send(self._pieces[piece], chain, lambda chain: came(piece, chain))

        def came(piece: int, chain: Chain) -> None:
            nonlocal left
            if left == len(self._pieces):
                self._drafting(drafts.Begun(part, name, worker, frozenset(range(left))), chain)
            self._drafting(drafts.Came(part, piece), chain)
            left -= 1
            if not left:
                whole(chain)

        def whole(chain: Chain) -> None:
            self._serve(caller, chain, checked if near else check)

        def check(chain: Chain) -> None:
            self._compute(self._costs.check_ns * self._params, chain, checked)

        def checked(chain: Chain) -> None:
            number = next(self._numbers)
            self._calls[number] = _Call(push.answer, caller)
            self._brought[number] = _Brought(part, worker, base)
            self._happen(Arrived(number, name, number, worker, TIMELINE, clock), chain)

        push = Push(self._pieces, send, at_once)
        return push

    def pull(
        self,
        caller: Program,
        worker: int,
        want: Want,
        assignment: Assignment | None,
        chain: Chain,
        ahead: bool = False,
        begins: bool = False,
    ) -> tuple[Signal[Answer], Callable[[], None]]:
        """A worker asks for weights; the signal of its answer, and a function that calls the question off.

        ``ahead``: they may be sent while they are made. ``begins``: the answer may come before most of them.
        """
        number = next(self._numbers)
        call = _Call(Signal(), caller, assignment, ahead, begins)
        if not self.program.near(caller):
            call.transfer = self._network.open(self.program, caller, self._costs.pull_bytes_s)

        def asked(chain: Chain) -> None:
            if number in self._calls:
                call.asked = True
                self._happen(PullAsked(number, worker, want, TIMELINE), chain)
                if self._draft and number in self._calls:
                    for piece in self._made:
                        self._send_ahead(call, piece, chain)

        def call_off() -> None:
            if self._calls.pop(number, None) is not None:
                self._happen(CallGone(number), chain)

        self._calls[number] = call
        self._serve(caller, chain, asked)
        return call.answer, call_off

    def steal(self, caller: Program, ask: Ask) -> Signal[Advice]:
        """An idle worker asks for a slice."""
        answer: Signal[Advice] = Signal()

        def asked(_: Chain) -> None:
            advice = self._stealing.advise(ask, self.state.version, self.state.missing(), self._clock.now)
            self._back(caller, NOTHING, lambda _: answer.set(advice))

        self._serve(caller, NOTHING, asked)
        return answer

    # ---- calls

    def _serve(self, caller: Program, chain: Chain, then: Callable[[Chain], None]) -> None:
        """A call is on its way; the server takes it in when it has time."""
        begun_at = self._clock.now
        call_s, serve_s = self._costs.call(self.program.near(caller))

        def here() -> None:
            self.program.loop.run(serve_s, lambda: then(longer(chain, Part.CALLS, self._clock.now - begun_at)))

        caller.loop.run((call_s - serve_s) / 2, here)

    def _back(self, caller: Program, chain: Chain, then: Callable[[Chain], None]) -> None:
        """An answer is on its way."""
        begun_at = self._clock.now
        call_s, serve_s = self._costs.call(self.program.near(caller))
        caller.loop.run((call_s - serve_s) / 2, lambda: then(longer(chain, Part.CALLS, self._clock.now - begun_at)))

    # ---- the state machine and its effects

    def _happen(self, event: Event, chain: Chain) -> None:
        effects = self.state.handle(event)
        answers = [effect for effect in effects if isinstance(effect, AnswerPull)]
        if len(answers) > 1:  # sent side by side: each server begins with another worker, as packets mix
            turn = self.index % len(answers)
            answers = answers[turn:] + answers[:turn]
            effects = [effect for effect in effects if not isinstance(effect, AnswerPull)] + list(answers)
        for effect in effects:
            self._perform(effect, chain)

    def _perform(self, effect: Effect, chain: Chain) -> None:
        match effect:
            case AnswerPush(number, _, version):
                call = self._calls.pop(number)
                self._back(call.caller, chain, lambda chain: call.answer.set(Answer(self.index, chain, version)))
            case AnswerPull(number, version, min_clock):
                self._give(self._calls.pop(number), version, min_clock, chain)
            case Refuse(number, refusal, reason):
                assert refusal is Refusal.GONE, f"a simulated worker did what none does: {reason}"
                self._calls.pop(number).answer.set(Answer(self.index, chain, gone=True))
            case Build():
                self._build(effect, chain)
            case DropBuffer(buffer):
                self._brought.pop(buffer, None)
            case DropVersion(version):
                self._was.pop(version, None)

    # ---- weights go out

    def _give(self, call: _Call, version: int, min_clock: int, chain: Chain) -> None:
        """Answer a pull with a version; pieces that were sent before are not sent again."""
        if call.assignment is not None:
            self._stealing.given(call.assignment, version)
        taken = self._stealing.taken(version)

        def answer(chain: Chain, rest: Rest | None = None) -> None:
            self._back(
                call.caller,
                chain,
                lambda chain: call.answer.set(Answer(self.index, chain, version, min_clock, taken, rest=rest)),
            )

        if call.transfer is None:
            answer(chain)
            return
        delivery, draft = call.delivery, self._was.get(version, 0)
        if delivery is None or delivery.draft != draft:
            delivery = call.delivery = _Delivery(draft)
        delivery.answer = answer
        for piece in range(len(self._pieces)):
            if piece not in delivery.sent:
                self._send(call, delivery, piece, chain)
        if not delivery.coming:
            answer(chain)
        elif call.begins and sum(self._pieces[piece].nbytes for piece in delivery.coming) >= REST_BYTES:
            delivery.rest = Rest({piece: 1.0 - self._pieces[piece].ready for piece in delivery.coming})
            answer(chain, delivery.rest)

    def _send_ahead(self, call: _Call, piece: int, chain: Chain) -> None:
        if call.transfer is None or not (call.ahead and call.asked):
            return
        if call.delivery is None or call.delivery.draft != self._draft:
            call.delivery = _Delivery(self._draft)
        self._send(call, call.delivery, piece, chain)

    def _send(self, call: _Call, delivery: _Delivery, piece: int, chain: Chain) -> None:
        assert call.transfer is not None

        def came(chain: Chain) -> None:
            delivery.coming.discard(piece)
            if delivery.rest is not None:
                delivery.rest.came(piece, chain)
            elif not delivery.coming and delivery.answer is not None:
                delivery.answer(chain)

        delivery.sent.add(piece)
        delivery.coming.add(piece)
        call.transfer.send(self._pieces[piece], chain, came)

    # ---- arithmetic

    def _compute(self, ns: float, chain: Chain, then: Callable[[Chain], None]) -> None:
        """Let the threads for arithmetic do work that takes one thread so many nanoseconds."""
        began_at = self._clock.now
        self._thread.run(
            ns * 1e-9 / self._faster, lambda: then(longer(chain, Part.ARITHMETIC, self._clock.now - began_at))
        )

    def _ns(self, contributions: int) -> float:
        """For each parameter, to add up and to apply."""
        return contributions * self._costs.sum_ns + self._apply_ns

    def _drafting(self, event: drafts.Event, chain: Chain) -> bool:
        """Perform the effects of an event for drafts; whether the draft becomes the next version."""
        adopted = False
        for effect in self._drafts.handle(event):
            match effect:
                case drafts.Begin(draft, parts):
                    self._draft, self._draft_parts, self._made = draft, len(parts), []
                case drafts.Make(draft, piece):
                    self._make(draft, piece, chain)
                case drafts.Adopt() | drafts.Forget():
                    self._draft, adopted = 0, isinstance(effect, drafts.Adopt)
        return adopted

    def _make(self, draft: int, piece: int, chain: Chain) -> None:
        def made(chain: Chain) -> None:
            if self._draft == draft:
                self._made.append(piece)
                for call in list(self._calls.values()):
                    self._send_ahead(call, piece, chain)

        self._compute(self._ns(self._draft_parts) * self._pieces[piece].nbytes / 4, chain, made)

    def _build(self, effect: Build, chain: Chain) -> None:
        draft = self._draft
        adopted = self._drafting(drafts.Decided([self._brought[buffer].part for buffer in effect.buffers]), chain)
        if adopted:
            self._was[effect.version] = draft
        ns = 0.0 if adopted else self._ns(len(effect.buffers)) * self._params
        self._compute(ns, chain, lambda chain: self._built(effect, chain))

    def _built(self, effect: Build, chain: Chain) -> None:
        self._drafting(drafts.Opened(effect.version), chain)
        self._stealing.begin(effect.version, self._clock.now)
        brought = [self._brought.pop(buffer) for buffer in effect.buffers]
        last = max(effect.buffers)  # they are numbered as they come
        worker = brought[effect.buffers.index(last)].worker
        if self.state.consistency.mode is Mode.ASYNC:
            self.behind.append(effect.version - 1 - brought[0].base)
        self._on_built(self.index, effect.version, chain, worker)
        self._happen(Built(effect.version), chain)
