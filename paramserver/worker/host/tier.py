"""A worker's part in the one pull of its host: it pulls for the other workers there, or takes weights from one of them.

Who has the seat of the host pulls (`transport/shm/seat.py`). When that process ends, the kernel gives the seat back,
and another worker takes it. Only the bytes of weights go this way. Each worker asks the servers itself which version
there is, and pulls by itself whenever the other way fails.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from paramserver.core.layout.arena import Arena, make_arena
from paramserver.core.layout.host_weights import Give
from paramserver.core.layout.plan import Kind, Plan
from paramserver.core.layout.thresholds import REST_BYTES
from paramserver.transport.shm import seat
from paramserver.transport.shm.segments import PAGE, available
from paramserver.worker.host import guest
from paramserver.worker.host.guest import Guest
from paramserver.worker.host.keeper import SLOTS, Keeper, PullInto
from paramserver.worker.weights.pulled import Slot

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

    ``name``: of the seat. ``pull``: pulls into memory. Run :meth:`run` beside other work; it never ends by itself.
    """

    def __init__(self, plan: Plan, name: str, pull: PullInto) -> None:
        self.plan = plan
        self.arena: Arena = make_arena(plan.layout, PAGE)
        # By shard, the slots that the weights at hand lie in; empty if they are copied.
        self.reading: dict[int, Slot] = {}
        self._name, self._pull = name, pull
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

    # ---- who pulls

    async def run(self) -> None:
        """Take the seat of this host, or connect to the worker that has it, again and again."""
        tries = 0
        try:
            while True:
                try:
                    role = self._sit_down() or await guest.meet(self._name, self.arena.weights_bytes(SLOTS))
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
            if last is not None:
                await last.close()

    def _sit_down(self) -> Keeper | None:
        """Take the seat; None if another worker has it. Raises _Hopeless where there can be none."""
        if not available():
            raise _Hopeless("this system has no memory that can be shared")
        try:
            taken = seat.take(self._name)
        except OSError as error:
            raise _Hopeless(f"no seat in cluster.meeting_dir: {error}") from error
        if taken is None:
            return None
        try:
            return Keeper(taken, self.plan, self.arena, self._pull)
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
        else:
            self._changed.set()

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


def name_of(secret: str, job: str, timeline: int, plan: Plan) -> str:
    """The seat of this host for a job, which only its members can find if they have a secret."""
    return seat.seat_name(secret, job, timeline, plan.layout.digest, plan.shards)
