"""The optimizer state that a script had before the job, as it comes with version 0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paramserver.core.layout.hypers import Hypers, Rule
from paramserver.core.layout.plan import Piece
from paramserver.errors import ModelError, NonFiniteError, ProtocolError
from paramserver.server.arithmetic.state import State, StateEntry
from paramserver.server.versions.shard import ShardTensors
from paramserver.tensors.dtypes import itemsize, tensor_from
from paramserver.tensors.finite import is_finite
from paramserver.v1 import shard_pb2


class BroughtState:
    """Collects the pieces of an upload, each checked when it comes, and makes the state of chunks out of them."""

    def __init__(self, tensors: ShardTensors, trusted: bool = False) -> None:
        """``trusted``: the state is that of another server, and may have any numbers."""
        self._tensors, self._trusted = tensors, trusted
        # By tensor and first element: the piece of a chunk that lies on this shard, and its type.
        self._pieces: dict[tuple[int, int], tuple[Piece, str]] = {
            (piece.tensor, piece.tensor_start): (piece, tensors.layout.chunks[index].dtype)
            for index, state in tensors.states.items()
            for piece in state.chunk.pieces
        }
        self._owned = frozenset(tensor for tensor, _ in self._pieces)
        self._seen: set[tuple[int, str, int]] = set()
        self._entries: dict[int, list[StateEntry]] = {}
        # By tensor and key: elements of the pieces that have come of a state of a whole tensor.
        self._taken: dict[tuple[int, str], int] = {}

    def take(self, ref: shard_pb2.StateRef, data: memoryview) -> None:
        """A piece has come. Raises ProtocolError unless it is of exactly one piece of a chunk of this shard."""
        name = (ref.tensor, ref.key, ref.start)
        if name in self._seen:
            raise ProtocolError(f"the state {ref.key[:40]!r} of tensor {ref.tensor} comes twice")
        if ref.tensor not in self._owned or not self._known(ref):
            raise ProtocolError(f"the state {ref.key[:40]!r} of tensor {ref.tensor} does not belong to this shard")
        if ref.scalar:
            elements, dtype = 1, "float32"
            fits = ref.start == 0
        else:
            elements, dtype, fits = self._array(ref)
        if not fits or ref.dtype != dtype or ref.bytes != elements * itemsize(dtype):
            raise ProtocolError(
                f"the state {ref.key!r} of tensor {ref.tensor} has another shape or type than its tensor"
            )
        values = tensor_from(data, dtype)
        if not self._trusted and not is_finite(values):
            tensor = self._tensors.layout.tensors[ref.tensor].name
            raise NonFiniteError(f"the optimizer state {ref.key} of {tensor!r} has a NaN or an infinite number")
        if not ref.scalar and (rule := self._rule(ref.tensor)).whole:
            # Pieces of a whole tensor's state may begin anywhere, and are no more than the state together.
            size = rule.array_elements(ref.key, self._tensors.layout.tensors[ref.tensor].shape)
            taken = self._taken[ref.tensor, ref.key] = self._taken.get((ref.tensor, ref.key), 0) + elements
            if taken > size:
                raise ProtocolError(f"the state {ref.key!r} of tensor {ref.tensor} has more than its {size} elements")
        self._seen.add(name)
        self._entries.setdefault(ref.tensor, []).append((ref.tensor, ref.key, ref.start, values, ref.scalar))

    def _rule(self, tensor: int) -> Rule:
        return self._tensors.optimizers.rule(self._tensors.layout.tensors[tensor].group)

    def _known(self, ref: shard_pb2.StateRef) -> bool:
        rule = self._rule(ref.tensor)
        return ref.key in (rule.scalars if ref.scalar else rule.arrays)

    def _array(self, ref: shard_pb2.StateRef) -> tuple[int, str, bool]:
        """Elements and type of a piece of an array, and whether there is such a piece."""
        rule = self._rule(ref.tensor)
        if not rule.whole:
            piece, dtype = self._pieces.get((ref.tensor, ref.start), (None, ""))
            return (piece.elements, dtype, True) if piece is not None else (0, "", False)
        _, dtype = self._pieces[ref.tensor, 0]
        left = rule.array_elements(ref.key, self._tensors.layout.tensors[ref.tensor].shape) - ref.start
        return min(ref.bytes // itemsize(dtype), left), dtype, left >= 0

    def load(self, announced: int, groups: Sequence[Hypers], chunks: Iterable[int] | None = None) -> dict[int, State]:
        """The state of all chunks that were brought any, or of these ``chunks``, by chunk.

        ``groups``: the hyper-parameters, which say what state there must be. Raises ProtocolError if some is missing.
        """
        if announced != len(self._seen):
            raise ProtocolError(f"the stream announces {announced} pieces of state, but {len(self._seen)} came")
        made: dict[int, State] = {}
        for index in self._tensors.states if chunks is None else self._tensors.states.keys() & set(chunks):
            chunk = self._tensors.states[index].chunk
            entries = [entry for piece in chunk.pieces for entry in self._entries.get(piece.tensor, ())]
            if entries:
                made[index] = self._tensors.states[index].fresh()
                try:
                    made[index].load(entries)
                    made[index].check(groups[chunk.group])
                except ModelError as error:
                    raise ProtocolError(str(error)) from error
        return made
