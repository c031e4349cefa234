"""Messages to backups: the content of the next version, and chunks as they are. Backups read contents with it, too."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING

from paramserver.core.layout.plan import Chunk
from paramserver.core.shards.shard import ShardState
from paramserver.errors import ProtocolError
from paramserver.server.arithmetic.hypers import Hyperparameters
from paramserver.server.arithmetic.state import StateEntry
from paramserver.server.replicas.facts import clocks_to_proto, facts_to_proto
from paramserver.server.replicas.parcels import CatchUpParcel
from paramserver.server.versions.shard import Contribution, ShardTensors, leading, used_by
from paramserver.server.versions.version import Version
from paramserver.tensors.hypers import groups_to_proto
from paramserver.v1 import shard_pb2
from paramserver.wire.messages import consistency_to_proto, name_from_proto, pack_mask, put_name, unpack_mask

if TYPE_CHECKING:
    from torch import Tensor


def forward_header(
    job: str, state: ShardState, contributions: Sequence[Contribution], tensors: int
) -> shard_pb2.ForwardHeader:
    """The header for the version in the making. ``contributions``: those it is made of, in order.

    ``tensors``: the number of tensors of the model.
    """
    parts = []
    for part, one in zip(state.parts(), contributions, strict=True):
        message = shard_pb2.ContributionRef(worker=part.worker, nonce=one.nonce, filler=part.filler)
        put_name(message, part.name)
        parts.append(message)
    samples = sum(one.samples for one in contributions)
    overflow = any(one.overflow for one in contributions)
    leader = leading(contributions)
    used = frozenset[int]() if overflow or not samples else used_by(contributions)
    return shard_pb2.ForwardHeader(
        job=job,
        timeline=state.timeline,
        version=state.version,
        parts=parts,
        samples=samples,
        overflow=overflow,
        used=pack_mask(used, tensors),
        groups=groups_to_proto(leader.groups),
        advances=leader.advances,
        clocks=clocks_to_proto(state.clocks_then()),
        min_clock=state.pulls.floor,
        consistency=consistency_to_proto(state.consistency),
    )


def used_in(header: shard_pb2.ForwardHeader, tensors: ShardTensors) -> frozenset[int]:
    """The tensors that a content has numbers for. Raises ProtocolError."""
    return unpack_mask(header.used, len(tensors.layout.tensors))


def contribution(
    header: shard_pb2.ForwardHeader, chunks: Mapping[int, Tensor], used: frozenset[int], hypers: Hyperparameters
) -> Contribution:
    """The sum that the primary has made, as one contribution. Raises ProtocolError."""
    if not header.parts:
        raise ProtocolError("a version that is made of nothing")
    return Contribution(
        name=name_from_proto(header.parts[0]),
        worker=header.parts[0].worker,
        samples=header.samples,
        overflow=header.overflow,
        base_version=header.version,
        used=used,
        groups=hypers.of(header.groups),
        chunks=chunks,
        advances=header.advances,
        combined=True,
    )


def catch_up_parcel(
    job: str,
    state: ShardState,
    tensors: ShardTensors,
    version: Version,
    chunks: Sequence[Chunk],
    states: Awaitable[list[StateEntry]],
    names: Mapping[int, str] | None,
) -> CatchUpParcel:
    """These chunks as they are in ``version``, the newest one. ``names`` of workers: with the last chunks only."""
    header = shard_pb2.CatchUpHeader(job=job, timeline=state.timeline, version=version.number)
    if names is not None:
        header.facts.CopyFrom(facts_to_proto(state, tensors, names))
    weights: dict[int, Tensor] = {chunk.index: version.tensors[chunk.index] for chunk in chunks}
    return CatchUpParcel(header, chunks, weights, states, version)
