"""The optimizer state that a shard holds, for tests."""

from __future__ import annotations

from paramserver.server.arithmetic.state import StateEntry
from paramserver.server.versions.shard import ShardTensors


def exported(tensors: ShardTensors) -> list[StateEntry]:
    """Copies of the optimizer state by chunk: (tensor, key, first element, data, is one number for the tensor)."""
    copy = tensors.copy_states()
    try:
        return [entry for index in sorted(tensors.states) for entry in copy.use(index)]
    finally:
        tensors.drop_copy(copy)
