"""A simulated server: the real state machine of a shard, and the time that its calls, sums and updates take."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paramserver.core.claims import Ask, Claims, Standing
from paramserver.core.consistency import Consistency, Mode
from paramserver.core.events import (
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
from paramserver.core.names import Name
from paramserver.core.shard import ShardState
from paramserver.simulate.blame import NOTHING, Chain, Part, longer
from paramserver.simulate.clock import Signal, VirtualClock
from paramserver.simulate.costs import Costs
from paramserver.simulate.links import Message, Queue, SendingPort

TIMELINE = 1


@dataclass(frozen=True, slots=True)
class Host:
    """A machine with its link: what it sends, and what it takes in at ``rate`` bytes per second."""

    up: SendingPort
    down: Queue
    rate: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker hears. ``server``: who says it; ``chain``: up to when it is heard."""

    server: int
    chain: Chain
    version: int = 0
    min_clock: int = 0
    taken: tuple[int, ...] = ()
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """The answer to a question for work; ``complete``: that server lacks nothing of the step."""

    slice: int | None
    complete: bool


@dataclass(slots=True)
class _Call:
    answer: Signal[Answer]
    host: Host | None = None
    standing: Standing | None = None


# Hears which server has published which version, by what chain of events, and whose contribution came last.
OnBuilt = Callable[[int, int, Chain, int], None]


