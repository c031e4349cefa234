"""Calls about the copies of a shard: of the coordinator, which says who holds it, and of the primary to a backup."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping

import structlog
from torch import Tensor

from paramserver import errors
from paramserver.core.layout.plan import Chunk
from paramserver.failpoints import reach
from paramserver.frames import AnyFrame
from paramserver.server.arithmetic.state import State
from paramserver.server.replicas.content import contribution, used_in
from paramserver.server.replicas.facts import facts_from_proto
from paramserver.server.replicas.lent import Lent
from paramserver.server.rpc.host import Host
from paramserver.server.running import RunningShard
from paramserver.server.saving.brought import BroughtState
from paramserver.server.versions.receive import receive
from paramserver.server.versions.version import room_for
from paramserver.transport.base import Caller, caller
from paramserver.transport.security.policy import SERVER
from paramserver.transport.shm import channel as local
from paramserver.transport.shm.meeting import refused, unseen
from paramserver.transport.shm.segments import available
from paramserver.v1 import shard_pb2
from paramserver.wire.messages import consistency_from_proto

log = structlog.get_logger("paramserver.server")

_REPLACED = "this server is not the primary of the shard any more"
_A_SERVER = Caller(frozenset({SERVER}), admin=False)


class Replicas:
    """The shard as one of several copies. ``service`` answers the calls of a primary on this host."""

    def __init__(self, host: Host, service: object) -> None:
        self._host, self._service = host, service
        # Messages of a primary are taken in one after the other.
        self._turn = asyncio.Lock()

    async def set_holders(self, request: shard_pb2.SetHoldersRequest) -> shard_pb2.SetHoldersResponse:
        """Learn which servers hold this shard. A backup that is named as the primary is promoted.

        Raises UnavailableError if the backup does not have all of the shard.
        """
        self._host.process.check_authority(request)
        shard = self._host.ready(active=False, primary=False)
        if request.timeline != shard.config.timeline:
            raise errors.FencedError(f"this server is on timeline {shard.config.timeline}, not {request.timeline}")
        if request.placement < shard.copies.placement:
            return shard_pb2.SetHoldersResponse(version=shard.state.version)
        if request.primary and shard.state.backup:
            if not shard.state.active:
                raise errors.UnavailableError("this backup does not have all of the shard")
            reach("promote.before", shard.state.version)
            # From now on it takes nothing from the former primary.
            shard.copies.promote(consistency_from_proto(request.consistency))
            reach("promote.after", shard.state.version)
            log.warning("this backup becomes the primary", shard=shard.config.shard, version=shard.state.version)
        shard.copies.placed(request)
        return shard_pb2.SetHoldersResponse(version=shard.state.version)

    async def lend(self, request: shard_pb2.LendRequest) -> shard_pb2.LendResponse:
        """Read what versions are made of in the primary's memory from now on; the answer says why if that cannot be."""
        shard = self._backup()
        self._check(shard, request.job, request.timeline, request.placement)
        if request.layout_digest != shard.digest:
            raise errors.ProtocolError("this shard holds another model")
        if not available():
            return shard_pb2.LendResponse(refusal="this system has no memory that can be shared")
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                lent = Lent(shard.plan, request, theirs.fileno())
        except FileNotFoundError:
            ours.close()
            return shard_pb2.LendResponse(refusal=unseen(request.host))
        except (OSError, ValueError) as error:
            ours.close()
            return shard_pb2.LendResponse(refusal=refused(error))
        shard.copies.borrow(lent)
        lent.line = await local.serve(ours, [("Shard", self._service)], caller() or _A_SERVER)
        if shard.copies.lent is not lent:
            lent.line.close()
        return shard_pb2.LendResponse()

    async def forward(self, frames: AsyncIterator[AnyFrame]) -> shard_pb2.ForwardResponse:
        """Take in what the next version is made of. It may be repeated.

        The answer says that all of it is here, and that nothing older is needed any more.
        """
        shard = self._backup()

        def expect(header: shard_pb2.FrameHeader) -> tuple[Mapping[int, Chunk], int]:
            self._check(shard, header.forward.job, header.forward.timeline, header.forward.placement)
            if header.forward.HasField("shared"):
                raise errors.ProtocolError("a content that lies in lent memory comes with Shard.ForwardLent")
            _fits(shard, header.forward.version)
            return shard.tensors.chunks_used(used_in(header.forward, shard.tensors)), header.forward.chunks

        upload = await receive(frames, "forward", expect, open_end=True)
        return await self._follow(shard, upload.header.forward, upload.chunks)

    async def forward_lent(self, header: shard_pb2.ForwardHeader) -> shard_pb2.ForwardResponse:
        """The same for a content in memory that the primary has lent."""
        shard = self._backup()
        if not header.HasField("shared") or header.ahead:
            raise errors.ProtocolError("a content that does not lie in lent memory comes with Shard.Forward")
        self._check(shard, header.job, header.timeline, header.placement)
        _fits(shard, header.version)
        return await self._follow(shard, header, {})

    async def made_lent(self, request: shard_pb2.MadeLentRequest) -> shard_pb2.MadeLentResponse:
        """Answer when this version is made, so that nothing is read in lent memory any more.

        Raises GoneError if the backup was not told what the version is made of.
        """
        shard = self._backup()
        self._check(shard, request.job, request.timeline, request.placement)
        while _makes(shard, request.version):
            await shard.moved()
            self._check(shard, request.job, request.timeline, request.placement)
        if shard.state.active and shard.state.version < request.version:
            raise errors.GoneError(f"this backup has version {shard.state.version}, and not version {request.version}")
        return shard_pb2.MadeLentResponse()

    async def _follow(
        self, shard: RunningShard, header: shard_pb2.ForwardHeader, came: dict[int, Tensor]
    ) -> shard_pb2.ForwardResponse:
        used = used_in(header, shard.tensors)
        async with self._turn:
            self._check(shard, header.job, header.timeline, header.placement)
            if header.ahead:
                shard.copies.ahead = header.version, header.draft, came
                return shard_pb2.ForwardResponse()
            while _makes(shard, header.version):  # then it reads nothing older
                await shard.moved()
                self._check(shard, header.job, header.timeline, header.placement)
            reach("forward.received", header.version)
            if _fits(shard, header.version):
                chunks = _all_of(shard, header, used, came)
                if chunks is None:
                    return shard_pb2.ForwardResponse(unreadable=True)
                shard.copies.ahead = 0, 0, {}
                made_of = contribution(header, chunks, used, shard.hypers)
                if shard.state.active:
                    shard.copies.follow(header, made_of)
                else:
                    await shard.arithmetic(lambda: shard.copies.following.make(made_of))
        return shard_pb2.ForwardResponse()

    async def catch_up(self, frames: AsyncIterator[AnyFrame]) -> shard_pb2.CatchUpResponse:
        """Take in chunks as they are in one version; with the last ones the backup has all of the shard."""
        shard = self._backup()
        brought = BroughtState(shard.tensors, trusted=True)
        room: dict[int, Tensor] = {}

        def expect(header: shard_pb2.FrameHeader) -> tuple[Mapping[int, Chunk], int]:
            message = header.catch_up
            self._check(shard, message.job, message.timeline, message.placement)
            if not (shard.state.active or message.first):
                shard.copies.following.here(message.version)
            return shard.chunks, message.chunks

        def keep(chunk: Chunk, values: Tensor) -> Tensor:
            room.update(room_for([chunk]))
            return room[chunk.index].copy_(values)

        async with self._turn:
            upload = await receive(frames, "catch_up", expect, keep, state=brought.take, some=True)
            header = upload.header.catch_up
            self._check(shard, header.job, header.timeline, header.placement)
            reach("catch_up.received", header.version)
            if shard.state.active:  # the answer to the last message was lost
                return shard_pb2.CatchUpResponse()
            if header.first:
                shard.copies.following.begin(header.version)
            shard.copies.following.here(header.version)

            def load() -> Mapping[int, State]:
                return brought.load(header.states, shard.hypers.first, upload.chunks)

            shard.copies.following.take(upload.chunks, await shard.arithmetic(load))
            if header.HasField("facts"):
                if missing := shard.copies.following.lacks():
                    raise errors.ProtocolError(f"the last chunks have come, but chunk {missing[0]} is missing")
                shard.copies.caught_up(facts_from_proto(header.facts, len(shard.tensors.layout.tensors)))
                log.info("this backup has all of its shard", shard=shard.config.shard, version=header.version)
        return shard_pb2.CatchUpResponse()

    def _backup(self) -> RunningShard:
        shard = self._host.ready(active=False, primary=False)
        if not shard.state.backup:
            raise errors.FencedError(_REPLACED)
        return shard

    def _check(self, shard: RunningShard, job: str, timeline: int, placement: int) -> None:
        """Refuse a sender that is not the primary of the shard any more."""
        self._host.process.check_job(job)
        if self._host.shard is not shard:
            raise errors.UnavailableError("this backup has begun anew: try again")
        if timeline != shard.config.timeline:
            raise errors.FencedError(f"this server is on timeline {shard.config.timeline}, not {timeline}")
        if not shard.state.backup or shard.copies.promoted or placement < shard.copies.placement:
            raise errors.FencedError(_REPLACED)


