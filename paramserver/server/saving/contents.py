"""The files of a checkpoint of one shard: which tensors they hold, under which names, in which order."""

from __future__ import annotations

import asyncio
import itertools
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from paramserver.checkpoint.tensorfile import Entry
from paramserver.core.layout.plan import Chunk, Layout, Piece, Plan
from paramserver.core.versions.ledger import Row
from paramserver.server.arithmetic.state import StateCopy, StateEntry
from paramserver.server.versions.version import Version
from paramserver.tensors.dtypes import buffer_of, in_model_type, torch_dtype
from paramserver.v1 import shard_pb2

_MASTERED = frozenset(("float16", "bfloat16", "float32", "float64"))


@dataclass(slots=True)
class Copy:
    """The parts of one version of this shard that a checkpoint needs."""

    version: Version
    states: StateCopy
    facts: str
    # The contributions that were counted, with their workers (see core.ledger).
    ledger: list[Row]
    names: dict[int, str]
    status: shard_pb2.CopyStatus
    task: asyncio.Task[None] | None = field(default=None)
    # Nobody needs this copy any more, although it is still being written.
    released: bool = False
    # Training goes on meanwhile: the state is copied at once, so that the next step does not wait for the copy.
    hurry: bool = True


class Contents:
    """The files of one server. ``chunk_of`` gives a chunk of a copy; it may lie on another server."""

    def __init__(self, plan: Plan, index: int, chunk_of: Callable[[Copy, Chunk], torch.Tensor]) -> None:
        self._plan, self._index, self._chunk_of = plan, index, chunk_of
        self._pieces = _pieces_of(plan.layout)

    def state_entries(self, copy: Copy, chunks: Sequence[Chunk]) -> Iterator[Entry]:
        """Optimizer state as it will be written. A number for a whole tensor is there once."""
        outlines = (copy.states.outline(chunk.index) for chunk in chunks)
        for name, (tensor, _, _, value, scalar) in self._once(outlines):
            spec = self._plan.layout.tensors[tensor]
            shape = tuple(value.shape) if scalar or "@" in name.rpartition("/")[2] else spec.shape
            yield Entry(name, str(value.dtype).removeprefix("torch."), shape)

    def state_values(self, copy: Copy, chunks: Sequence[Chunk]) -> Iterator[memoryview | bytes]:
        """The same, chunk by chunk, so that no more than a chunk is there twice while nothing changes."""
        used = (copy.states.use(chunk.index) for chunk in chunks)
        for _, (_, _, _, value, _) in self._once(used):
            yield buffer_of(value.contiguous())

    def _once(self, found: Iterable[list[StateEntry]]) -> Iterator[tuple[str, StateEntry]]:
        """Each name in the file, and the tensor under this name."""
        seen: set[str] = set()
        for entry in itertools.chain.from_iterable(found):
            tensor, key, start, value, scalar = entry
            spec = self._plan.layout.tensors[tensor]
            whole = scalar or (start == 0 and value.numel() == spec.elements)
            name = f"optimizer/{spec.name}/{key}" + ("" if whole else f"@{start}")
            if name not in seen:
                seen.add(name)
                yield name, entry

    def other_entries(self, copy: Copy, mine: Sequence[int]) -> Iterator[Entry]:
        """Buffers in master type where the model's loses digits, and the ledger."""
        for tensor in mine:
            spec = self._plan.layout.tensors[tensor]
            if spec.dtype not in _MASTERED:
                yield Entry(f"master/{spec.name}", "float64", spec.shape)
        if copy.ledger:
            yield Entry("ledger", "int64", (len(copy.ledger), 5))

    def other_values(self, copy: Copy, mine: Sequence[int]) -> Iterator[memoryview | bytes]:
        for tensor in mine:
            if self._plan.layout.tensors[tensor].dtype not in _MASTERED:
                yield from self._master(copy, tensor)
        if copy.ledger:
            yield array("q", [number for row in copy.ledger for number in row]).tobytes()

    def mine(self) -> list[int]:
        """The tensors that this server writes: it holds their first element."""
        owner, index = self._plan.owner, self._index
        return [
            tensor
            for tensor, pieces in enumerate(self._pieces)
            if (owner[pieces[0][0].index] if pieces else 0) == index
        ]

    def entries(self, tensors: Sequence[int]) -> list[Entry]:
        layout = self._plan.layout
        entries = []
        for tensor in tensors:
            spec = layout.tensors[tensor]
            master = layout.segments[layout.placements[tensor].segment].dtype
            entries.append(Entry(spec.name, master if spec.dtype in _MASTERED else spec.dtype, spec.shape))
        return entries

    def names(self, tensors: Sequence[int]) -> dict[str, str]:
        specs = [self._plan.layout.tensors[tensor] for tensor in tensors]
        return {
            "format": "pt",
            "aliases": json.dumps({spec.name: list(spec.aliases) for spec in specs if spec.aliases}),
            "not_persistent": json.dumps([spec.name for spec in specs if not spec.persistent]),
        }

    def values(self, copy: Copy, tensors: Sequence[int]) -> Iterator[memoryview | bytes]:
        for tensor in tensors:
            spec = self._plan.layout.tensors[tensor]
            parts = self._master(copy, tensor)
            if spec.dtype in _MASTERED:
                yield from parts
                continue
            flat = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.float64) if spec.elements else None
            if flat is not None:
                yield buffer_of(in_model_type(flat, torch_dtype(spec.dtype)).view(torch.uint8))

    def _master(self, copy: Copy, tensor: int) -> Iterator[memoryview]:
        """The bytes of a tensor in master type, piece by piece."""
        for chunk, piece in self._pieces[tensor]:
            flat = self._chunk_of(copy, chunk)
            yield buffer_of(flat[piece.chunk_start : piece.chunk_start + piece.elements])


def _pieces_of(layout: Layout) -> list[list[tuple[Chunk, Piece]]]:
    """By tensor: where its elements lie, in order."""
    pieces: list[list[tuple[Chunk, Piece]]] = [[] for _ in layout.tensors]
    for chunk in layout.chunks:
        for piece in chunk.pieces:
            pieces[piece.tensor].append((chunk, piece))
    return pieces
