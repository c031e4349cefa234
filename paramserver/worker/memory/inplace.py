"""The weights where the servers have them: a worker computes on them without a copy of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from paramserver.core.layout.arena import Arena, Run
from paramserver.core.layout.plan import ITEMSIZE, Kind, Placement, Plan, Segment
from paramserver.tensors.dtypes import tensor_from
from paramserver.transport.shm.segments import PAGE
from paramserver.worker.flat import FlatSpace
from paramserver.worker.memory.regions import Region
from paramserver.worker.memory.shared import SharedMemory
from paramserver.worker.weights.pulled import Pulled, Slot

# So many regions are kept with their mappings. Servers use fewer slots while all members keep step.
_REGIONS = 5
# Pages of a model that are mapped piece by piece; beyond, a process may run out of mappings.
_MOST_RUNS = 4096
# Each search for private copies looks at one of so many parts of a region, and at no fewer bytes than that.
_PARTS, _PART_BYTES = 8, 16 << 20


class Source(Protocol):
    """Memory of other processes in which versions lie: of the servers, or of the worker that pulls for its host."""

    plan: Plan
    arena: Arena
    reading: dict[int, Slot]

    def read_in_place(self) -> None:
        """From now on the weights are read where they are, and not copied."""

    def chunks_in(self, shard: int, slot: Slot) -> dict[int, memoryview]:
        """The chunks of a shard that are trained, of the version in a slot."""
        ...


class _Version:
    """A region, its tensors, and the slots that are mapped there (by shard; None: bytes that were sent)."""

    def __init__(self, region: Region, space: FlatSpace) -> None:
        self.region, self.space = region, space
        self.slots: dict[int, Slot | None] = {}
        self.part = 0

    def gone(self, slots: Mapping[int, Slot | None]) -> bool:
        """Whether a shard of it lies in memory of another server than the one of ``slots``."""
        pairs = ((old, slots[shard]) for shard, old in self.slots.items())
        return any(old is not None and (new is None or new.memory is not old.memory) for old, new in pairs)

    @property
    def private(self) -> bool:
        """Whether some of it was sent, and lies in pages of this process's own."""
        return None in self.slots.values()


