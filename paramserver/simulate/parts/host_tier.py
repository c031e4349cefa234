"""The one push and the one pull of a simulated host: the real decisions, and the time that calls and sums take.

The first worker of a host has the seat (`worker.host`). This worker adds up the contributions of the host's workers,
pushes the sums, and pulls each version once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from paramserver.core.layout import host_weights
from paramserver.core.versions import host_sums
from paramserver.core.versions.events import AtLeast
from paramserver.core.versions.names import SyncName
from paramserver.core.versions.reduction import Node
from paramserver.simulate.costs import Costs
from paramserver.simulate.machinery.blame import NOTHING, Chain, Part, longer
from paramserver.simulate.machinery.clock import Alarm, Process, Signal, VirtualClock, start
from paramserver.simulate.parts.member import All, Member
from paramserver.simulate.servers.calls import Answer


@dataclass(frozen=True, slots=True)
class _Offer:
    """A contribution that its worker has offered; ``answer`` is set when all servers have counted it."""

    member: Member
    name: SyncName
    answer: All


@dataclass(frozen=True, slots=True)
class _Taker:
    """A worker that waits for weights; ``given`` gets their version."""

    member: Member
    given: Signal[tuple[int, Chain]]


class HostTier:
    """A host with ``workers`` workers. ``keeper``: the worker with the seat. ``sum_s``: of adding two gradients."""

    def __init__(self, clock: VirtualClock, keeper: Member, workers: int, costs: Costs, sum_s: float) -> None:
        self._clock, self._keeper, self._sum_s = clock, keeper, sum_s
        self._call_s, self._serve_s = costs.call(near=True)
        self._sums = host_sums.HostSums()
        # One slot for each worker, one for the newest version, and one for the pull that is under way.
        self._weights = host_weights.HostWeights(workers + 2)
        self._numbers = itertools.count(1)
        self._alarm: Alarm | None = None
        # By step and node: the chain of a piece. By call: the offers and the takers that wait.
        self._chains: dict[tuple[int, Node], Chain] = {}
        self._offers: dict[int, _Offer] = {}
        self._takers: dict[int, _Taker] = {}
        # By worker, the slot that it reads.
        self._reading: dict[int, int] = {}

    # ---- contributions

    def expect(self, member: Member, step: int, of: int, lo: int, hi: int, patience_s: float) -> None:
        """The worker is at ``step``, and will offer contributions for the slices ``[lo, hi)``."""
        told = host_sums.Expects(member.ident, step, of, lo, hi, patience_s)
        self._call(member, member.chain, lambda chain: self._sum(told, chain))

    def offer(self, member: Member, name: SyncName) -> All:
        """Have a contribution added to the others of this host. The signal comes when all servers have counted it."""
        call, one = next(self._numbers), _Offer(member, name, Signal())

        def here(chain: Chain) -> None:
            node = name.lo, name.hi
            if (name.step, node) in self._chains:
                self._by_itself(one, chain)
                return
            self._chains[name.step, node] = chain
            self._offers[call] = one
            self._sum(host_sums.Offers(member.ident, call, name.step, name.of, node), chain)

        self._call(member, member.chain, here)
        return one.answer

    def _sum(self, event: host_sums.Event, chain: Chain | None) -> None:
        """``chain``: of the event; None: time has passed."""
        for effect in self._sums.handle(event, self._clock.now):
            match effect:
                case host_sums.Add(step, left, right):
                    self._add(step, left, right)
                case host_sums.Push(step, node):
                    self._push(step, node)
                case host_sums.Drop(step, node):
                    self._chains.pop((step, node), None)
                case host_sums.Answer(call, counted):
                    self._answer(self._offers.pop(call), counted, chain)
        if self._alarm is not None:
            self._alarm.cancel()
        due = self._sums.due
        self._alarm = None if due is None else self._clock.at(due, lambda: self._sum(host_sums.Tick(), None))

    def _add(self, step: int, left: Node, right: Node) -> None:
        began_at = self._clock.now
        last = max(self._chains[step, left], self._chains[step, right], key=sum)

        def added() -> None:
            del self._chains[step, left], self._chains[step, right]
            chain = longer(last, Part.COPIES, self._clock.now - began_at)
            self._chains[step, (left[0], right[1])] = chain
            self._sum(host_sums.Added(step, left, right), chain)

        self._keeper.program.host.cores.run(self._sum_s, added)

    def _push(self, step: int, node: Node) -> None:
        chain = self._until_now(self._chains[step, node])
        pushed = self._keeper.push(SyncName(step, *node, self._sums.of), 0, chain)

        def answered(value: tuple[list[Answer], Answer]) -> None:
            self._chains.pop((step, node), None)
            self._sum(host_sums.Pushed(step, node, counted=True), value[1].chain)

        pushed.then(answered)

    def _answer(self, one: _Offer, counted: bool, chain: Chain | None) -> None:
        known = self._until_now(one.member.chain) if chain is None else chain
        if not counted:
            self._by_itself(one, known)
            return

        def back(chain: Chain) -> None:
            answer = Answer(0, chain)
            one.answer.set(([answer], answer))

        self._back(one.member, known, back)

    def _by_itself(self, one: _Offer, chain: Chain) -> None:
        """The worker has to push its contribution by itself."""
        self._back(one.member, chain, lambda chain: one.member.push(one.name, 0, chain).then(one.answer.set))

    # ---- weights

    def asking(self, member: Member, version: int) -> tuple[All, Callable[[], None]]:
        """Ask all servers for their version, and take this version from this host; see :meth:`Member.asking`."""
        found: All = Signal()
        off: list[Callable[[], None]] = []

        def call_off() -> None:
            for one in off:
                one()

        def process() -> Process[None]:
            taken, give_up = self._take(member, version)
            headers, heard = member.headers(AtLeast(version))
            off[:] = [give_up, heard]
            answers, last = yield headers
            answers, chain = yield from member.agree(answers, last.chain, bare=True)
            while True:
                there, came = yield taken
                if there == answers[0].version:
                    break
                wanted = max(there, answers[0].version)
                if there > answers[0].version:
                    headers, heard = member.headers(AtLeast(there))
                    off[:] = [heard]
                    answers, last = yield headers
                    answers, chain = yield from member.agree(answers, last.chain, bare=True)
                taken, give_up = self._take(member, wanted)
                off[:] = [give_up]
            found.set((answers, replace(answers[0], chain=max(chain, came, key=sum))))

        start(process())
        return found, call_off

    def _take(self, member: Member, version: int) -> tuple[Signal[tuple[int, Chain]], Callable[[], None]]:
        """The signal of ``version`` or a later version on this host, and a function that gives the question up."""
        call, one = next(self._numbers), _Taker(member, Signal())
        self._takers[call] = one

        def here(chain: Chain) -> None:
            if call in self._takers:
                slot = self._reading.get(member.ident)
                reading = () if slot is None else (slot,)
                self._weigh(host_weights.Wants(member.ident, call, version, reading), chain)

        def give_up() -> None:
            if self._takers.pop(call, None) is not None:
                self._weigh(host_weights.GivesUp(call), NOTHING)

        self._call(member, member.chain, here)
        return one.given, give_up

    def _weigh(self, event: host_weights.Event, chain: Chain) -> None:
        for effect in self._weights.handle(event):
            match effect:
                case host_weights.Begin(version):
                    start(self._bring(version, chain))
                case host_weights.Give(call, version, slot):
                    self._give(self._takers.pop(call), version, slot, chain)
                case host_weights.Refuse(_, reason):
                    raise AssertionError(f"a simulated host refuses weights: {reason}")

    def _give(self, one: _Taker, version: int, slot: int, chain: Chain) -> None:
        self._reading[one.member.ident] = slot
        self._back(one.member, chain, lambda chain: one.given.set((version, chain)))

    def _bring(self, version: int, chain: Chain) -> Process[None]:
        """Pull a version for all workers of this host."""
        answers, last = yield self._keeper.asking(AtLeast(version), ahead=True, chain=chain)[0]
        answers, chain = yield from self._keeper.agree(answers, last.chain)
        self._weigh(host_weights.Came(answers[0].version), chain)

    # ---- calls within the host

    def _call(self, member: Member, chain: Chain, then: Callable[[Chain], None]) -> None:
        """A worker of this host calls the worker with the seat."""
        if member is self._keeper:
            then(chain)
            return
        began_at = self._clock.now

        def taken() -> None:
            then(longer(chain, Part.CALLS, self._clock.now - began_at))

        def here() -> None:
            self._keeper.program.loop.run(self._serve_s, taken)

        member.program.loop.run((self._call_s - self._serve_s) / 2, here)

    def _back(self, member: Member, chain: Chain, then: Callable[[Chain], None]) -> None:
        """Send an answer. It arrives when all effects of an event are performed, also if calls cost no time."""
        began_at = self._clock.now

        def there() -> None:
            then(longer(chain, Part.CALLS, self._clock.now - began_at))

        call_s = 0.0 if member is self._keeper else (self._call_s - self._serve_s) / 2
        self._clock.after(0.0, lambda: member.program.loop.run(call_s, there))

    def _until_now(self, chain: Chain) -> Chain:
        """Waits for other workers of the host count as calls."""
        return longer(chain, Part.CALLS, max(0.0, self._clock.now - sum(chain)))
