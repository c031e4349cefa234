"""A simulated shard at a server: the real state machine, and the time that its calls, sums and updates take."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from paramserver.core.shards.shard import ShardState
from paramserver.core.versions import drafts
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
    Forwarded,
    Promoted,
    PullAsked,
    Refusal,
    Refuse,
    Want,
)
from paramserver.core.versions.names import Name
from paramserver.core.work.stealing import Advice, Ask, Assignment, Stealing
from paramserver.simulate.machinery.blame import NOTHING, Chain, Part, longer
from paramserver.simulate.machinery.clock import Signal
from paramserver.simulate.parts.hosts import Program
from paramserver.simulate.parts.pieces import Piece
from paramserver.simulate.parts.rest import Rest
from paramserver.simulate.servers.backups import Backups, Facts
from paramserver.simulate.servers.calls import Answer, Brought, Call, Upload
from paramserver.simulate.servers.outgoing import Outgoing
from paramserver.simulate.servers.rules import Published, Rules

TIMELINE = 1


class Shard:
    """One shard at one server, as its primary or as a backup. ``pieces``: its part of the model.

    ``backup``: it has all of the shard from the beginning (True), or catches up first (None).
    """

    def __init__(
        self, rules: Rules, index: int, program: Program, pieces: Sequence[Piece], backup: bool | None = False
    ) -> None:
        self.index, self.program = index, program
        # False when its process is dead, or another server holds the shard in its place.
        self.alive, self.making = True, False
        self.state = ShardState(rules.consistency, rules.workers, backup=backup is not False)
        if backup is not None:
            self.state.handle(Activated(TIMELINE))
        self._rules, self._clock, self._costs, self._network = rules, rules.clock, rules.costs, rules.network
        self._pieces = pieces
        self._params = sum(piece.nbytes for piece in pieces) / 4
        self._drafts = drafts.DraftState(range(len(pieces)), sum(piece.nbytes for piece in pieces))
        # The present draft (0: none), the number of its contributions, and which pieces are made.
        self._draft, self._draft_parts, self._made = 0, 0, list[int]()
        # By version, the draft that it was.
        self._was: dict[int, int] = {}
        self._stealing = Stealing()
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self._brought: dict[int, Brought] = {}
        self.backups = Backups(rules.clock, self, rules.network, rules.costs, pieces, rules.further)
        self._outgoing = Outgoing(pieces)
        # Calls of workers that have come before the shard is a primary; contents that wait for the version before.
        self._early: list[Callable[[], None]] = []
        self._later: list[Callable[[], None]] = []
        if backup is False:
            self._open(0)

    def end(self) -> None:
        """End this copy of the shard."""
        self.alive = False

    def _open(self, version: int) -> None:
        """``version`` is published, and the contributions to the version after it come next."""
        self._drafting(drafts.Opened(version), NOTHING)
        self._stealing.begin(version, self._clock.now)

    # ---- a backup

    def facts(self) -> Facts:
        """The facts that a backup gets with the last pieces, with no version in the making."""
        state, version = self.state, self.state.version
        forwarded = Forwarded(version, 0, (), state.consistency, dict(state.pulls.clocks), state.pulls.floor)
        return Facts(forwarded, version, state.marks.of(version), state.counted(), state.counters.applied)

    def whole(self, facts: Facts) -> None:
        """All pieces are here."""
        if not self.alive:
            return
        told = facts.forwarded
        self.state.restore(facts.counted, facts.applied)
        self.state.handle(Activated(TIMELINE, facts.version))
        self.state.begin_beside(told.consistency, told.clocks, told.floor, facts.version, facts.mark)

    def hold(self, content: Forwarded, pieces: Iterable[int], chain: Chain, then: Callable[[Chain], None]) -> None:
        """The primary has sent the content of the next version of ``pieces``."""
        if not (self.alive and self.state.backup):
            return
        if not self.state.active:
            nbytes = sum(self._pieces[piece].nbytes for piece in pieces)
            self._compute(self._rules.apply_ns * nbytes / 4, chain, then)
        elif self.state.version < content.version <= self.state.next_forwarded:
            self._later.append(lambda: self.hold(content, pieces, chain, then))
        else:
            number = next(self._numbers)
            self._brought[number] = Brought(0, content.parts[0].worker, content.version)
            self._happen(replace(content, buffer=number), chain)
            then(chain)

    def promote(self) -> None:
        """Become the primary when the versions that the former primary has decided are made."""
        self._happen(Promoted(self._rules.consistency), NOTHING)
        if not self.state.backup:
            self._lead(NOTHING)

    def _lead(self, chain: Chain) -> None:
        version = self.state.version
        self._rules.on_published(Published(self.index, version, chain))
        self._open(version)
        early, self._early = self._early, []
        for call in early:
            call()

    # ---- calls of workers

    def push(self, caller: Program, name: Name, worker: int, base: int, clock: int) -> Upload:
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
            self._calls[number] = Call(upload.answer, caller)
            self._brought[number] = Brought(part, worker, base)
            self._happen(Arrived(number, name, number, worker, TIMELINE, clock), chain)

        upload = Upload(self._pieces, send, at_once)
        return upload

    def pull(
        self,
        caller: Program,
        worker: int,
        want: Want,
        assignment: Assignment | None,
        chain: Chain,
        ahead: bool = False,
        begins: bool = False,
        bare: bool = False,
    ) -> tuple[Signal[Answer], Callable[[], None]]:
        """A worker asks for weights; the signal of its answer, and a function that calls the question off.

        ``ahead``: they may be sent while they are made. ``begins``: the answer may come before most of them.
        ``bare``: only their number is wanted.
        """
        number = next(self._numbers)
        call = Call(Signal(), caller, assignment, ahead, begins)
        if not (bare or self.program.near(caller)):
            call.transfer = self._network.open(self.program, caller, self._costs.pull_bytes_s)

        def asked(chain: Chain) -> None:
            if number in self._calls:
                call.asked = True
                self._happen(PullAsked(number, worker, want, TIMELINE), chain)
                if self._draft and number in self._calls:
                    for piece in self._made:
                        self._outgoing.ahead(call, self._draft, piece, chain)

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

        def taken() -> None:
            if self.alive and self.state.backup:  # it is promoted, and has versions to make before it leads
                self._early.append(taken)
            elif self.alive:
                then(longer(chain, Part.CALLS, self._clock.now - begun_at))

        def here() -> None:
            self.program.loop.run(serve_s, taken)

        caller.loop.run((call_s - serve_s) / 2, here)

    def _back(self, caller: Program, chain: Chain, then: Callable[[Chain], None]) -> None:
        """An answer is on its way."""
        begun_at = self._clock.now
        call_s, serve_s = self._costs.call(self.program.near(caller))

        def there() -> None:
            if self.alive:
                then(longer(chain, Part.CALLS, self._clock.now - begun_at))

        caller.loop.run((call_s - serve_s) / 2, there)

    # ---- the state machine and its effects

    def _happen(self, event: Event, chain: Chain) -> None:
        if self.alive:
            self._follow(self.state.handle(event), chain)

    def _follow(self, effects: Sequence[Effect], chain: Chain) -> None:
        answers = [effect for effect in effects if isinstance(effect, AnswerPull)]
        if len(answers) > 1:  # sent side by side: each server begins with another worker, as packets mix
            turn = self.index % len(answers)
            answers = answers[turn:] + answers[:turn]
            effects = [*(effect for effect in effects if not isinstance(effect, AnswerPull)), *answers]
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
                assert refusal is Refusal.GONE, f"a simulated worker made a call that real workers never make: {reason}"
                self._calls.pop(number).answer.set(Answer(self.index, chain, gone=True))
            case Build():
                self._build(effect, chain)
            case DropBuffer(buffer):
                self._brought.pop(buffer, None)
            case DropVersion(version):
                self._was.pop(version, None)

    # ---- weights go out

    def _give(self, call: Call, version: int, min_clock: int, chain: Chain) -> None:
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

        self._outgoing.give(call, self._was.get(version, 0), answer, chain)

    # ---- arithmetic

    def _compute(self, ns: float, chain: Chain, then: Callable[[Chain], None]) -> None:
        """Let the threads for arithmetic do work that takes one thread so many nanoseconds."""
        began_at = self._clock.now

        def done() -> None:
            if self.alive:
                then(longer(chain, Part.ARITHMETIC, self._clock.now - began_at))

        self.program.compute(ns * 1e-9, done)

    def _ns(self, contributions: int) -> float:
        """Nanoseconds for each parameter, to add up and to apply. Backups get the sum."""
        return contributions * (0.0 if self.state.backup else self._costs.sum_ns) + self._rules.apply_ns

    def _drafting(self, event: drafts.Event, chain: Chain) -> bool:
        """Perform the effects of an event for drafts; whether the draft becomes the next version."""
        adopted = False
        for effect in self._drafts.handle(event) if self.alive else ():
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
                self.backups.ahead(draft, piece, chain)
                for call in list(self._calls.values()):
                    self._outgoing.ahead(call, draft, piece, chain)

        self._compute(self._ns(self._draft_parts) * self._pieces[piece].nbytes / 4, chain, made)

    def _build(self, effect: Build, chain: Chain) -> None:
        self.making = True
        draft = self._draft
        adopted = self._drafting(drafts.Decided([self._brought[buffer].part for buffer in effect.buffers]), chain)
        if adopted:
            self._was[effect.version] = draft
        ns = 0.0 if adopted else self._ns(len(effect.buffers)) * self._params
        follows = not self.state.backup

        def made(chain: Chain) -> None:
            if follows:
                state = self.state
                content = Forwarded(
                    state.version, 0, state.parts(), state.consistency, state.clocks_then(), state.pulls.floor
                )
                self.backups.hold(content, draft if adopted else 0, chain, lambda chain: self._built(effect, chain))
            else:
                self._built(effect, chain)

        self._compute(ns, chain, made)

    def _built(self, effect: Build, chain: Chain) -> None:
        if not self.alive:
            return
        self.making = False
        brought = [self._brought.pop(buffer) for buffer in effect.buffers]
        follower = self.state.backup
        if not follower:
            last = max(effect.buffers)  # they are numbered as they come
            behind = effect.version - 1 - brought[0].base
            worker = brought[effect.buffers.index(last)].worker
            self._open(effect.version)
            self._rules.on_published(Published(self.index, effect.version, chain, worker, behind))
        effects = self.state.handle(Built(effect.version))
        self.backups.between()
        self._follow(effects, chain)
        if follower and not self.state.backup:
            self._lead(chain)
        later, self._later = self._later, []
        for work in later:
            work()