def _fits(shard: RunningShard, version: int) -> bool:
    """Whether the backup needs what comes after ``version``; False: it has that already.

    Raises GoneError if the backup has not come as far as that version.
    """
    if not shard.state.active:
        there = shard.copies.following.version
        if there is None or version >= there.number:
            shard.copies.following.here(version)
            return True
        return False
    if version > shard.state.next_forwarded:
        raise errors.GoneError(f"this backup has version {shard.state.next_forwarded}, and not version {version}")
    return version == shard.state.next_forwarded


def _makes(shard: RunningShard, version: int) -> bool:
    """Whether the backup has not made ``version`` yet, but will, out of what it holds."""
    return shard.state.active and shard.state.version < version <= shard.state.next_forwarded


def _all_of(
    shard: RunningShard, header: shard_pb2.ForwardHeader, used: frozenset[int], came: Mapping[int, Tensor]
) -> Mapping[int, Tensor] | None:
    """All chunks of a content: those that ``came``, and those of its draft; None if some are not there.

    Raises ProtocolError if chunks are missing that were not sent before.
    """
    wanted = shard.tensors.chunks_used(used)
    if header.HasField("shared"):
        return _in_memory(shard, header.shared, wanted)
    version, draft, chunks = shard.copies.ahead
    there = chunks if header.draft and (version, draft) == (header.version, header.draft) else {}
    found = {
        index: came[index] if index in came else there[index] for index in wanted if index in came or index in there
    }
    if len(found) == len(wanted):
        return found
    if header.draft:
        return None
    missing = next(index for index in wanted if index not in found)
    raise errors.ProtocolError(
        f"{len(wanted) - len(found)} of {len(wanted)} chunks are missing, the first is {missing}"
    )


def _in_memory(
    shard: RunningShard, shared: shard_pb2.SharedForward, wanted: Mapping[int, Chunk]
) -> Mapping[int, Tensor] | None:
    """The chunks that the primary has put into shared memory; None if they cannot be read."""
    lent = shard.copies.lent
    if lent is None or lent.meeting != shared.meeting:
        return None
    try:
        return lent.chunks(wanted)
    except (OSError, ValueError) as error:
        log.info("the memory of the primary cannot be read", shard=shard.config.shard, reason=str(error))
        shard.copies.borrow(None)
        return None
