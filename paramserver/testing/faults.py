"""Planned faults between a client and its peers.

A plan is a value: rules by the name of the call, and a seed. It counts what fired, and :meth:`FaultPlan.check` raises
if a rule never did, so that no test passes because nothing went wrong.

>>> plan = FaultPlan([Rule("Shard.Push", Fault.LOSE_REPLY, times=3)])
>>> engine = job.worker(connect=plan.wrap(job.network.connect))
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import socket
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from google.protobuf.message import Message

from paramserver import errors
from paramserver.transport.base import METHODS, Channel, Frames, MethodKind, Neighbour, each

T = TypeVar("T")
Connect = Callable[[str], Channel]


class Fault(enum.Enum):
    """What happens to one call. All but DUPLICATE, DELAY and REORDER end it with UnavailableError at the caller."""

    # The peer never hears of it.
    DROP_REQUEST = "request dropped"
    # The peer does all that was asked (of a download: begins to answer), the caller does not hear of it.
    LOSE_REPLY = "reply lost"
    # The peer gets it twice, at the same time; the caller sees one of the answers.
    DUPLICATE = "request duplicated"
    # It starts late; others overtake it.
    DELAY = "request delayed"
    # It starts when a later call of the same method has been answered, or in the end all the same.
    REORDER = "request reordered"
    # An upload breaks off before its end. Other calls: as DROP_REQUEST.
    CUT_UPLOAD = "upload cut short"


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


class FaultPlan:
    """Which calls suffer which faults; one plan may serve several clients. Used within one event loop.

    Whether a call is hit depends on the seed, the rule and how many calls the rule has seen, on nothing else.
    """

    def __init__(self, rules: Sequence[Rule] = (), seed: int = 0) -> None:
        self.rules = tuple(rules)
        self.seed = seed
        # How often each rule fired, by its place in `rules`.
        self.fired: Counter[int] = Counter()
        self._seen: Counter[int] = Counter()
        self._healed = asyncio.Event()
        self._cut = asyncio.Event()
        self._silent = False
        self._healed.set()
        # Calls that wait to be overtaken: (method, what to set then).
        self._held: list[tuple[str, asyncio.Event]] = []

    def wrap(self, connect: Connect) -> Connect:
        """The same way to connect, through this plan."""
        return lambda address: FaultyChannel(connect(address), self)

    def check(self) -> None:
        """Raise AssertionError, naming them, if some rules never fired."""
        idle = [f"{rule.fault.value}: {rule.method}" for i, rule in enumerate(self.rules) if not self.fired[i]]
        if idle:
            raise AssertionError(f"planned faults that never fired (seed {self.seed}): {'; '.join(idle)}")

    @property
    def quiet(self) -> bool:
        """Whether no call is to suffer anything just now."""
        return not self.rules and not self._cut.is_set()

    # ---- the whole client

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

    # ---- for the channels

    def next(self, method: str) -> Rule | None:
        """The rule that hits this call, or None. Counts it."""
        for number, rule in enumerate(self.rules):
            if not fnmatchcase(method, rule.method):
                continue
            seen = self._seen[number]
            self._seen[number] += 1
            if seen < rule.skip or (rule.times and self.fired[number] >= rule.times):
                continue
            if chance(self.seed, number, seen) < rule.share:
                self.fired[number] += 1
                return rule
        return None

    def repeats(self, method: str) -> bool:
        """Whether what a call sends may be needed twice, or broken off."""
        faults = {rule.fault for rule in self.rules if fnmatchcase(method, rule.method)}
        return not faults.isdisjoint({Fault.DUPLICATE, Fault.CUT_UPLOAD})

    async def gate(self, where: str, deadline: float | None) -> None:
        """Pass, unless the client is cut off. ``deadline``: in the loop's time."""
        if self._cut.is_set():
            if self._silent:
                await _within(where, deadline, self._healed.wait())
            raise broken(where, "cut off")

    async def unless_cut(self, where: str, deadline: float | None, work: asyncio.Future[Any]) -> None:
        """Wait for ``work``, or raise once the client is cut off; ``work`` is then cancelled."""
        alarm = asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait([work, alarm], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await _given_up(work)
                await self.gate(where, deadline)
                raise broken(where, "cut off")
        finally:
            alarm.cancel()
            if not work.done():  # the caller has been cancelled; what it waited for must not run on beside it
                await _given_up(work)
            elif not work.cancelled():
                work.exception()  # nobody may ask for it any more

    async def delay(self, rule: Rule | None, method: str, where: str) -> None:
        """Wait, if the rule says so."""
        if rule is not None and rule.fault is Fault.DELAY:
            await asyncio.sleep(self.delay_s(rule, where))
        if rule is not None and rule.fault is Fault.REORDER:
            held = method, asyncio.Event()
            self._held.append(held)
            try:
                async with asyncio.timeout(rule.delay_s):
                    await held[1].wait()
            except TimeoutError:
                pass
            finally:
                self._held.remove(held)

    def delay_s(self, rule: Rule, where: str) -> float:
        """How late a delayed call starts, in seconds."""
        return rule.delay_s * chance(self.seed, "delay", where, self.fired.total())

    def answered(self, method: str) -> None:
        """A call has come to its end: those held back for it may go on."""
        for name, overtaken in self._held:
            if name == method:
                overtaken.set()


class FaultyChannel:
    """A channel whose calls suffer what the plan says; see `paramserver.transport.base.Channel`."""

    def __init__(self, inner: Channel, plan: FaultPlan) -> None:
        self.kind = inner.kind
        self.address = inner.address
        self._inner = inner
        self._plan = plan

    async def call(self, method: str, request: Message, *, timeout: float) -> Message:
        """One message there, one back."""
        return await self._suffer(method, timeout, lambda: self._inner.call(method, request, timeout=timeout))

    async def upload(self, method: str, frames: Frames, *, timeout: float) -> Message:
        """Frames there, one message back."""
        if not self._plan.repeats(method):
            return await self._suffer(method, timeout, lambda: self._inner.upload(method, frames, timeout=timeout))
        sent = [raw async for raw in each(frames)]
        return await self._suffer(
            method,
            timeout,
            lambda: self._inner.upload(method, sent, timeout=timeout),
            lambda: self._inner.upload(method, _endless(sent, f"{method} at {self.address}"), timeout=timeout),
        )

    async def _suffer(
        self,
        method: str,
        timeout: float,
        attempt: Callable[[], Awaitable[Message]],
        cut_short: Callable[[], Awaitable[Message]] | None = None,
    ) -> Message:
        where, rule, deadline = await self._begin(method, timeout)
        fault = rule.fault if rule is not None else None
        if fault is Fault.CUT_UPLOAD and cut_short is not None:
            await cut_short()
            raise AssertionError(f"{where}: the peer answered an upload that was cut short")
        works = [asyncio.ensure_future(attempt()) for _ in range(2 if fault is Fault.DUPLICATE else 1)]
        both = asyncio.gather(*works)
        both.add_done_callback(lambda done: done.cancelled() or done.exception())  # looked at, if the caller has gone
        await self._plan.unless_cut(where, deadline, both)
        replies = both.result()
        self._plan.answered(method)
        if fault is Fault.LOSE_REPLY:
            raise broken(where, "the reply was lost")
        return replies[-1]

    async def _begin(self, method: str, timeout: float | None) -> tuple[str, Rule | None, float | None]:
        where = f"{method} at {self.address}"
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        await self._plan.gate(where, deadline)
        rule = self._plan.next(method)
        if rule is not None and (
            rule.fault is Fault.DROP_REQUEST
            or (rule.fault is Fault.CUT_UPLOAD and METHODS[method].kind is not MethodKind.UPLOAD)
        ):
            raise broken(where, "the request was dropped")
        await self._plan.delay(rule, method, where)
        return where, rule, deadline

    async def download(self, method: str, request: Message, *, timeout: float) -> AsyncGenerator[bytes, None]:
        """One message there, frames back."""
        where, rule, deadline = await self._begin(method, timeout)
        if rule is not None and rule.fault is Fault.DUPLICATE:
            async for _ in self._inner.download(method, request, timeout=timeout):
                pass
        async with (
            aclosing(self._inner.download(method, request, timeout=timeout)) as answers,
            aclosing(self._guarded(answers, where, deadline)) as guarded,
        ):
            async for frame in guarded:
                yield frame
                if rule is not None and rule.fault is Fault.LOSE_REPLY:
                    raise broken(where, "the rest of the reply was lost")
        self._plan.answered(method)

    async def session(self, method: str, requests: AsyncIterator[Message]) -> AsyncGenerator[Message, None]:
        """Messages both ways. LOSE_REPLY ends it after its first answer; DUPLICATE does nothing to it."""
        where, rule, deadline = await self._begin(method, None)
        async with (
            aclosing(self._inner.session(method, requests)) as answers,
            aclosing(self._guarded(answers, where, deadline)) as guarded,
        ):
            async for answer in guarded:
                yield answer
                if rule is not None and rule.fault is Fault.LOSE_REPLY:
                    raise broken(where, "the session was reset")

    async def _guarded(
        self, answers: AsyncGenerator[T, None], where: str, deadline: float | None
    ) -> AsyncGenerator[T, None]:
        while True:
            coming = asyncio.ensure_future(_next(answers))
            await self._plan.unless_cut(where, deadline, coming)
            for answer in coming.result():
                yield answer
            if not coming.result():
                return

    def beside(self, sock: socket.socket) -> Neighbour:
        """The same peer over a socket, with the same faults."""
        return _FaultyNeighbour(self._inner.beside(sock), self._plan)

    async def close(self) -> None:
        """Close the channel."""
        await self._inner.close()


class _FaultyNeighbour(FaultyChannel):
    """The same, of a channel to a peer on the same host."""

    def __init__(self, inner: Neighbour, plan: FaultPlan) -> None:
        super().__init__(inner, plan)
        self._neighbour = inner

    @property
    def undisturbed(self) -> bool:
        """See `base.Neighbour`."""
        return self._plan.quiet and self._neighbour.undisturbed


def broken(where: str, how: str) -> errors.UnavailableError:
    """What the caller sees of a planned fault."""
    return errors.UnavailableError(f"{where}: {how}, as planned")


def _endless(frames: Sequence[bytes], where: str) -> Iterable[bytes]:
    """All frames, but no end."""
    yield from frames
    raise broken(where, "the upload was cut short")


async def _next(answers: AsyncGenerator[T, None]) -> tuple[T, ...]:
    """The next answer, or nothing after the last one."""
    async for answer in answers:
        return (answer,)
    return ()


async def _given_up(work: asyncio.Future[Any]) -> None:
    """Cancel it and wait for its end, however it ends."""
    work.cancel()
    await asyncio.wait([work])
    if not work.cancelled():
        work.exception()


async def _within(where: str, deadline: float | None, wait: Awaitable[object]) -> None:
    try:
        async with asyncio.timeout_at(deadline):
            await wait
    except TimeoutError:
        raise errors.DeadlineError(f"{where}: no answer in time; cut off, as planned") from None


def chance(*key: object) -> float:
    """For seeded choices. A number in [0, 1) that depends on the arguments alone."""
    text = "/".join(map(str, key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") / 2**64