class Server:
    """One server. ``nbytes``: of its part of the model; ``blocks``: into how many parts a message is cut."""

    def __init__(
        self,
        clock: VirtualClock,
        index: int,
        consistency: Consistency,
        workers: Sequence[int],
        host: Host,
        costs: Costs,
        apply_ns: float,
        nbytes: int,
        blocks: int,
        on_built: OnBuilt,
    ) -> None:
        self.index, self.host, self.nbytes, self.blocks = index, host, nbytes, blocks
        self.state = ShardState(consistency, workers)
        self.state.handle(Activated(TIMELINE))
        # Updates of others that each asynchronous contribution did not know of, as it is counted.
        self.behind: list[int] = []
        self._clock, self._costs = clock, costs
        self._sum_s = costs.sum_ns * 1e-9 * nbytes / 4
        self._apply_s = apply_ns * 1e-9 * nbytes / 4
        self._loop, self._thread = Queue(), Queue()
        self._claims = Claims()
        self._claims.begin(0, 0.0)
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        # By buffer: whose contribution it is, and on which version it was computed.
        self._brought: dict[int, tuple[int, int]] = {}
        self._on_built = on_built

    # ---- what workers call

    def push(self, host: Host, name: Name, worker: int, base: int, clock: int, chain: Chain) -> Signal[Answer]:
        """A worker sends a contribution, computed on version ``base``; the answer comes as the state machine says."""
        answer: Signal[Answer] = Signal()

        def arrived(chain: Chain) -> None:
            self._serve(chain, lambda chain: self._arrived(name, worker, base, clock, answer, chain))

        rate = min(self.host.rate, self._costs.push_bytes_s)
        self._send(host, self.host, rate, (Part.WORKER_LINK, Part.SERVER_LINK), chain, arrived)
        return answer

    def pull(
        self, host: Host, worker: int, want: Want, standing: Standing | None, chain: Chain
    ) -> tuple[Signal[Answer], Callable[[], None]]:
        """A worker asks for weights; the signal of its answer, and what calls the question off."""
        call = next(self._numbers)
        answer: Signal[Answer] = Signal()

        def asked(chain: Chain) -> None:
            if call in self._calls:
                self._happen(PullAsked(call, worker, want, TIMELINE), chain)

        def call_off() -> None:
            if self._calls.pop(call, None) is not None:
                self._happen(CallGone(call), chain)

        self._calls[call] = _Call(answer, host, standing)
        self._serve(chain, asked)
        return answer, call_off

    def claim(self, ask: Ask) -> Signal[Work]:
        """A worker has time; as `server.claiming` answers it."""
        answer: Signal[Work] = Signal()

        def asked(_: Chain) -> None:
            missing = self.state.missing()
            if ask.step != self.state.version or missing is None:
                work = Work(None, complete=ask.step <= self.state.version)
            else:
                gaps = missing.slices if missing.of else ((0, ask.of),)
                work = Work(self._claims.ask(ask, gaps, self._clock.now), complete=False)
            self._clock.after(self._half_s, lambda: answer.set(work))

        self._serve(NOTHING, asked)
        return answer

    # ---- calls

    @property
    def _half_s(self) -> float:
        """One way of a call, without what the server does."""
        return (self._costs.call_s - self._costs.serve_s) / 2

    def _serve(self, chain: Chain, then: Callable[[Chain], None]) -> None:
        """A call is on its way; the server takes it in when it has time."""
        begun_at = self._clock.now

        def here() -> None:
            at = self._loop.take(self._clock.now, self._costs.serve_s)
            self._clock.at(at, lambda: then(longer(chain, Part.CALLS, at - begun_at)))

        self._clock.after(self._half_s, here)

    def _arrived(self, name: Name, worker: int, base: int, clock: int, answer: Signal[Answer], chain: Chain) -> None:
        call = next(self._numbers)
        self._calls[call] = _Call(answer)
        self._brought[call] = worker, base
        self._happen(Arrived(call, name, call, worker, TIMELINE, clock), chain)

    # ---- the state machine and its effects

    def _happen(self, event: Event, chain: Chain) -> None:
        effects = self.state.handle(event, self._clock.now)
        answers = [effect for effect in effects if isinstance(effect, AnswerPull)]
        if len(answers) > 1:  # sent side by side: each server begins with another worker, as packets mix
            turn = self.index % len(answers)
            answers = answers[turn:] + answers[:turn]
            effects = [effect for effect in effects if not isinstance(effect, AnswerPull)] + list(answers)
        for effect in effects:
            self._perform(effect, chain)

    def _perform(self, effect: Effect, chain: Chain) -> None:
        match effect:
            case AnswerPush(call, _, version):
                self._say(self._calls.pop(call), version, chain)
            case AnswerPull(call, version, min_clock):
                self._give(self._calls.pop(call), version, min_clock, chain)
            case Refuse(call, refusal, reason):
                assert refusal is Refusal.GONE, f"a simulated worker did what none does: {reason}"
                waiting = self._calls.pop(call).answer
                waiting.set(Answer(self.index, chain, gone=True))
            case Build():
                self._build(effect, chain)
            case DropBuffer(buffer):
                self._brought.pop(buffer, None)
            case DropVersion():
                pass

    def _say(self, call: _Call, version: int, chain: Chain) -> None:
        half_s = self._half_s
        answer = Answer(self.index, longer(chain, Part.CALLS, half_s), version)
        self._clock.after(half_s, lambda: call.answer.set(answer))

    def _give(self, call: _Call, version: int, min_clock: int, chain: Chain) -> None:
        """Send a version to whoever asked for it."""
        assert call.host is not None
        if call.standing is not None:
            self._claims.given(call.standing, version)
        taken = self._claims.taken(version)
        half_s = self._half_s

        def arrived(chain: Chain) -> None:
            answer = Answer(self.index, longer(chain, Part.CALLS, half_s), version, min_clock, taken)
            self._clock.after(half_s, lambda: call.answer.set(answer))

        rate = min(call.host.rate, self._costs.pull_bytes_s)
        self._send(self.host, call.host, rate, (Part.SERVER_LINK, Part.WORKER_LINK), chain, arrived)

    def _send(
        self,
        sender: Host,
        to: Host,
        rate: float,
        parts: tuple[Part, Part],
        chain: Chain,
        arrived: Callable[[Chain], None],
    ) -> None:
        """Send this server's part of the model from host to host; ``parts``: whose links these are."""
        block = self.nbytes / self.blocks
        sender.up.send(Message(self.blocks, block, to.down, rate, *parts, self._clock.now, chain, arrived))

    def _build(self, effect: Build, chain: Chain) -> None:
        now = self._clock.now
        at = self._thread.take(now, len(effect.buffers) * self._sum_s + self._apply_s)
        self._clock.at(at, lambda: self._built(effect, longer(chain, Part.ARITHMETIC, at - now)))

    def _built(self, effect: Build, chain: Chain) -> None:
        self._claims.begin(effect.version, self._clock.now)
        brought = [self._brought.pop(buffer) for buffer in effect.buffers]
        last = max(effect.buffers)  # they are numbered as they come
        worker = brought[effect.buffers.index(last)][0]
        if self.state.consistency.mode is Mode.ASYNC:
            self.behind.append(effect.version - 1 - brought[0][1])
        self._on_built(self.index, effect.version, chain, worker)
        self._happen(Built(effect.version), chain)
