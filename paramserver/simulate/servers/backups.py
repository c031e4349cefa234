"""The backups of a simulated shard, as its primary sees them; the order of messages is that of `server.replicas`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paramserver.core.layout.catching_up import groups, pause_s
from paramserver.core.versions.counted import Runs
from paramserver.core.versions.events import Forwarded
from paramserver.simulate.costs import Costs
from paramserver.simulate.machinery.blame import NOTHING, Chain, Part, longer
from paramserver.simulate.machinery.clock import VirtualClock
from paramserver.simulate.parts.hosts import Network, Program, Transfer
from paramserver.simulate.parts.pieces import Piece

Then = Callable[[Chain], None]


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that a backup gets with the last pieces. ``forwarded`` has the setting and the clocks of ``version``."""

    forwarded: Forwarded
    version: int
    mark: bytes
    counted: Runs
    applied: int


class Target(Protocol):
    """The shard at a backup."""

    program: Program

    def hold(self, content: Forwarded, pieces: Iterable[int], chain: Chain, then: Then) -> None:
        """Hold the content of the next version. ``then`` is called when the backup holds it."""

    def whole(self, facts: Facts) -> None:
        """The last pieces are here."""


class Source(Protocol):
    """The shard at its primary."""

    making: bool
    program: Program

    def facts(self) -> Facts:
        """The facts of the newest version, with no version in the making."""


@dataclass(slots=True, eq=False)
class _Content:
    """The content of a version on its way to one backup. ``draft``: the number of its draft; 0: there was none."""

    draft: int
    transfer: Transfer | None
    sent: set[int] = field(default_factory=set)
    coming: set[int] = field(default_factory=set)
    then: Then | None = None


@dataclass(slots=True, eq=False)
class _Backup:
    """One backup. ``has``: the pieces that the backup has after all messages of ``queue``."""

    target: Target
    has: set[int]
    whole: bool
    # Whether pieces were sent to it: from the first piece on, the contents of versions are sent, too.
    begun: bool = True
    dropped: bool = False
    content: _Content | None = None
    # Messages, of which one at a time is on its way; each is given a function to call when the backup has it.
    queue: deque[Callable[[Then], None]] = field(default_factory=deque)
    busy: bool = False
    # Versions that wait for it.
    waiting: list[Then] = field(default_factory=list)


