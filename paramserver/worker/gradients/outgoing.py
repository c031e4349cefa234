"""Compresses a contribution before its push, and adds the residual of earlier contributions.

A lossy worker replaces its numbers by the numbers that servers will read, so that they are the same however they
travel. A compressor with *feedback* leaves out a *residual*. The worker keeps it by slice position, and adds it to the
next contribution of that position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from paramserver import errors
from paramserver.compress.base import Compressor
from paramserver.compress.options import Wire, compressible
from paramserver.compress.registry import push_compressor
from paramserver.core.layout.plan import Chunk, Kind
from paramserver.v1 import shard_pb2
from paramserver.worker.flat import FlatSpace, PartialSum

# Stands for all slice positions in asynchronous mode, in which a worker has one residual.
ANY = -1


@dataclass(frozen=True, slots=True)
class Encoded:
    """The payload of a chunk, a flat uint8 tensor."""

    encoding: shard_pb2.Encoding
    payload: torch.Tensor


# Gets a chunk, its numbers and whether it is the last chunk of its contribution. Replaces the numbers by those that
# servers will read, and returns their payload; None if the numbers are sent as they are.
Hook = Callable[[PartialSum, Chunk, torch.Tensor, bool], Encoded | None]


class Outgoing:
    """Compresses the contributions of one worker. Used by the thread of the training loop."""

    def __init__(self, wire: Wire | None = None) -> None:
        self.wire = wire or Wire()
        self.compressor: Compressor | None = push_compressor(self.wire.push, self.wire.topk_ratio)
        # A function of the script, in place of a compressor.
        self.hook: Hook | None = None
        self._kept: dict[int, _Residual] = {}

    def use(self, hook: Hook) -> None:
        """From now on this function of the script decides which numbers are sent.

        Raises UserError if there is another function, or a compressor.
        """
        if self.compressor is not None:
            raise errors.UserError(
                f'training.push_compression is "{self.compressor.name}": use that, or a push hook, not both'
            )
        if self.hook is not None:
            raise errors.UserError("there is a push hook already: register one, once")
        self.hook = hook

    @property
    def lossy(self) -> bool:
        """Whether numbers change on their way. Slices are pushed one by one then, since sums would change otherwise."""
        return self.compressor is not None or self.hook is not None

    @property
    def keeps(self) -> bool:
        """Whether a residual of each contribution stays here, so that slice positions belong to this worker."""
        return self.compressor is not None and self.compressor.feedback

    def keep(self, positions: Iterable[int]) -> int:
        """These slice positions stay with this worker. Returns how many residuals of other positions are lost."""
        stay = frozenset(positions)
        lost = [position for position in self._kept if position not in stay]
        for position in lost:
            del self._kept[position]
        return len(lost)

    def reset(self) -> None:
        """Forget all residuals."""
        self._kept.clear()

    def encode(self, position: int, partial: PartialSum, space: FlatSpace, flush: bool) -> dict[int, Encoded]:
        """Compress the used chunks of ``partial``, which lies in ``space`` in main memory; returns payloads by chunk.

        Chunks without a payload are sent as they are: their numbers are those that servers would read. With ``flush``
        all chunks are, the residual is added and nothing is kept; tensors of the residual count as used then. Raises
        NonFiniteError, and the errors of a hook.
        """
        if not partial.used:
            if flush:  # the contribution counts for nothing, and so does what belongs into it
                self._kept.pop(position, None)
            return {}
        residual = None
        if self.keeps:
            residual = self._kept.pop(position, None)
            if flush:
                if residual is not None:
                    residual.give_all(partial, space)
                return {}
            residual = residual or _Residual(FlatSpace(space.layout, torch.device("cpu"), (Kind.PARAMETER,)))
            self._kept[position] = residual
        encoded: dict[int, Encoded] = {}
        chunks = _used_chunks(partial, space)
        for chunk in chunks:
            values = space.chunk(chunk.index)
            made = None
            if self.hook is not None:
                made = self.hook(partial, chunk, values, chunk is chunks[-1])
            elif self.compressor is not None and compressible(chunk):
                if residual is not None:
                    made = residual.encode(self.compressor, partial, chunk, values)
                else:
                    made = Encoded(self.compressor.encoding, self.compressor.encode(values, values))
            if made is not None and made.payload.numel() <= chunk.nbytes:  # top-k of more than half is larger
                encoded[chunk.index] = made
        return encoded


class _Residual:
    """The residual of one slice position: numbers that were left out of its contributions so far."""

    def __init__(self, space: FlatSpace) -> None:
        self._space = space
        self._tensors: set[int] = set()

    def encode(self, compressor: Compressor, partial: PartialSum, chunk: Chunk, values: torch.Tensor) -> Encoded:
        """Add the residual to the numbers of a chunk, compress them, and keep the new residual.

        Tensors that have no gradient this time keep their residual.
        """
        kept = self._space.chunk(chunk.index)
        spans = [
            slice(piece.chunk_start, piece.chunk_start + piece.elements)
            for piece in chunk.pieces
            if piece.tensor in partial.used
        ]
        if len(spans) == len(chunk.pieces):  # with the padding, which is zero
            spans = [slice(0, chunk.elements)]
        for span in spans:
            kept[span] += values[span]
            values[span] = kept[span]
        encoded = Encoded(compressor.encoding, compressor.encode(values, values))
        for span in spans:
            kept[span] -= values[span]
        self._tensors.update(piece.tensor for piece in chunk.pieces if piece.tensor in partial.used)
        return encoded

    def give_all(self, partial: PartialSum, space: FlatSpace) -> None:
        """Add the whole residual to a contribution."""
        for tensor in self._tensors:
            space.view(tensor).add_(self._space.view(tensor))
        partial.used |= self._tensors
        partial.space.written |= self._tensors


def _used_chunks(partial: PartialSum, space: FlatSpace) -> list[Chunk]:
    return [chunk for chunk in space.layout.chunks if chunk.kind is Kind.PARAMETER and chunk.uses(partial.used)]
