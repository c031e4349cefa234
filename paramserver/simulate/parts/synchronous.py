"""A simulated synchronous worker, which performs the effects of the real state machine in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paramserver.core.versions.events import AtLeast
from paramserver.core.versions.host_sums import patience_s
from paramserver.core.versions.names import SyncName
from paramserver.core.versions.reduction import Node
from paramserver.core.work.stealing import Advice, Assignment
from paramserver.core.work.sync_events import (
    Answered,
    AskForWork,
    Compute,
    Computed,
    Effect,
    Event,
    Exchange,
    Exchanged,
    Patience,
    PatienceOver,
    Push,
    PushAndWait,
    PushesArrived,
    SliceWanted,
    StepBegan,
    StopWaiting,
    Wait,
)
from paramserver.core.work.sync_worker import SyncWorkerState
from paramserver.simulate.machinery.blame import Chain, Part, longer
from paramserver.simulate.machinery.clock import Process, Signal
from paramserver.simulate.parts import requests
from paramserver.simulate.parts.host_tier import HostTier
from paramserver.simulate.parts.member import All, Member
from paramserver.simulate.servers.calls import Answer

# The answers to a pull, or None: patience is over.
_Heard = tuple[list[Answer], Answer] | None


class SyncWorker:
    """The shell of one worker. ``moves``: slices may go to other workers.

    ``early``: a contribution leaves while it is computed, if possible. ``tier``: the one push and pull of its host.
    """

    def __init__(
        self,
        member: Member,
        workers: int,
        slices: int,
        moves: bool,
        early: bool = False,
        tier: HostTier | None = None,
    ) -> None:
        self._member, self._workers, self._of = member, workers, slices
        self._early, self._tier = early and tier is None, tier
        self._expected: tuple[int, ...] = ()  # the slices that the host was told of
        self._state = SyncWorkerState(len(member), member.ident, moves)
        self._leaving: tuple[int, list[requests.Push]] | None = None  # the slice that leaves while it is computed
        self._asked_for: tuple[All, Callable[[], None]] | None = None  # the open question for the next version
        self._pushes: list[All] = []
        self.moved = 0  # slices of other workers that this worker has computed

    def run(self) -> Process[None]:
        """Work without end."""
        member, state = self._member, self._state
        self._begin((yield from member.pull(AtLeast(0))))
        while True:
            slice_ = yield from self._tell(SliceWanted())
            if slice_ is None:  # it has waited
                continue
            yield from member.compute(self._begin_early(slice_))
            yield from self._tell(Computed(state.step, slice_, member.stalled_s))

    def _begin(self, answers: list[Answer]) -> None:
        """Take a new version in."""
        event = StepBegan(answers[0].version, self._of, self._member.rank, self._workers, answers[0].taken)
        self._handle(event)  # contributions that are not needed any more are nowhere

    def _handle(self, event: Event) -> list[Effect]:
        state, member = self._state, self._member
        effects = state.handle(event, member.clock.now)
        share = state.step, state.of, *state.offers
        if self._tier is not None and share != self._expected:
            self._expected = share
            self._tier.expect(member, *share, patience_s(state.work_s))
        return effects

    def _tell(self, event: Event) -> Process[int | None]:
        """Perform the effects of an event. Returns the slice to compute, if a computation is next."""
        for effect in self._handle(event):
            match effect:
                case Compute(slice_, unplanned):
                    self.moved += unplanned
                    return slice_
                case Push(node):
                    self._push(node)
                case PushAndWait():  # shared memory within a host is not simulated
                    yield from self._tell(Exchanged(Exchange.NOT_MADE))
                case AskForWork():
                    return (yield from self._tell((yield from self._ask(effect))))
                case Wait(assignment):
                    yield from self._wait(assignment)
        return None

    def _ask(self, effect: AskForWork) -> Process[Answered]:
        """Ask a server which slice to compute."""
        member = self._member
        began_at = member.clock.now
        work: Advice = yield member.steal(effect.server, effect.ask)
        member.chain = longer(member.chain, Part.CALLS, member.clock.now - began_at)
        return Answered(work.slice, work.complete)

    def _begin_early(self, slice_: int) -> Sequence[requests.Push]:
        """Let the only slice of this worker's range leave while it is computed, as `Sender.begin_early` does."""
        if not self._early or not self._state.alone(slice_):
            return ()
        self._leaving = slice_, self._member.begin(self._name((slice_, slice_ + 1)), 0)
        self._ask_for_next(self._state.assignment)
        return self._leaving[1]

    def _ask_for_next(self, assignment: Assignment | None) -> tuple[All, Callable[[], None]]:
        """Ask for the next version, once."""
        if self._asked_for is None:
            self._member.assignment = assignment
            version = self._state.step + 1
            if self._tier is not None:
                self._asked_for = self._tier.asking(self._member, version)
            else:
                self._asked_for = self._member.asking(AtLeast(version), ahead=True)
        return self._asked_for

    def _push(self, node: Node) -> None:
        leaving, self._leaving = self._leaving, None
        lo, hi = self._state.offers
        if self._tier is not None and lo <= node[0] < node[1] <= hi:
            self._pushes.append(self._tier.offer(self._member, self._name(node)))
        elif leaving is not None and node == (leaving[0], leaving[0] + 1):
            self._pushes.append(self._member.complete(leaving[1]))
        else:
            self._pushes.append(self._member.push(self._name(node), 0))

    def _name(self, node: Node) -> SyncName:
        return SyncName(self._state.step, *node, self._of)

    def _wait(self, assignment: Assignment | None) -> Process[None]:
        """Wait for the next version, or for a slice to compute before it comes."""
        member = self._member
        pulling, call_off = self._ask_for_next(assignment)
        self._asked_for = None
        yield from member.wait_all(self._pushes)
        self._pushes.clear()
        since, chain = member.clock.now, member.chain
        patience = self._handle(PushesArrived())

        def there() -> bool:
            return pulling.done

        while True:
            waits = not there()
            heard: _Heard = yield self._first(pulling, patience)
            if heard is not None:
                member.chain = heard[1].chain if waits else member.chain
                break
            member.chain = _waited(chain, member.clock.now - since)
            if there():
                break
            (question,) = self._handle(PatienceOver())
            assert isinstance(question, AskForWork)
            answer = yield from self._ask(question)
            if there():
                break
            patience = self._handle(answer)
            if isinstance(patience[0], StopWaiting):
                call_off()
                return
        self._begin((yield from member.agreed(pulling.value[0])))

    def _first(self, pulling: All, patience: Sequence[Effect]) -> Signal[_Heard]:
        """The answers, or None when this worker's patience is over."""
        first: Signal[_Heard] = Signal()
        match patience:
            case [Patience(seconds)]:
                alarm = self._member.clock.after(seconds, lambda: first.set(None))

                def heard(value: tuple[list[Answer], Answer]) -> None:
                    alarm.cancel()
                    first.set(value)

                pulling.then(heard)
            case _:
                pulling.then(first.set)
        return first


def _waited(chain: Chain, seconds: float) -> Chain:
    """Waits before a question for work count as calls, since no other part keeps this worker."""
    return longer(chain, Part.CALLS, seconds)
