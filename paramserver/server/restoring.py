"""Reads a shard out of a checkpoint that any number of servers has written; everything is verified first."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch

from paramserver.checkpoint.manifest import Manifest
from paramserver.checkpoint.place import Place
from paramserver.checkpoint.tensorfile import FileInfo, TensorFile
from paramserver.core.hypers import RULES
from paramserver.core.ledger import Row
from paramserver.core.plan import Chunk, Layout, TensorSpec, master_dtype
from paramserver.errors import CheckpointError, ModelError
from paramserver.server.apply import StateEntry
from paramserver.server.shard import ShardTensors
from paramserver.server.version import Version
from paramserver.tensors.dtypes import tensor_from, torch_dtype
from paramserver.v1 import shard_pb2

# Keys of optimizer state that are one number for a whole tensor.
_SCALARS = frozenset(key for rule in RULES.values() for key in rule.scalars)

Counted = dict[int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """What all shards knew beside their tensors. ``rows``: see core.ledger. ``names``: of workers, by number."""

    applied: int
    skipped: int
    samples: int
    schedule: int
    counted: Counted
    rows: list[Row]
    folded_steps: int
    names: dict[int, str]


@dataclass(frozen=True, slots=True)
class Restored:
    """A shard as it was."""

    version: Version
    facts: ShardFacts


def restore(place: Place, manifest: Manifest, layout: Layout, tensors: ShardTensors) -> Restored:
    """Fill ``tensors`` and return the version. Raises CheckpointError naming the file that is damaged or odd."""
    if manifest.layout_digest != layout.digest:
        raise CheckpointError(f"checkpoint {manifest.version} is of another model: its layout differs")
    with ExitStack() as files:
        weights = _open(files, place, manifest, manifest.weights)
        states = _open(files, place, manifest, manifest.state)
        for file in (*weights, *states):
            file.verify()
        facts = _facts(states, manifest)
        source = _Source(layout.tensors, weights, states)
        chunks = {chunk.index: source.chunk(chunk) for chunk in tensors.chunks}
        try:
            for index, state in tensors.states.items():
                state.load(source.state(layout.chunks[index]))
        except ModelError as error:
            raise CheckpointError(f"the optimizer state of {manifest.name} does not fit: {error}") from error
    tensors.skipped, tensors.samples = facts.skipped, facts.samples
    tensors.schedule = cast(shard_pb2.Schedule, facts.schedule)
    return Restored(Version(manifest.version, tensors.chunks, chunks), facts)


def check_tensors(place: Place, manifest: Manifest, tensors: Sequence[TensorSpec]) -> None:
    """Whether all ``tensors`` of the model are there as :func:`restore` needs them. Raises CheckpointError."""
    with ExitStack() as files:
        weights = _open(files, place, manifest, manifest.weights)
        source = _Source(tensors, weights, _open(files, place, manifest, manifest.state))
        for spec in tensors:
            source.find(spec, master_dtype(spec.dtype, spec.kind))


def shard_facts(place: Place, manifest: Manifest) -> ShardFacts:
    """What the shards of a checkpoint knew. Raises CheckpointError."""
    with ExitStack() as files:
        return _facts(_open(files, place, manifest, manifest.state), manifest)


def _open(files: ExitStack, place: Place, manifest: Manifest, infos: Iterable[FileInfo]) -> list[TensorFile]:
    return [files.enter_context(TensorFile(place, manifest.name, info)) for info in infos]


def _facts(states: Sequence[TensorFile], manifest: Manifest) -> ShardFacts:
    """What the shards knew; all must say the same."""
    told: list[dict[str, Any]] = []
    for index, file in enumerate(states):
        try:
            facts = json.loads(file.metadata["shard"])
            for key in ("version", "applied", "skipped", "samples", "schedule", "folded_steps"):
                if not isinstance(facts[key], int):
                    raise TypeError(key)
            facts["counted"].items()
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{manifest.state[index].name} does not say what its shard had counted") from error
        if facts["version"] != manifest.version:
            raise CheckpointError(
                f"{manifest.state[index].name} (of server-{index}) is of version {facts['version']}, the checkpoint is "
                f"of version {manifest.version}"
            )
        told.append(facts)
    if any(facts != told[0] for facts in told[1:]):
        odd = next(i for i, facts in enumerate(told) if facts != told[0])
        names = f"{manifest.state[odd].name} and {manifest.state[0].name}"
        raise CheckpointError(f"{names} are not of the same moment")
    facts = told[0]
    return ShardFacts(
        applied=facts["applied"],
        skipped=facts["skipped"],
        samples=facts["samples"],
        schedule=facts["schedule"],
        counted={int(epoch): tuple((lo, hi) for lo, hi in ranges) for epoch, ranges in facts["counted"].items()},
        rows=_ledger_rows(states[0]),
        folded_steps=facts["folded_steps"],
        names=_worker_names(states[0]),
    )


def _worker_names(file: TensorFile) -> dict[int, str]:
    try:
        return {int(ident): str(name) for ident, name in json.loads(file.metadata.get("names", "{}")).items()}
    except (ValueError, AttributeError) as error:
        raise CheckpointError("the names of workers in a checkpoint are damaged") from error


def _ledger_rows(file: TensorFile) -> list[Row]:
    entry = file.entries.get("ledger")
    if entry is None:
        return []
    if entry.dtype != "int64" or len(entry.shape) != 2 or entry.shape[1] != 5:
        raise CheckpointError("the ledger in a checkpoint is no table of five columns")
    numbers = array("q")
    numbers.frombytes(file.read("ledger", 0, entry.shape[0] * 5))
    columns = [numbers[column::5] for column in range(5)]
    return list(zip(*columns, strict=True))


class _Source:
    """Finds tensors and states by name in the files of a checkpoint."""

    def __init__(
        self, tensors: Sequence[TensorSpec], weights: Sequence[TensorFile], states: Sequence[TensorFile]
    ) -> None:
        self._tensors = tensors
        self._weights = {name: file for file in weights for name in file.entries}
        self._masters: dict[str, TensorFile] = {}
        # By tensor name: (key, first element, entry, file).
        self._states: dict[str, list[tuple[str, int, str, TensorFile]]] = {}
        for file in states:
            for entry in file.entries:
                kind, _, rest = entry.partition("/")
                if kind == "master":
                    self._masters[rest] = file
                elif kind == "optimizer":
                    name, _, key = rest.rpartition("/")
                    key, _, start = key.partition("@")
                    self._states.setdefault(name, []).append((key, int(start) if start.isdigit() else 0, entry, file))

    def find(self, spec: TensorSpec, dtype: str) -> tuple[TensorFile, str]:
        """Where a tensor lies in type ``dtype``. Raises CheckpointError if it does not, or in another shape."""
        file, name = self._weights.get(spec.name), spec.name
        if file is None:
            raise CheckpointError(f"the checkpoint has no tensor {spec.name!r}")
        if file.entries[name].dtype != dtype:
            file, name = self._masters.get(spec.name), f"master/{spec.name}"
            if file is None or file.entries[name].dtype != dtype:
                raise CheckpointError(f"tensor {spec.name!r} of the checkpoint is of another type than the model's")
        if file.entries[name].shape != spec.shape:
            raise CheckpointError(f"tensor {spec.name!r} of the checkpoint has another shape than the model's")
        return file, name

    def chunk(self, chunk: Chunk) -> torch.Tensor:
        """A chunk's values in master type; padding is zero."""
        flat = torch.zeros(chunk.elements, dtype=torch_dtype(chunk.dtype))
        for piece in chunk.pieces:
            spec = self._tensors[piece.tensor]
            file, name = self.find(spec, chunk.dtype)
            data = tensor_from(memoryview(file.read(name, piece.tensor_start, piece.elements)), chunk.dtype)
            flat[piece.chunk_start : piece.chunk_start + piece.elements] = data
        return flat

    def state(self, chunk: Chunk) -> Iterator[StateEntry]:
        """The optimizer state of the tensors that have elements in the chunk, as far as it overlaps them."""
        for piece in chunk.pieces:
            seen: set[str] = set()
            for key, start, entry, file in self._states.get(self._tensors[piece.tensor].name, ()):
                kind = file.entries[entry]
                if key in _SCALARS:
                    if key not in seen:
                        seen.add(key)
                        yield piece.tensor, key, 0, _read(file, entry, 0, 1, kind.dtype), True
                    continue
                lo, hi = max(start, piece.tensor_start), min(start + kind.elements, piece.tensor_start + piece.elements)
                if lo < hi:
                    yield piece.tensor, key, lo, _read(file, entry, lo - start, hi - lo, kind.dtype), False


def _read(file: TensorFile, entry: str, start: int, count: int, dtype: str) -> torch.Tensor:
    return tensor_from(memoryview(bytearray(file.read(entry, start, count))), dtype)
