"""A worker's part in the one pull and the one push of its host: it does both for the others, or has them done by one.

Who has the seat of the host pulls and pushes (`transport/shm/seat.py`). When that process ends, the kernel gives the
seat back, and another worker takes it. Only the bytes of weights and gradients go this way. Each worker asks the
servers itself which version there is, and pulls and pushes by itself whenever the other way fails.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from paramserver import errors
from paramserver.core.layout.arena import Arena, make_arena
from paramserver.core.layout.host_weights import Give
from paramserver.core.layout.plan import Kind, Plan
from paramserver.core.layout.thresholds import REST_BYTES
from paramserver.core.versions.names import SyncName
from paramserver.transport.shm import seat
from paramserver.transport.shm.segments import PAGE, available
from paramserver.v1 import shard_pb2
from paramserver.v1.local_pb2 import HostShare
from paramserver.wire.messages import pack_mask, put_name
from paramserver.worker.gradients.contribution import PushFacts
from paramserver.worker.gradients.leaving import Leaving
from paramserver.worker.host import guest
from paramserver.worker.host.guest import Guest
from paramserver.worker.host.keeper import Keeper, PullInto
from paramserver.worker.host.reader import SLOTS
from paramserver.worker.host.sums import PushSum
from paramserver.worker.weights.pulled import Slot

if TYPE_CHECKING:  # a coordinator loads no torch
    from paramserver.worker.memory.inbox import Inbox

log = structlog.get_logger("paramserver.worker")

# Weights of fewer bytes are pulled by each worker: the way by another worker takes as long.
LEAST_BYTES = REST_BYTES
# How long a question waits for another worker to take the seat of one that has gone.
_SETTLE_S = 2.0
# After a failure this worker pulls by itself for so long; for twice as long after each further one, up to the most.
_PAUSE_S, _MOST_PAUSE_S = 10.0, 600.0
_AGAIN_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class _Hopeless(Exception):
    """Trying again is of no use."""


class HostTier:
    """Of one worker, on one timeline. Lives in the event loop, but for what belongs to the source of weights in place.

    ``name``: of the seat. ``pull``: pulls into memory. ``push``: brings a contribution to the servers. Run :meth:`run`
    beside other work; it never ends by itself.
    """

    def __init__(self, plan: Plan, name: str, pull: PullInto, push: PushSum) -> None:
        self.plan = plan
        self.arena: Arena = make_arena(plan.layout, PAGE)
        # By shard, the slots that the weights at hand lie in; empty if they are copied.
        self.reading: dict[int, Slot] = {}
        self._name, self._pull, self._push = name, pull, push
        self._loop = asyncio.get_running_loop()
        # In which the others of this host read contributions of this worker; None if no memory can be shared.
        self.inbox = _inbox(self.arena)
        # The slices that this worker will offer.
        self._share = HostShare()
        # Contributions to the present step that another worker has pushed, and those that are pushed once more.
        self._pushed: list[Leaving] = []
        self._again: set[asyncio.Task[None]] = set()
        self._role: Keeper | Guest | None = None
        self._changed = asyncio.Event()
        self._paused_until, self._pause_s = 0.0, _PAUSE_S
        # Why this host has no such worker.
        self._why_not = ""

    @property
    def shares(self) -> bool:
        """Whether this worker shares a pull with other workers of its host. From any thread."""
        role = self._role
        among = role.others > 0 if isinstance(role, Keeper) else role is not None
        return among and time.monotonic() >= self._paused_until

    @property
    def words(self) -> str:
        """This worker's part, as `status` shows it; empty: none."""
        role = self._role
        if isinstance(role, Keeper):
            others = role.others
            return f"pulls weights for {others} other worker{'s' * (others > 1)} of its host" if others else ""
        return "takes weights that another worker of its host pulls" if role is not None else self._why_not

    # ---- questions

    async def take(self, version: int) -> tuple[int, Slot] | None:
        """``version`` or a later one, and where it lies, once it does; None: this worker has to pull by itself."""
        while (role := await self._settled()) is not None:
            memory = role.memory
            reading = {slot.number for slot in list(self.reading.values()) if slot.memory is memory}
            found = await role.take(version, sorted(reading))
            if isinstance(found, Give):
                self._pause_s = _PAUSE_S
                return found.version, Slot(memory, found.slot)
            if found is not None:
                self.pause(found)
                return None
            if self._role is role:
                self._change(None)
        return None

    def pause(self, reason: str) -> None:
        """Pull by itself for a while, for this reason."""
        now = time.monotonic()
        if now >= self._paused_until:
            log.info(f"this worker pulls weights by itself for {self._pause_s:g} s", reason=reason)
            self._paused_until = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _MOST_PAUSE_S)

    async def _settled(self) -> Keeper | Guest | None:
        """This worker's part, after a moment if there is none just now."""
        if self._role is None:
            try:
                async with asyncio.timeout(_SETTLE_S):
                    while self._role is None:
                        await self._changed.wait()
            except TimeoutError:
                self.pause("no worker of this host pulls just now")
        return self._role

    # ---- contributions

    def expect(self, step: int, of: int, lo: int, hi: int, patience_s: float) -> None:
        """This worker is at ``step``, and will push contributions for its slices ``[lo, hi)``. From any thread."""
        share = HostShare(step=step, of=of, lo=lo, hi=hi, patience_s=patience_s)
        self._loop.call_soon_threadsafe(self._expect, share)

    def _expect(self, share: HostShare) -> None:
        self._share = share
        self._pushed = [one for one in self._pushed if _step(one) >= share.step]
        if self._role is not None:
            self._role.expect(share)

    async def offer(self, leaving: Leaving) -> bool:
        """Have a contribution added to those of this host, and wait until it counts. False: it has to be pushed."""
        role, facts, share = self._role, leaving.facts, self._share
        name = facts.name
        if role is None or not (self.shares and leaving.sealed and isinstance(name, SyncName) and _can_be_added(facts)):
            return False
        if (name.step, name.of) != (share.step, share.of) or not share.lo <= name.lo < name.hi <= share.hi:
            return False
        answer = await role.offer(self._header(facts))
        if isinstance(answer, str):
            self.pause(answer)
        counted = answer is True
        if counted and isinstance(role, Guest):
            if self._role is not role:  # which may have been gone before this contribution was kept
                return False
            self._pushed.append(leaving)
        return counted

    def _header(self, facts: PushFacts) -> shard_pb2.PushHeader:
        header = shard_pb2.PushHeader(
            samples=facts.samples,
            overflow=facts.overflow,
            base_version=facts.base_versions[0],
            advances=facts.advances,
            clip_norm=facts.clip_norm,
            used=pack_mask(facts.used, len(self.plan.layout.tensors)),
            groups=facts.groups,
        )
        put_name(header, facts.name)
        header.shared.slot = facts.slot or 0
        return header

    def _push_again(self) -> None:
        """The worker that has pushed for this one is gone: a server that dies, too, may have been the only one to know.

        What the servers have is a duplicate.
        """
        pushed, self._pushed = self._pushed, []
        for leaving in pushed:
            task = asyncio.ensure_future(self._by_itself(leaving))
            self._again.add(task)
            task.add_done_callback(self._again.discard)

    async def _by_itself(self, leaving: Leaving) -> None:
        with suppress(OSError, errors.ParamServerError):
            await self._push(leaving)

    # ---- who has the seat

    async def run(self) -> None:
        """Take the seat of this host, or connect to the worker that has it, again and again."""
        tries = 0
        try:
            while True:
                try:
                    role = await self._find()
                except _Hopeless as error:
                    self._say(str(error))
                    return
                except (OSError, ValueError) as error:
                    if not isinstance(error, ConnectionError | FileNotFoundError | BlockingIOError):
                        self._say(str(error))
                    await asyncio.sleep(_AGAIN_S[min(tries, len(_AGAIN_S) - 1)])
                    tries += 1
                    continue
                tries, self._why_not = 0, ""
                self._change(role)
                if isinstance(role, Keeper):
                    await asyncio.Event().wait()  # until this worker leaves
                else:
                    await role.lost()
                    self._change(None)
        finally:
            last, self._role = self._role, None
            for task in self._again:
                task.cancel()
            if last is not None:
                await last.close()
            if self.inbox is not None:
                self.inbox.memory.close()

    async def _find(self) -> Keeper | Guest:
        """Take the seat, or connect to the worker that has it. Raises _Hopeless where there can be none."""
        if self.inbox is None:
            raise _Hopeless("this system has no memory that can be shared")
        memory = self.arena.weights_bytes(SLOTS)
        return self._sit_down(self.inbox) or await guest.meet(self._name, memory, self.inbox.memory)

    def _sit_down(self, inbox: Inbox) -> Keeper | None:
        """Take the seat; None if another worker has it. Raises _Hopeless where there can be none."""
        try:
            taken = seat.take(self._name)
        except OSError as error:
            raise _Hopeless(f"no seat in cluster.meeting_dir: {error}") from error
        if taken is None:
            return None
        try:
            return Keeper(taken, self.plan, self.arena, inbox, self._pull, self._push)
        except OSError as error:
            taken.close()
            raise _Hopeless(f"no memory can be shared: {error}") from error

    def _say(self, reason: str) -> None:
        """This worker pulls by itself, for this reason; logged once."""
        if not self._why_not:
            log.warning("this worker does not share the pulls of its host", reason=reason)
        self._why_not = f"pulls weights by itself ({reason})"

    def _change(self, role: Keeper | Guest | None) -> None:
        self._role = role
        if role is None:
            self._changed.clear()
            self._push_again()
        else:
            self._changed.set()
            role.expect(self._share)

    # ---- the source of weights that are used in place

    def read_in_place(self) -> None:
        """See `InPlace`."""

    def chunks_in(self, shard: int, slot: Slot) -> dict[int, memoryview]:
        """The chunks of a shard that are trained, of the version in a slot."""
        found = {}
        for chunk in self.plan.chunks_of(shard):
            if chunk.kind is not Kind.FROZEN:
                start = self.arena.in_weights(chunk, slot.number)
                found[chunk.index] = slot.memory.view[start : start + chunk.nbytes]
        return found


def _inbox(arena: Arena) -> Inbox | None:
    from paramserver.worker.memory.inbox import Inbox

    try:
        return Inbox(arena) if available() else None
    except OSError:
        return None


def _can_be_added(facts: PushFacts) -> bool:
    """Whether others of this host can read the contribution, and its name says all about what it is."""
    return facts.by_data and not facts.encoded and facts.slot is not None and len(set(facts.base_versions)) == 1


def _step(leaving: Leaving) -> int:
    name = leaving.facts.name
    assert isinstance(name, SyncName), "others are not offered"
    return name.step


def name_of(secret: str, job: str, timeline: int, plan: Plan) -> str:
    """The seat of this host for a job, which only its members can find if they have a secret."""
    return seat.seat_name(secret, job, timeline, plan.layout.digest, plan.shards)
