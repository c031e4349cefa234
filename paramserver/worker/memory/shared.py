"""The memory that a worker shares with the servers on its host, on one timeline. Runs in the background loop.

The worker's contributions lie in its inbox, which servers map; the weights lie in files of the servers, which the
worker maps. What a server says goes over its channel as always, without the bytes.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

from paramserver.core.layout.arena import Arena, make_arena
from paramserver.core.layout.plan import Kind, Plan
from paramserver.transport.base import Channel, Neighbour
from paramserver.transport.direct import DirectLine
from paramserver.transport.shm.meeting import Meeting
from paramserver.transport.shm.segments import PAGE, Foreign, available
from paramserver.v1 import shard_pb2
from paramserver.worker.memory.inbox import Inbox


@dataclass(frozen=True, slots=True)
class Attached:
    """A server that shares memory: its number for this worker (a member of that time), its weights, the ways to it.

    ``direct``: for the thread that trains.
    """

    number: int
    worker: int
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
        # By shard, the slots that the weights at hand lie in; empty if they are copied.
        self.reading: dict[int, int] = {}
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
            return f"no place to meet servers of this host: {error}"
        try:
            request = shard_pb2.AttachRequest(
                job=job,
                timeline=timeline,
                worker=worker,
                layout_digest=self._digest,
                meeting=meeting.name,
                inbox_bytes=self.inbox.memory.nbytes,
            )
            reply = cast(shard_pb2.AttachResponse, await channel.call("Shard.Attach", request, timeout=timeout_s))
            if not reply.attachment:
                return reply.refusal
            weights_fd, line_fd, direct_fd = meeting.swap(self.inbox.memory.reading_fd, take=3)
            with ExitStack() as unless_well:
                line = unless_well.enter_context(socket.socket(fileno=line_fd))
                direct = unless_well.enter_context(socket.socket(fileno=direct_fd))
                weights = Foreign(weights_fd, reply.weights_bytes)
                if (reply.weights_bytes - self.arena.frozen_bytes) % self.arena.slot_bytes:
                    return "it lays its memory out differently"
                unless_well.pop_all()
        except (OSError, ValueError) as error:
            return f"no memory could be exchanged with it: {error}"
        finally:
            meeting.close()
        self._attached[shard] = Attached(reply.attachment, worker, weights, channel.beside(line), DirectLine(direct))
        return ""

    def attached(self, shard: int, worker: int) -> Attached | None:
        """The server, if it shares memory with this worker under the present member number."""
        found = self._attached.get(shard)
        return found if found is not None and found.worker == worker else None

    def outdated(self, shard: int, worker: int) -> bool:
        """Whether the server shares memory with this worker under an earlier member number only."""
        found = self._attached.get(shard)
        return found is not None and found.worker != worker

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

    def question(self, shard: int, worker: int) -> shard_pb2.SharedPull | None:
        """The part of a pull about shared memory; None: the server has to send the bytes."""
        attached = self.attached(shard, worker)
        if attached is None:
            return None
        reading = [self.reading[shard]] if shard in self.reading else []
        return shard_pb2.SharedPull(attachment=attached.number, reading=reading)

    def chunks(self, shard: int, slot: int, frozen: bool) -> dict[int, memoryview]:
        """The chunks of a version that lies in a slot, if they have to be copied. ``frozen``: also frozen chunks."""
        return self.chunks_in(shard, slot, frozen) if self.copies else {}

    def chunks_in(self, shard: int, slot: int, frozen: bool = False) -> dict[int, memoryview]:
        """The chunks of a version that lies in a slot. ``frozen``: also frozen chunks."""
        weights = self._attached[shard].weights
        found = {}
        for chunk in self.plan.chunks_of(shard):
            if frozen or chunk.kind is not Kind.FROZEN:
                start = self.arena.in_weights(chunk, slot)
                found[chunk.index] = weights.view[start : start + chunk.nbytes]
        return found

    def file(self, shard: int) -> int:
        """The descriptor of a server's weights."""
        return self._attached[shard].weights.fd

    async def close(self) -> None:
        """Share nothing any more; memory that is mapped stays until no tensor uses it."""
        for attached in self._attached.values():
            await _hang_up(attached)
        self.inbox.memory.close()


async def _hang_up(attached: Attached) -> None:
    attached.direct.close()
    await attached.channel.close()