class Backups:
    """``further``: bytes of optimizer state for each byte of weights."""

    def __init__(
        self,
        clock: VirtualClock,
        source: Source,
        network: Network,
        costs: Costs,
        pieces: Sequence[Piece],
        further: float,
    ) -> None:
        self._clock, self._source, self._network, self._costs = clock, source, network, costs
        self._pieces, self._further = pieces, further
        self._backups: list[_Backup] = []
        self._at_rest: list[Callable[[], None]] = []

    # ---- which there are

    def there(self, target: Target) -> None:
        """Add a backup that has all of the shard from the beginning."""
        self._backups.append(_Backup(target, set(range(len(self._pieces))), whole=True))

    def begin(self, target: Target, mbps: float, told: Callable[[], None]) -> None:
        """Let a new backup catch up, at ``mbps`` megabits a second. ``told`` is called when it has all of the shard."""
        backup = _Backup(target, set(), whole=False, begun=False)
        self._backups.append(backup)
        self._next_group(backup, deque(groups([_Numbered(*one) for one in enumerate(self._pieces)])), mbps, told)

    def drop(self, target: Target) -> None:
        """Give this backup up: versions that waited for it go on."""
        for backup in [one for one in self._backups if one.target is target]:
            self._backups.remove(backup)
            backup.dropped = True
            for then in backup.waiting:
                then(NOTHING)

    # ---- versions

    def ahead(self, draft: int, piece: int, chain: Chain) -> None:
        """A piece of a draft is made: its content leaves."""
        for backup in self._backups:
            if backup.whole and not self._source.program.near(backup.target.program):
                if backup.content is None or backup.content.draft != draft:
                    backup.content = self._new(backup, draft)
                self._send(backup.content, piece, chain)

    def hold(self, content: Forwarded, draft: int, chain: Chain, then: Then) -> None:
        """Send the content of the next version. ``then``: called when all backups hold it. ``draft``: it is a draft."""
        waits = [backup for backup in self._backups if backup.begun]
        left, last = len(waits), chain
        if not left:
            then(chain)

        def held(chain: Chain) -> None:
            nonlocal left, last
            left, last = left - 1, last if chain is NOTHING else chain
            if not left:
                then(last)

        for backup in waits:
            self._forward(backup, content, draft, chain, held)

    def between(self) -> None:
        """No version is in the making at this moment."""
        todo, self._at_rest = self._at_rest, []
        for work in todo:
            work()

    def _forward(self, backup: _Backup, content: Forwarded, draft: int, chain: Chain, held: Then) -> None:
        backup.waiting.append(held)
        has = frozenset(backup.has)

        def answered(chain: Chain) -> None:
            if held in backup.waiting:
                backup.waiting.remove(held)
                held(chain)

        def message(done: Then) -> None:
            def over(chain: Chain) -> None:
                answered(chain)
                done(chain)

            def there(chain: Chain) -> None:
                self._call(
                    backup.target.program,
                    chain,
                    lambda chain, back: backup.target.hold(content, has, chain, back),
                    over,
                )

            ours = backup.content
            if ours is None or not draft or ours.draft != draft:
                ours = self._new(backup, 0)
            backup.content = None
            for piece in sorted(has - ours.sent):
                self._send(ours, piece, chain)
            if ours.coming:
                ours.then = there
            else:
                there(chain)

        self._put(backup, message)

    def _new(self, backup: _Backup, draft: int) -> _Content:
        program, to = self._source.program, backup.target.program
        near = program.near(to)
        return _Content(draft, None if near else self._network.open(program, to, self._costs.push_bytes_s))

    def _send(self, content: _Content, piece: int, chain: Chain) -> None:
        if content.transfer is None:
            return

        def came(chain: Chain) -> None:
            content.coming.discard(piece)
            if not content.coming and content.then is not None:
                content.then(chain)

        content.sent.add(piece)
        content.coming.add(piece)
        content.transfer.send(self._pieces[piece], chain, came)

    # ---- catching up

    def _next_group(self, backup: _Backup, left: deque[list[_Numbered]], mbps: float, told: Callable[[], None]) -> None:
        began_at, sent = self._clock.now, 0

        def at_rest() -> None:
            if self._source.making:
                self._at_rest.append(group)
            else:
                group()

        def group() -> None:
            nonlocal sent
            if backup.dropped:
                return
            rows, last = left.popleft(), not left
            parts = [Piece(int(row.nbytes * (1 + self._further)), 0.0, row.piece.frames) for row in rows]
            sent += sum(part.nbytes for part in parts)
            backup.begun = True
            backup.has.update(row.number for row in rows)
            facts = self._source.facts() if last else None

            def taken(chain: Chain, back: Then) -> None:
                if facts is not None:
                    backup.target.whole(facts)
                back(chain)

            def message(done: Then) -> None:
                def there(chain: Chain) -> None:
                    done(chain)
                    over()

                self._carry(backup.target.program, parts, taken, there)

            self._put(backup, message)

        def over() -> None:
            if left:
                self._clock.after(pause_s(sent, self._clock.now - began_at, mbps), at_rest)
            elif not backup.dropped:
                backup.whole = True
                told()

        at_rest()

    def _carry(self, to: Program, parts: Sequence[Piece], taken: Callable[[Chain, Then], None], then: Then) -> None:
        """Bring parts in one call. The bytes are copied also within a host: these calls never use shared memory."""
        transfer, left = self._network.open(self._source.program, to, self._costs.push_bytes_s), len(parts)

        def came(chain: Chain) -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                self._call(to, chain, taken, then)

        for part in parts:
            transfer.send(part, NOTHING, came)
        if not parts:
            came(NOTHING)

    # ---- messages, in order

    def _put(self, backup: _Backup, message: Callable[[Then], None]) -> None:
        backup.queue.append(message)
        if not backup.busy:
            self._next(backup)

    def _next(self, backup: _Backup) -> None:
        backup.busy = bool(backup.queue) and not backup.dropped
        if backup.busy:
            backup.queue.popleft()(lambda _: self._next(backup))

    def _call(self, to: Program, chain: Chain, handle: Callable[[Chain, Then], None], then: Then) -> None:
        """A small call to a backup and back; ``handle`` is given the way back."""
        call_s, serve_s = self._costs.call(self._source.program.near(to))
        one_way = (call_s - serve_s) / 2

        def later(chain: Chain, seconds: float) -> Chain:
            return longer(chain, Part.CALLS, seconds)

        def back(chain: Chain) -> None:
            self._clock.after(one_way, lambda: then(later(chain, one_way)))

        def here() -> None:
            begun_at = self._clock.now
            to.loop.run(serve_s, lambda: handle(later(chain, one_way + self._clock.now - begun_at), back))

        self._clock.after(one_way, here)


@dataclass(frozen=True, slots=True)
class _Numbered:
    number: int
    piece: Piece

    @property
    def nbytes(self) -> int:
        """Bytes of weights."""
        return self.piece.nbytes
