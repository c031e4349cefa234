"""One shard as one of several copies: a primary with its backups, or a backup that may be promoted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import structlog

from paramserver import errors
from paramserver.core.layout.plan import Chunk, Plan
from paramserver.core.shards.shard import ShardState
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.core.versions.events import Activated, Event, Forwarded, Part, Promoted
from paramserver.failpoints import reach
from paramserver.server.arithmetic.norms import NormExchange
from paramserver.server.arithmetic.thread import ArithmeticThread
from paramserver.server.replicas.backups import Backups
from paramserver.server.replicas.content import catch_up_parcel, forward_header
from paramserver.server.replicas.facts import Beside
from paramserver.server.replicas.following import Following
from paramserver.server.replicas.lent import Lent
from paramserver.server.replicas.outbox import Content, Outbox
from paramserver.server.replicas.parcels import CatchUpParcel
from paramserver.server.saving.saver import Saver
from paramserver.server.versions.drafting import Draft, Drafting
from paramserver.server.versions.repetitions import Repetitions
from paramserver.server.versions.shard import Contribution, ShardTensors
from paramserver.server.versions.version import Version
from paramserver.transport.base import Channel
from paramserver.v1 import shard_pb2
from paramserver.wire.messages import consistency_from_proto, name_from_proto, pack_mask

if TYPE_CHECKING:
    from torch import Tensor

    from paramserver.checkpoint.contents import ShardFacts

log = structlog.get_logger("paramserver.server")


class _Shard(Protocol):
    """See `server.running`."""

    config: shard_pb2.ConfigureRequest
    plan: Plan
    state: ShardState
    tensors: ShardTensors
    norms: NormExchange
    saver: Saver | None
    names: dict[int, str]
    versions: dict[int, Version]
    repetitions: Repetitions
    drafting: Drafting
    thread: ArithmeticThread

    @property
    def chunks(self) -> Mapping[int, Chunk]: ...

    @property
    def making(self) -> bool: ...

    def begin_with(self, facts: ShardFacts) -> None: ...

    def have(self, contribution: Contribution) -> int: ...

    def copy(self, version: Version, hurry: bool = True) -> bool: ...

    def happen(self, event: Event) -> None: ...

    def end(self, error: errors.ParamServerError) -> None: ...


class Copies:
    """The part of a shard that knows of its other copies. ``connect`` opens a channel to a backup.

    ``wait_s``: the longest wait for a backup. ``told`` is called when a backup has all of the shard. ``shares``:
    backups on this host may read this process's memory.
    """

    def __init__(
        self,
        shard: _Shard,
        connect: Callable[[str], Channel],
        wait_s: float,
        told: Callable[[], None],
        shares: bool,
    ) -> None:
        self._shard = shard
        # The number of the placement that the coordinator told last.
        self.placement = 0
        outbox = Outbox(shard.plan, shard.config.shard) if shares else None
        self.backups = Backups(self, connect, wait_s, self._replaced, told, outbox)
        # Of a backup: the memory of its primary, if that is on this host.
        self.lent: Lent | None = None
        # Of a backup: the version and the number of the draft that its primary sends ahead, and its chunks.
        self.ahead: tuple[int, int, dict[int, Tensor]] = 0, 0, {}
        # Of a backup: what there is while it catches up; whether it is to be the primary.
        self.following, self.promoted = Following(shard), False

    def placed(self, request: shard_pb2.SetHoldersRequest) -> None:
        """The coordinator has said which servers hold the shards."""
        shard = self._shard
        self.placement = request.placement
        shard.norms.configure(shard.config.shard, request.peers)
        if shard.saver is not None:
            shard.saver.meet(request.peers)
        if request.primary:
            places = [(place.address, place.since) for place in request.backups]
            whole = {(place.address, place.since) for place in request.backups if place.whole}
            self.backups.tell(request.placement, places, request.repair_mbps, whole)

    async def close(self) -> None:
        """Send nothing any more."""
        await self.backups.close()
        self.borrow(None)

    # ---- a primary

    @property
    def job(self) -> str:
        """The name of the job."""
        return self._shard.config.job

    @property
    def timeline(self) -> int:
        """The timeline of the shard."""
        return self._shard.config.timeline

    @property
    def chunks(self) -> Mapping[int, Chunk]:
        """All chunks of the shard."""
        return self._shard.chunks

    @property
    def making(self) -> bool:
        """Whether a version is being made."""
        return self._shard.making

    def catch_up(self, chunks: Sequence[Chunk], last: bool) -> CatchUpParcel:
        """These chunks as they are now, for a backup; ``last``: and all facts beside the tensors."""
        shard = self._shard
        version, indices = shard.versions[shard.state.version], [chunk.index for chunk in chunks]
        states = shard.thread(lambda: shard.tensors.copied(indices))
        names = shard.names if last else None
        return catch_up_parcel(shard.config.job, shard.state, shard.tensors, version, chunks, states, names)

    def content(self, version: int) -> Content | None:
        """Memory for what the version after ``version`` is made of; None if there are no backups."""
        return self.backups.content(version) if self.backups.follow else None

    def header(self, contributions: Sequence[Contribution]) -> shard_pb2.ForwardHeader | None:
        """The message that tells backups about the version in the making; None if there are no backups."""
        shard = self._shard
        if not self.backups.follow:
            return None
        return forward_header(shard.config.job, shard.state, contributions, len(shard.tensors.layout.tensors))

    def drafted(self, draft: Draft) -> None:
        """A draft has begun: what its chunks are made of goes to the backups as they are made."""
        shard = self._shard
        if draft.content is not None:
            used = pack_mask(draft.making.used, len(shard.tensors.layout.tensors))
            header = shard_pb2.ForwardHeader(
                job=self.job, timeline=self.timeline, version=shard.state.version, used=used, draft=draft.number
            )
            self.backups.ahead(header, draft, shard.drafting)

    async def hold(self, header: shard_pb2.ForwardHeader, content: Content) -> None:
        """Return when all backups hold what the version in the making is made of."""
        reach("forward.before", header.version)
        await self.backups.forward(header, content)

    def _replaced(self, reason: str) -> None:
        """Another server is the primary: nothing more is published here."""
        log.warning("this server is not the primary of a shard any more", shard=self._shard.config.shard)
        self._shard.end(errors.UnavailableError(reason))

    # ---- a backup

    def borrow(self, lent: Lent | None) -> None:
        """From now on the primary's contents of versions may lie in this memory, and in no other."""
        former, self.lent = self.lent, lent
        if former is not None:
            former.close()

    def caught_up(self, beside: Beside) -> None:
        """This backup has all of the shard: from now on it makes the versions of its primary as a shard does."""
        shard, version = self._shard, self.following.version
        assert version is not None, "all chunks have come"
        shard.begin_with(beside.facts)
        counters = shard.state.counters
        counters.applied_before, counters.duplicate = beside.applied_before, beside.duplicate
        version.ever_used = shard.tensors.ever_used
        shard.versions[version.number] = version
        shard.happen(Activated(shard.config.timeline, version.number))
        shard.state.begin_beside(beside.consistency, beside.clocks, beside.floor, version.number, beside.mark)
        self.following.version = None  # its weights are to go when the shard drops that version

    def follow(self, header: shard_pb2.ForwardHeader, made_of: Contribution) -> None:
        """The primary has decided what the next version is made of. For a backup that has all of the shard."""
        parts = tuple(Part(name_from_proto(part), part.worker, part.filler) for part in header.parts)
        for part, ref in zip(parts, header.parts, strict=True):
            self._shard.repetitions.note(part.name, ref.nonce)
        clocks = {clock.worker: clock.clock for clock in header.clocks}
        setting = consistency_from_proto(header.consistency)
        buffer = self._shard.have(made_of)
        self._shard.happen(Forwarded(header.version, buffer, parts, setting, clocks, header.min_clock))

    def promote(self, agreed: Consistency) -> None:
        """Become the primary when all versions are made that the former primary has decided.

        ``agreed``: the newest setting that all shards have agreed on.
        """
        self.promoted = True
        if self._shard.saver is not None:
            self._shard.saver.begin_at(self._shard.state.next_forwarded)
        self._shard.happen(Promoted(agreed))
        self.published()

    def published(self) -> None:
        """A version is published. If a promoted backup begins with it, a checkpoint of it may be due."""
        shard, version = self._shard, self._shard.state.version
        if not self.promoted or shard.state.backup or shard.saver is None:
            return
        if shard.state.consistency.mode is Mode.SYNC and shard.saver.due(version):
            shard.copy(shard.versions[version])
