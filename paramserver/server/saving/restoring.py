"""Reads a shard out of a checkpoint of any number of servers; all files are verified first."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from paramserver.checkpoint.contents import Contents, ShardFacts
from paramserver.checkpoint.manifest import Manifest
from paramserver.checkpoint.place import Place
from paramserver.checkpoint.tensorfile import TensorFile
from paramserver.core.layout.optimizers import Optimizers
from paramserver.core.layout.plan import Chunk, Layout
from paramserver.server.arithmetic.state import StateEntry
from paramserver.server.versions.shard import ShardTensors
from paramserver.server.versions.version import Version
from paramserver.tensors.dtypes import tensor_from, torch_dtype
from paramserver.v1 import types_pb2


def restore(
    place: Place, manifest: Manifest, layout: Layout, optimizer: types_pb2.OptimizerSpec, tensors: ShardTensors
) -> tuple[Version, ShardFacts]:
    """Fill ``tensors``; return the version, and the facts of its shards.

    Raises CheckpointError, which names the file or tensor that is damaged or does not fit.
    """
    with Contents(place, manifest) as contents:
        facts = contents.check(layout, optimizer)
        chunks = {chunk.index: _chunk(contents, layout, chunk) for chunk in tensors.chunks}
        for state in tensors.states.values():
            state.load(_state(contents, layout, state.chunk, tensors.optimizers))
    return Version(manifest.version, tensors.chunks, chunks), facts


def _chunk(contents: Contents, layout: Layout, chunk: Chunk) -> torch.Tensor:
    """A chunk's values in master type; padding is zero."""
    flat = torch.zeros(chunk.elements, dtype=torch_dtype(chunk.dtype))
    for piece in chunk.pieces:
        file, name = contents.tensor(layout.tensors[piece.tensor], chunk.dtype)
        data = tensor_from(memoryview(file.read(name, piece.tensor_start, piece.elements)), chunk.dtype)
        flat[piece.chunk_start : piece.chunk_start + piece.elements] = data
    return flat


def _state(contents: Contents, layout: Layout, chunk: Chunk, optimizers: Optimizers) -> Iterator[StateEntry]:
    """The optimizer state of the tensors that have elements in the chunk, as far as it overlaps them."""
    scalars = optimizers.rule(chunk.group).scalars
    for piece in chunk.pieces:
        seen: set[str] = set()
        for part in contents.states(layout.tensors[piece.tensor].name):
            if part.key in scalars:
                if part.key not in seen:
                    seen.add(part.key)
                    yield piece.tensor, part.key, 0, _read(part.file, part.entry.name, 0, 1, part.entry.dtype), True
                continue
            lo = max(part.start, piece.tensor_start)
            hi = min(part.start + part.entry.elements, piece.tensor_start + piece.elements)
            if lo < hi:
                data = _read(part.file, part.entry.name, lo - part.start, hi - lo, part.entry.dtype)
                yield piece.tensor, part.key, lo, data, False


def _read(file: TensorFile, entry: str, start: int, count: int, dtype: str) -> torch.Tensor:
    return tensor_from(memoryview(bytearray(file.read(entry, start, count))), dtype)
