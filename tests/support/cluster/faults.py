"""Planned faults between a client and its peers.

A plan is a value: rules by the name of the call, and a seed. It counts what fired, and :meth:`FaultPlan.check` raises
if a rule never did, so that no test passes because nothing went wrong.

>>> plan = FaultPlan([Rule("Shard.Push", Fault.LOSE_REPLY, times=3)])
>>> engine = job.worker(connect=plan.wrap(job.network.connect))
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from paramserver import errors
from paramserver.testing.faults import CallFaults, Fault, FaultyChannel, Hit, broken, chance, given_up
from paramserver.transport.base import Channel

__all__ = ["Connect", "Fault", "FaultPlan", "FaultyChannel", "Rule"]

Connect = Callable[[str], Channel]


@dataclass(frozen=True, slots=True)
class Rule:
    """Calls whose name matches ``method`` ("Shard.Push", "Shard.*") suffer ``fault``.

    ``share``: of these calls, which part (0 to 1). ``times``: at most so many (0: no limit). ``skip``: the first so
    many pass unharmed. ``delay_s``: how late a delayed or reordered call starts, at most.
    """

    method: str
    fault: Fault
    share: float = 1.0
    times: int = 0
    skip: int = 0
    delay_s: float = 0.02


class FaultPlan(CallFaults):
    """Which calls suffer which faults; one plan may serve several clients.

    Whether a call is hit depends on the seed, the rule and how many calls the rule has seen, on nothing else.
    """

    def __init__(self, rules: Sequence[Rule] = (), seed: int = 0) -> None:
        super().__init__()
        self.rules = tuple(rules)
        self.seed = seed
        # How often each rule fired, by its place in `rules`.
        self.fired: Counter[int] = Counter()
        self._seen: Counter[int] = Counter()
        self._healed = asyncio.Event()
        self._cut = asyncio.Event()
        self._silent = False
        self._healed.set()

    def wrap(self, connect: Connect) -> Connect:
        """The same way to connect, through this plan."""
        return lambda address: FaultyChannel(connect(address), self)

    def check(self) -> None:
        """Raise AssertionError, naming them, if some rules never fired."""
        if idle := self.idle():
            raise AssertionError(f"planned faults that never fired (seed {self.seed}): {'; '.join(idle)}")

    def idle(self) -> list[str]:
        """The rules that have not fired, in words."""
        return [f"{rule.fault.name}: {rule.method}" for i, rule in enumerate(self.rules) if not self.fired[i]]

    @property
    def quiet(self) -> bool:
        """See `CallFaults`."""
        return not self.rules and not self._cut.is_set()

    def cut(self, silent: bool = False) -> None:
        """Cut the clients of this plan off, calls in flight included, until :meth:`heal`.

        Every call fails at once; ``silent``: nothing comes back any more, not even an error, until the deadline of the
        call. Call both methods in the event loop in which the channels are used.
        """
        self._silent = silent
        self._healed.clear()
        self._cut.set()

    def heal(self) -> None:
        """Connect them again. What was cut in flight stays broken."""
        self._cut.clear()
        self._healed.set()

    def next(self, method: str) -> Hit | None:
        """See `CallFaults`. Counts the call."""
        for number, rule in enumerate(self.rules):
            if not fnmatchcase(method, rule.method):
                continue
            seen = self._seen[number]
            self._seen[number] += 1
            if seen < rule.skip or (rule.times and self.fired[number] >= rule.times):
                continue
            if chance(self.seed, number, seen) < rule.share:
                self.fired[number] += 1
                part = chance(self.seed, "delay", method, self.fired.total()) if rule.fault is Fault.DELAY else 1.0
                return Hit(rule.fault, rule.delay_s * part)
        return None

    def repeats(self, method: str) -> bool:
        """See `CallFaults`."""
        faults = {rule.fault for rule in self.rules if fnmatchcase(method, rule.method)}
        return not faults.isdisjoint({Fault.DUPLICATE, Fault.CUT_UPLOAD})

    async def gate(self, where: str, deadline: float | None) -> None:
        """Pass, unless the client is cut off."""
        if self._cut.is_set():
            if self._silent:
                try:
                    async with asyncio.timeout_at(deadline):
                        await self._healed.wait()
                except TimeoutError:
                    raise errors.DeadlineError(f"{where}: no answer in time; cut off, as planned") from None
            raise broken(where, "cut off")

    async def settle(self, where: str, deadline: float | None, work: asyncio.Future[Any]) -> None:
        """Wait for ``work``, or raise once the client is cut off; ``work`` is then cancelled."""
        alarm = asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait([work, alarm], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await given_up(work)
                await self.gate(where, deadline)
                raise broken(where, "cut off")
        finally:
            alarm.cancel()
            await given_up(work)
