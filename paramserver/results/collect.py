"""The weights and the optimizer state of a job that ends, gathered from its servers; their digests, and a file.

Gathering works on raw bytes and does not need torch.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paramserver import errors
from paramserver.core.layout.naming import plain_name
from paramserver.core.layout.plan import Kind, Layout
from paramserver.core.versions.events import Latest
from paramserver.tensors.codec import split_frame
from paramserver.tensors.dtypes import itemsize
from paramserver.transport.base import Channel
from paramserver.v1 import shard_pb2, types_pb2
from paramserver.wire.messages import plan_of
from paramserver.worker.links import ShardLinks
from paramserver.worker.links.cuts import same
from paramserver.worker.links.pulls import Pull
from paramserver.worker.links.targets import Targets
from paramserver.worker.weights.pulled import merge

_TIMEOUT_S = 600.0
_SETTLE_S = 5.0
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Result:
    """The state of all shards at one version.

    ``tensors``: raw bytes of every tensor in the master type, in the order of the layout. ``states``: by tensor index
    and key (sorted), the raw bytes of the optimizer state.
    """

    version: int
    layout: Layout
    tensors: list[bytes]
    states: dict[tuple[int, str], bytes]

    def weights_sha256(self) -> str:
        """Digest of all parameters, frozen ones included, in the model's order."""
        return self._digest(Kind.PARAMETER, Kind.FROZEN)

    def buffers_sha256(self) -> str:
        """Digest of all buffers, in the model's order."""
        return self._digest(Kind.BUFFER)

    def optimizer_sha256(self) -> str:
        """Digest of the optimizer state: by parameter in the model's order, then by key."""
        digest = hashlib.sha256()
        for key in sorted(self.states):
            digest.update(self.states[key])
        return digest.hexdigest()

    def _digest(self, *kinds: Kind) -> str:
        digest = hashlib.sha256()
        for spec, data in zip(self.layout.tensors, self.tensors, strict=True):
            if spec.kind in kinds:
                digest.update(data)
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write a safetensors file that ``model.load_state_dict`` takes: every name, tied ones too, in its types.

        Raises UserError if the file cannot be written.
        """
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        from paramserver.tensors.dtypes import in_model_type, torch_dtype

        state: dict[str, torch.Tensor] = {}
        for placement, spec, data in zip(self.layout.placements, self.layout.tensors, self.tensors, strict=True):
            if not spec.persistent:
                continue
            master = torch_dtype(self.layout.segments[placement.segment].dtype)
            flat = torch.frombuffer(bytearray(data), dtype=master) if data else torch.empty(0, dtype=master)
            values = in_model_type(flat, torch_dtype(spec.dtype)).view(spec.shape)
            for name in (spec.name, *spec.aliases):
                state[plain_name(name)] = values.clone()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(state, path, metadata={"format": "pt", "version": str(self.version)})
        except OSError as error:
            raise errors.UserError(f"the weights cannot be written to {path}: {error.strerror or error}") from error
        except SafetensorError as error:  # of a disk that is full, too
            reason = str(error).removeprefix("Error while serializing: ").removeprefix("I/O error: ")
            raise errors.UserError(f"the weights cannot be written to {path}: {reason}") from error


async def collect(channels: Sequence[Channel], model: types_pb2.ModelSpec, job: str, timeline: int) -> Result:
    """Gather weights and state from the servers, whose channels come in the order of their indices.

    Raises UnavailableError if the shards do not come to hold the same contributions within 5 s.
    """
    plan = plan_of(model, len(channels))
    names = [f"the server at {channel.address}" for channel in channels]
    links = ShardLinks(Targets(channels, names, plan, job, lambda: 0, timeline, _TIMEOUT_S))
    deadline = time.monotonic() + _SETTLE_S
    while True:
        pulled = await links.pulls.ask(Pull(Latest(), frozen=True))
        versions = sorted({result.version for result in pulled})
        if same(pulled) or time.monotonic() > deadline:
            break
        await asyncio.sleep(_LOOK_S)  # a shard may still be at work on contributions that were handed in
    if not same(pulled):
        held = "different versions" if len(versions) > 1 else "different contributions, in as many updates"
        raise errors.UnavailableError(
            f"the servers hold {held} ({versions}): "
            "a worker was lost between two servers, and no worker did its work again"
        )
    layout = plan.layout
    tensors = [bytearray(p.elements * itemsize(layout.segments[p.segment].dtype)) for p in layout.placements]
    for index, data in merge(pulled).items():
        chunk = layout.chunks[index]
        size = itemsize(chunk.dtype)
        for piece in chunk.pieces:
            source = data[piece.chunk_start * size : (piece.chunk_start + piece.elements) * size]
            start = piece.tensor_start * size
            tensors[piece.tensor][start : start + len(source)] = source
    exports = await asyncio.gather(*(_export(channel, job, timeline) for channel in channels))
    pieces: dict[tuple[int, str], dict[int, bytes]] = {}
    for export in exports:
        for ref, data in export:
            # Each chunk of a tensor brings its own copy of a number that holds for the whole tensor.
            pieces.setdefault((ref.tensor, ref.key), {})[0 if ref.scalar else ref.start] = bytes(data)
    states = {key: b"".join(parts[start] for start in sorted(parts)) for key, parts in pieces.items()}
    return Result(versions[0], layout, [bytes(tensor) for tensor in tensors], states)


async def _export(channel: Channel, job: str, timeline: int) -> list[tuple[shard_pb2.StateRef, memoryview]]:
    request = shard_pb2.ExportRequest(job=job, timeline=timeline)
    found: list[tuple[shard_pb2.StateRef, memoryview]] = []
    async for raw in channel.download("Shard.Export", request, timeout=_TIMEOUT_S):
        _, parts = split_frame(raw)
        for ref, data in parts:
            assert isinstance(ref, shard_pb2.StateRef)
            found.append((ref, data))
    return found
