"""Where a model lies in memory that processes share: the flat layout as it is, each segment at a page boundary.

Every process has the same places, so a tensor that spans chunks is in one piece for all owners. Frozen segments lie
once; the others make up a *slot*, of which there is one per version. A server's file is sparse: it touches the pages of
its own chunks only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paramserver.core.layout.plan import ITEMSIZE, Chunk, Kind, Layout, Plan


@dataclass(frozen=True, slots=True)
class Run:
    """``length`` bytes from ``start`` that belong to one server. Within the frozen part, or within a slot."""

    shard: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Arena:
    """``starts``: where a segment begins, in bytes, by its index: in the frozen part, or in a slot."""

    layout: Layout
    page: int
    starts: tuple[int, ...]
    frozen_bytes: int
    slot_bytes: int

    def weights_bytes(self, slots: int) -> int:
        """The size of a file with the frozen part and so many slots."""
        return self.frozen_bytes + slots * self.slot_bytes

    def start(self, chunk: Chunk) -> int:
        """Where a chunk begins in its part."""
        return self.starts[chunk.segment] + chunk.start * ITEMSIZE[chunk.dtype]

    def in_weights(self, chunk: Chunk, slot: int) -> int:
        """Where a chunk begins in a file of weights."""
        if chunk.kind is Kind.FROZEN:
            return self.start(chunk)
        return self.slot_start(slot) + self.start(chunk)

    def slot_start(self, slot: int) -> int:
        """Where a slot begins in a file of weights."""
        return self.frozen_bytes + slot * self.slot_bytes

    def runs(self, plan: Plan, frozen: bool) -> tuple[Run, ...]:
        """The byte ranges of the frozen part or of a slot, with their owners, in order; neighbours are joined."""
        runs: list[Run] = []
        for chunk in self.layout.chunks:
            if (chunk.kind is Kind.FROZEN) != frozen:
                continue
            shard, start = plan.owner[chunk.index], self.start(chunk)
            if runs and runs[-1].shard == shard and runs[-1].start + runs[-1].length == start:
                runs[-1] = Run(shard, runs[-1].start, runs[-1].length + chunk.nbytes)
            else:
                runs.append(Run(shard, start, chunk.nbytes))
        return tuple(runs)

    def separable(self, plan: Plan) -> bool:
        """True if no page of memory belongs to two servers, so that each server can lend its own pages."""
        return plan.shards == 1 or all(
            run.start % self.page == 0 for frozen in (False, True) for run in self.runs(plan, frozen)
        )


def make_arena(layout: Layout, page: int) -> Arena:
    """The places of a layout's segments. ``page``: bytes of a page of this machine."""
    starts: list[int] = []
    ends = {True: 0, False: 0}
    for segment in layout.segments:
        frozen = segment.kind is Kind.FROZEN
        starts.append(ends[frozen])
        ends[frozen] += -(-segment.elements * ITEMSIZE[segment.dtype] // page) * page
    return Arena(layout, page, tuple(starts), ends[True], max(page, ends[False]))


def pages(runs: Sequence[Run], page: int) -> Iterator[tuple[int, int]]:
    """(start, length) of the pages that runs touch; neighbours joined."""
    start = end = 0
    for run in runs:
        lo, hi = run.start // page * page, -(-(run.start + run.length) // page) * page
        if lo > end:
            if end > start:
                yield start, end - start
            start = lo
        end = max(end, hi)
    if end > start:
        yield start, end - start
