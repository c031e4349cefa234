"""The weights at hand as the servers have them, whatever the script has done to its copy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

import torch

from paramserver import errors
from paramserver.worker.engine.weights import Weights
from paramserver.worker.weights.pulled import merge


class Originals(Weights):
    """Asked only when something seems to have been changed, between two slices."""

    def originals(self, tensors: Collection[int]) -> dict[int, torch.Tensor] | None:
        """These trained tensors of the version at hand, in the servers' type; None if the servers have dropped it."""
        assert self._weights is not None
        layout = self._weights.layout
        wanted = [c for c in layout.chunks if any(piece.tensor in tensors for piece in c.pieces)]
        at_hand = self._at_hand({self.links.plan.owner[chunk.index] for chunk in wanted})
        if at_hand is None:
            return None
        found: dict[int, torch.Tensor] = {}
        for chunk in wanted:
            ((target, source),) = self._weights.places({chunk.index: at_hand[chunk.index]}, self.rounding)
            for piece in chunk.pieces:
                if piece.tensor in tensors and piece.tensor not in found:
                    found[piece.tensor] = torch.empty(layout.placements[piece.tensor].elements, dtype=target.dtype)
                if piece.tensor in tensors:
                    values = source[piece.chunk_start : piece.chunk_start + piece.elements]
                    found[piece.tensor][piece.tensor_start : piece.tensor_start + piece.elements] = values
        return {index: flat.view(layout.tensors[index].shape) for index, flat in found.items()}

    def _at_hand(self, servers: Set[int]) -> Mapping[int, memoryview] | None:
        """All chunks of these servers, of the version at hand."""
        shared = self.links.near.shared
        if self.in_place is not None and shared is not None and servers <= shared.reading.keys():
            return {
                index: data
                for server in servers
                for index, data in shared.chunks_in(server, shared.reading[server]).items()
            }
        if self._received:
            return merge(self._received)
        try:
            return merge(self._watch(self.background.submit(self.links.pulls.again(self._versions))))
        except errors.GoneError:
            return None
