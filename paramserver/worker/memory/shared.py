"""The memory that a worker shares with the servers on its host, on one timeline. Runs in the background loop.

The worker's contributions lie in its inbox, which servers map; the weights lie in files of the servers, which the
worker maps. What a server says goes over its channel as always, without the bytes.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

from paramserver.core.layout.arena import Arena, make_arena
from paramserver.core.layout.plan import Kind, Plan
from paramserver.transport.base import Channel, Neighbour
from paramserver.transport.direct import DirectLine
from paramserver.transport.shm.meeting import Meeting, host
from paramserver.transport.shm.segments import PAGE, Foreign, available
from paramserver.v1 import shard_pb2
from paramserver.worker.memory.inbox import Inbox
from paramserver.worker.weights.pulled import Slot


@dataclass(frozen=True, slots=True)
class Attached:
    """A server that shares memory: its number for this worker (a member of that time), its weights, the ways to it.

    ``main``: the channel over which this worker has attached. ``direct``: for the thread that trains.
    """

    number: int
    worker: int
    main: Channel
    weights: Foreign
    channel: Neighbour
    direct: DirectLine


class SharedMemory:
    """The inbox, and the servers that read it. Raises OSError where there is no memory that can be shared."""

    def __init__(self, plan: Plan) -> None:
        if not available():
            raise OSError("this system has no memory that can be shared")
        self.plan = plan
        self.arena: Arena = make_arena(plan.layout, PAGE)
        self.inbox = Inbox(self.arena)
        self._digest = plan.layout.digest
        self._attached: dict[int, Attached] = {}
        # By shard: as which member, and over which channel, its server was last asked to share memory.
        self._asked: dict[int, tuple[int, Channel]] = {}
        # By shard, the slots that the weights at hand lie in; empty if they are copied.
        self.reading: dict[int, Slot] = {}
        # False: the weights are read where they are.
        self.copies = True

    # ---- attaching

    async def attach(self, shard: int, channel: Channel, job: str, timeline: int, worker: int, timeout_s: float) -> str:
        """Exchange memory with a server. Returns an empty string, or why the server is not on this host, in words.

        Raises what the call raises.
        """
        await self.lost(shard)
        try:
            meeting = Meeting()
        except OSError as error:
            return f"no place to meet: {error}"
        try:
            request = shard_pb2.AttachRequest(
                job=job,
                timeline=timeline,
                worker=worker,
                layout_digest=self._digest,
                meeting=meeting.name,
                inbox_bytes=self.inbox.memory.nbytes,
                host=host(),
            )
            reply = cast(shard_pb2.AttachResponse, await channel.call("Shard.Attach", request, timeout=timeout_s))
            self._asked[shard] = worker, channel
            if not reply.attachment:
                return reply.refusal
            weights_fd, line_fd, direct_fd = meeting.swap(self.inbox.memory.reading_fd, take=3)
            with ExitStack() as unless_well:
                line = unless_well.enter_context(socket.socket(fileno=line_fd))
                direct = unless_well.enter_context(socket.socket(fileno=direct_fd))
                weights = self._known(shard, Foreign(weights_fd, reply.weights_bytes))
                if (reply.weights_bytes - self.arena.frozen_bytes) % self.arena.slot_bytes:
                    return "it lays its memory out differently"
                unless_well.pop_all()
        except (OSError, ValueError) as error:
            return f"no memory could be exchanged with it: {error}"
        finally:
            meeting.close()
        ways = channel.beside(line), DirectLine(direct)
        self._attached[shard] = Attached(reply.attachment, worker, channel, weights, *ways)
        return ""

    def _known(self, shard: int, weights: Foreign) -> Foreign:
        """The memory that the weights at hand lie in, if ``weights`` is the same file: the server is the same one."""
        slot = self.reading.get(shard)
        same = slot is not None and os.path.sameopenfile(slot.memory.fd, weights.fd)
        return slot.memory if slot is not None and same else weights

    def attached(self, shard: int, worker: int, channel: Channel) -> Attached | None:
        """The server at the end of ``channel``, if it shares memory with this worker under this member number."""
        found = self._attached.get(shard)
        return found if found is not None and (found.worker, found.main) == (worker, channel) else None

    def outdated(self, shard: int, worker: int, channel: Channel) -> bool:
        """Whether this server has not been asked yet to share memory with this worker under this member number."""
        return self._asked.get(shard) != (worker, channel)

    async def lost(self, shard: int) -> None:
        """The server shares no memory with this worker any more."""
        former = self._attached.pop(shard, None)
        if former is not None:
            await _hang_up(former)

    @property
    def shards(self) -> frozenset[int]:
        """The servers that share memory with this worker."""
        return frozenset(self._attached)

    # ---- reading

    def read_in_place(self) -> None:
        """From now on the weights are read where they are, and not copied."""
        self.copies = False

    def question(self, shard: int, attached: Attached) -> shard_pb2.SharedPull:
        """The part of a pull about shared memory. A server does not hear of slots of a former server of the shard."""
        slot = self.reading.get(shard)
        reading = [slot.number] if slot is not None and slot.memory is attached.weights else []
        return shard_pb2.SharedPull(attachment=attached.number, reading=reading)

    def chunks(self, shard: int, slot: Slot, frozen: bool) -> dict[int, memoryview]:
        """The chunks of a version that lies in a slot, if they have to be copied. ``frozen``: also frozen chunks."""
        return self.chunks_in(shard, slot, frozen) if self.copies else {}

    def chunks_in(self, shard: int, slot: Slot, frozen: bool = False) -> dict[int, memoryview]:
        """The chunks of a version that lies in a slot. ``frozen``: also frozen chunks."""
        found = {}
        for chunk in self.plan.chunks_of(shard):
            if frozen or chunk.kind is not Kind.FROZEN:
                start = self.arena.in_weights(chunk, slot.number)
                found[chunk.index] = slot.memory.view[start : start + chunk.nbytes]
        return found

    async def close(self) -> None:
        """Share nothing any more; memory that is mapped stays until no tensor uses it."""
        for attached in self._attached.values():
            await _hang_up(attached)
        self.inbox.memory.close()


async def _hang_up(attached: Attached) -> None:
    attached.direct.close()
    await attached.channel.close()