class InPlace:
    """Puts versions together out of the slots of all servers, and of bytes where a server has sent some."""

    def __init__(self, source: Source, former: FlatSpace | None = None) -> None:
        """``former``: has the frozen tensors, and all shards are always in one slot. Raises OSError."""
        self.source, self._arena, self._plan = source, source.arena, source.plan
        self._runs = self._arena.runs(self._plan, frozen=False)
        self._frozen_runs = self._arena.runs(self._plan, frozen=True)
        # None: not mapped yet.
        self._frozen: Region | None = None
        if former is not None:
            self._runs, self._frozen_runs = (Run(0, 0, self._arena.slot_bytes),), ()
            self._map_frozen(())
            self._copy_frozen(former)
        source.read_in_place()
        self._kept: list[_Version] = []  # the one that was used last comes last

    @staticmethod
    def possible(shared: SharedMemory) -> bool:
        """Whether every server shares its memory, in whole pages."""
        arena, plan = shared.arena, shared.plan
        all_share = len(shared.shards) == plan.shards
        return all_share and arena.separable(plan) and len(arena.runs(plan, frozen=False)) <= _MOST_RUNS

    def install(self, results: Sequence[Pulled]) -> FlatSpace:
        """The weights of a pull. The previous version stays mapped, but may change from the next pull on."""
        if self._frozen is None:
            self._map_frozen(results)
        slots = {shard: result.slot for shard, result in enumerate(results)}
        version = self._find(slots)
        for shard, result in enumerate(results):
            slot = result.slot
            if slot is None or version.slots.get(shard) != slot or version.private:
                self._map(version, shard, slot)
            if slot is None:
                self._write(version.region, result)
                self.source.reading.pop(shard, None)
            else:
                self.source.reading[shard] = slot
        version.slots = slots
        return version.space

    def _find(self, slots: dict[int, Slot | None]) -> _Version:
        """The region in which these slots are mapped already, else a region that is not in use.

        Memory of a server that is gone ends with the last region that shows it, so these regions are used first.
        """
        index = next((i for i, kept in enumerate(self._kept) if kept.slots == slots), None)
        if index is None:  # the last one is at hand
            index = next((i for i, kept in enumerate(self._kept[:-1]) if kept.gone(slots)), None)
        if index is None and len(self._kept) >= _REGIONS:
            index = 0
        version = self._kept.pop(index) if index is not None else self._make()
        self._kept.append(version)
        return version

    def _make(self) -> _Version:
        region = Region(self._arena.slot_bytes)

        def place(segment: Segment) -> torch.Tensor:
            start = self._arena.starts[segment.index]
            home = self._frozen if segment.kind is Kind.FROZEN else region
            assert home is not None, "frozen tensors are mapped first"
            return tensor_from(home.view[start : start + segment.elements * ITEMSIZE[segment.dtype]], segment.dtype)

        return _Version(region, FlatSpace(self._plan.layout, torch.device("cpu"), memory=place))

    def _map(self, version: _Version, shard: int, slot: Slot | None) -> None:
        for run in self._runs:
            if run.shard != shard:
                continue
            if slot is None:
                version.region.own(run.start, run.length)
            else:
                offset = self._arena.slot_start(slot.number) + run.start
                version.region.lend(run.start, run.length, slot.memory.fd, offset)

    def _map_frozen(self, results: Sequence[Pulled]) -> None:
        self._frozen = Region(max(PAGE, self._arena.frozen_bytes))
        for run in self._frozen_runs:
            slot = results[run.shard].slot
            if slot is not None:
                self._frozen.lend(run.start, run.length, slot.memory.fd, run.start)
        for result in results:
            self._write(self._frozen, result, frozen=True)

    def _copy_frozen(self, former: FlatSpace) -> None:
        assert self._frozen is not None, "it was mapped"
        for chunk in self._plan.layout.chunks:
            if chunk.kind is Kind.FROZEN:
                start = self._arena.start(chunk)
                self._frozen.view[start : start + chunk.nbytes] = former.read(chunk.index)

    def _write(self, region: Region, result: Pulled, frozen: bool = False) -> None:
        """Write bytes that were sent into private pages of this process."""
        for index, data in result.chunks.items():
            chunk = self._plan.layout.chunks[index]
            if (chunk.kind is Kind.FROZEN) == frozen:
                start = self._arena.start(chunk)
                region.view[start : start + chunk.nbytes] = data

    # ---- writes of the script

    def take_back(self, tensors: Sequence[int]) -> None:
        """The script has written to these trained tensors: their pages show the servers' again."""
        version = self._kept[-1] if self._kept else None
        if version is None or version.private:  # which is mapped anew by the next install
            return
        for tensor in tensors:
            version.region.give_back(*self._bytes_of(self._plan.layout.placements[tensor]))

    def _bytes_of(self, placement: Placement) -> tuple[int, int]:
        """(first byte within a slot, number of bytes) of a tensor."""
        segment = self._plan.layout.segments[placement.segment]
        start = self._arena.starts[segment.index] + placement.offset * ITEMSIZE[segment.dtype]
        return start, placement.elements * ITEMSIZE[segment.dtype]

    def find_written(self) -> list[int]:
        """The trained tensors in a part of the version at hand to which the script has written.

        Each call looks at another part. This search is for writes that leave no other trace.
        """
        version = self._kept[-1] if self._kept else None
        if version is None or version.private:
            return []
        size = max(_PART_BYTES, -(-version.region.nbytes // (_PARTS * PAGE)) * PAGE)
        start = version.part * size
        version.part = version.part + 1 if start + size < version.region.nbytes else 0
        places = version.region.written(start, min(size, version.region.nbytes - start))
        return sorted({tensor for place in places for tensor in self._tensors_at(place)})

    def _tensors_at(self, place: int) -> list[int]:
        """The tensors that have elements in the page at ``place`` of a slot."""
        found = []
        layout = self._plan.layout
        for placement in layout.placements:
            if layout.segments[placement.segment].kind is Kind.FROZEN or not placement.elements:
                continue
            start, nbytes = self._bytes_of(placement)
            if start < place + PAGE and place < start + nbytes:
                found.append(placement.tensor)
        return found
