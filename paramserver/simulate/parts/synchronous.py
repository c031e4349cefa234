"""A simulated synchronous worker: the loop of `worker.pace.SyncPace`, with the real stealing, speed and tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from paramserver.core.versions.events import AtLeast
from paramserver.core.versions.names import SyncName
from paramserver.core.versions.reduction import Node, Reducer, cover
from paramserver.core.work.slices import assign
from paramserver.core.work.speed import Speed
from paramserver.core.work.stealing import Ask, Assignment
from paramserver.simulate.machinery.blame import Chain, Part, longer
from paramserver.simulate.machinery.clock import Process, Signal
from paramserver.simulate.parts.member import All, Member
from paramserver.simulate.parts.server import Answer, Push, Work

# The answers to a pull, or None: patience is over.
_Heard = tuple[list[Answer], Answer] | None


class SyncWorker:
    """Its range of every step's slices, slices of others if it has time, the next version.

    ``moves``: slices may go to others. ``early``: a contribution leaves while it is computed, where it can.
    """

    def __init__(self, member: Member, workers: int, slices: int, moves: bool, early: bool = False) -> None:
        self._member, self._workers, self._of, self._moves = member, workers, slices, moves
        self._range = assign(slices, workers)[member.rank]
        self._early = early
        self._leaving: tuple[int, list[Push]] | None = None  # the slice that leaves while it is computed
        self._asked_for: tuple[All, Callable[[], None]] | None = None  # the next version, asked for meanwhile
        self._version = -1
        self._done: set[int] = set()
        self._left: set[int] = set()  # slices of the own range that others compute
        self._given: int | None = None
        self._hurry = False
        self._given_away = False
        self._speed = Speed()
        self._asked = 0  # the server that is asked for work
        self._reducer = Reducer(slices, self._range)
        self._held: set[Node] = set()
        self._pushes: list[All] = []
        self.moved = 0  # slices of others that it has computed

    def run(self) -> Process[None]:
        """Work without end."""
        answers = yield from self._member.pull(AtLeast(0))
        self._begin(answers)
        while True:
            position = yield from self._slice()
            if position is None:
                yield from self._wait_for_next()
                continue
            self._speed.begun(self._member.clock.now)
            early = self._begin_early(position)
            yield from self._member.compute(early)
            self._speed.finished(self._member.clock.now - self._member.stalled_s)
            self._contribute(position)
            if next(self._mine(), None) is None:
                self._release()
                yield from self._wait_for_next()

    def _begin(self, answers: list[Answer]) -> None:
        """Take a new version in."""
        version = answers[0].version
        lost = sum(self._range[0] <= slice_ < self._range[1] for slice_ in answers[0].taken)
        self._speed.step(self._member.clock.now, lost, max(1, version - self._version))
        self._version = version
        self._done.clear()
        self._left.clear()
        self._held.clear()
        self._given, self._given_away, self._hurry = None, False, self._speed.slow
        self._reducer = Reducer(self._of, self._range)
        self._asked = 0

    def _mine(self) -> Iterator[int]:
        return (p for p in range(*self._range) if p not in self._done and p not in self._left)

    def _slice(self) -> Process[int | None]:
        """The slice that this worker was given, else the first of its range that is not done, if it may begin that."""
        if self._given is None:
            mine = next(self._mine(), None)
            if mine is None or not self._asks():
                return mine
            work = yield from self._ask()
            self._hurry = self._given_away = True
            self._release()
            if work.slice is None:
                return None
            self._given = work.slice
        position, self._given = self._given, None
        if position in self._done:
            return None
        unplanned = position in self._left or not self._range[0] <= position < self._range[1]
        self.moved += unplanned
        self._left.update(p for p in self._mine() if unplanned or p < position)
        return position

    def _asks(self) -> bool:
        return self._moves and (self._given_away or self._speed.asks(self._member.clock.now, not self._done))

    def _ask(self) -> Process[Work]:
        """Ask a server which slice to compute; where nothing is missing, another is asked next."""
        began_at = self._member.clock.now
        ask = Ask(self._assignment(), self._version, self._of, frozenset(self._done))
        work: Work = yield self._member.servers[self._asked].steal(self._member.program, ask)
        self._member.chain = longer(self._member.chain, Part.CALLS, self._member.clock.now - began_at)
        if work.complete:
            self._asked = (self._asked + 1) % len(self._member.servers)
        return work

    def _assignment(self) -> Assignment:
        return Assignment(self._member.ident, self._member.rank, self._workers, self._speed.work_s)

    def _contribute(self, position: int) -> None:
        """Sum with its neighbours as far as the fixed tree allows; push what is as large as it will get."""
        if position in self._done:
            return
        self._done.add(position)
        node = (position, position + 1)
        leaving, self._leaving = self._leaving, None
        if leaving is not None and leaving[0] == position:
            self._pushes.append(self._member.complete(leaving[1]))
            return
        if self._hurry or not self._range[0] <= position < self._range[1]:
            self._push(node)
            return
        self._reducer.add(node)
        self._held.add(node)
        for left, right, whole in self._reducer.merge():
            self._held -= {left, right}
            self._held.add(whole)
        for node in cover(*self._range, self._of):
            if node in self._held:
                self._held.remove(node)
                self._push(node)

    def _begin_early(self, position: int) -> Sequence[Push]:
        """Let a slice that is all of this worker's range leave while it is computed, as `Engine.begin_early` does."""
        if not self._early or self._range != (position, position + 1) or self._given_away:
            return ()
        self._leaving = position, self._member.begin(SyncName(self._version, position, position + 1, self._of), 0)
        self._ask_for_next()
        return self._leaving[1]

    def _ask_for_next(self) -> tuple[All, Callable[[], None]]:
        """Ask for the next version, once."""
        if self._asked_for is None:
            self._member.assignment = self._assignment() if self._moves else None
            self._asked_for = self._member.asking(AtLeast(self._version + 1), ahead=True)
        return self._asked_for

    def _release(self) -> None:
        for node in sorted(self._held):
            self._push(node)
        self._held.clear()

    def _push(self, node: Node) -> None:
        self._pushes.append(self._member.push(SyncName(self._version, *node, self._of), 0))

    def _wait_for_next(self) -> Process[None]:
        """Wait for the next version, or for a slice to compute meanwhile."""
        member = self._member
        pulling, call_off = self._ask_for_next()
        self._asked_for = None
        if self._pushes:
            began_at = member.clock.now
            yield from member.wait_all(self._pushes)
            self._pushes.clear()
            self._speed.pushed(member.clock.now - began_at)
        since, chain = member.clock.now, member.chain

        def there() -> bool:
            return pulling.done

        while True:
            waits = not there()
            heard: _Heard = yield self._first(pulling)
            if heard is not None:
                member.chain = heard[1].chain if waits else member.chain
                break
            member.chain = _waited(chain, member.clock.now - since)
            if there():
                break
            work = yield from self._ask()
            if there():
                break
            self._speed.answered(work.slice is not None)
            if work.slice is not None:
                call_off()
                self._given = work.slice
                self._hurry = self._given_away = True
                return
        self._begin((yield from member.agreed(pulling.value[0])))

    def _first(self, pulling: All) -> Signal[_Heard]:
        """The answers, or None when this worker's patience is over."""
        first: Signal[_Heard] = Signal()
        if self._moves:
            alarm = self._member.clock.after(self._speed.patience_s(), lambda: first.set(None))

            def heard(value: tuple[list[Answer], Answer]) -> None:
                alarm.cancel()
                first.set(value)

            pulling.then(heard)
        else:
            pulling.then(first.set)
        return first


def _waited(chain: Chain, seconds: float) -> Chain:
    """Waiting before a question for work is put down to calls: nothing else keeps this worker."""
    return longer(chain, Part.CALLS, seconds)
