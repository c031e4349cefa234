"""The tensors of a checkpoint by name, the counts of its shards, and whether a job can go on from both.

Servers that take a checkpoint in and ``paramserver checkpoint verify`` call the same :meth:`Contents.check`.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from paramserver.checkpoint.manifest import Manifest
from paramserver.checkpoint.place import Place
from paramserver.checkpoint.storage.folder import Closing
from paramserver.checkpoint.tensorfile import Entry, TensorFile
from paramserver.core.layout.hypers import Hypers, Rule
from paramserver.core.layout.plan import Kind, Layout, TensorSpec, master_dtype
from paramserver.core.versions.advances import decode
from paramserver.core.versions.counted import Counted, Runs
from paramserver.core.versions.ledger import Row
from paramserver.errors import CheckpointError, ParamServerError, ProtocolError
from paramserver.tensors.hypers import groups_from_proto, optimizers_of
from paramserver.v1 import types_pb2

_NUMBERS = ("applied", "skipped", "samples", "folded_steps")
_LEDGER_COLUMNS = 5
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """The counts that all shards of a checkpoint have in common.

    ``applied``: contributions in the version; ``skipped``: steps with a NaN or infinite gradient; ``samples``: in all
    versions; ``advances``: see `core.versions.advances`; ``ever_used``: tensors that had a gradient, or changed, in
    some version; ``counted``: asynchronous slices; ``rows``, ``folded_steps``: see
    core.ledger; ``names``: of workers, by member number.
    """

    applied: int
    skipped: int
    samples: int
    advances: str
    ever_used: frozenset[int]
    counted: Runs
    rows: list[Row]
    folded_steps: int
    names: dict[int, str]


@dataclass(frozen=True, slots=True)
class StatePart:
    """Optimizer state of one tensor: elements from ``start`` on under ``key``, or one number for all of the tensor."""

    key: str
    start: int
    entry: Entry
    file: TensorFile


class Contents(Closing):
    """All files of a checkpoint, open for reading; close it, or use it in ``with``.

    Raises CheckpointError for a file of another size than the manifest says, for a header that is not right, and for
    optimizer state under an odd name.
    """

    def __init__(self, place: Place, manifest: Manifest) -> None:
        self._manifest = manifest
        # By tensor name: the file with its weights, the file with the master copy of a buffer of whole numbers.
        self.weights: dict[str, TensorFile] = {}
        self._masters: dict[str, TensorFile] = {}
        self._states: dict[str, list[StatePart]] = {}
        self._shards: list[TensorFile] = []
        self._all: list[TensorFile] = []
        with ExitStack() as files:
            for info in manifest.weights:
                file = files.enter_context(TensorFile(place, manifest.name, info))
                self.weights |= dict.fromkeys(file.entries, file)
                self._all.append(file)
            for info in manifest.state:
                file = files.enter_context(TensorFile(place, manifest.name, info))
                self._shards.append(file)
                for entry in file.entries.values():
                    self._note(file, entry)
            self._all += self._shards
            for parts in self._states.values():
                parts.sort(key=lambda part: (part.key, part.start))
            self._files = files.pop_all()

    def _note(self, file: TensorFile, entry: Entry) -> None:
        kind, _, rest = entry.name.partition("/")
        if kind == "master":
            self._masters[rest] = file
        elif kind == "optimizer":
            name, _, key = rest.rpartition("/")
            key, at, start = key.partition("@")
            if at and not (start.isascii() and start.isdigit()):
                raise CheckpointError(f"{self._manifest.name} has optimizer state with the odd name {entry.name!r}")
            self._states.setdefault(name, []).append(StatePart(key, int(start or 0), entry, file))

    # ---- finding

    def tensor(self, spec: TensorSpec, dtype: str) -> tuple[TensorFile, str]:
        """The file, and the name in it, where a tensor lies in type ``dtype``.

        Raises CheckpointError if it is not there, or is there in another type or shape.
        """
        file, name = self.weights.get(spec.name), spec.name
        if file is None:
            raise CheckpointError(f"the checkpoint has no tensor {spec.name!r}")
        if file.entries[name].dtype != dtype:
            file, name = self._masters.get(spec.name), f"master/{spec.name}"
            if file is None or file.entries[name].dtype != dtype:
                raise CheckpointError(f"tensor {spec.name!r} of the checkpoint is of another type than the model's")
        if file.entries[name].shape != spec.shape:
            raise CheckpointError(f"tensor {spec.name!r} of the checkpoint has another shape than the model's")
        return file, name

    def states(self, tensor: str) -> list[StatePart]:
        """The optimizer state of a tensor, by key in the order of the tensor's elements; none before the first update.

        A number for the whole tensor is there once per server that holds a part of the tensor.
        """
        return self._states.get(tensor, [])

    def facts(self) -> ShardFacts:
        """The counts of the shards. Raises CheckpointError if a file lacks them, or if two files differ."""
        manifest = self._manifest
        told = [_told(file, info.name) for file, info in zip(self._shards, manifest.state, strict=True)]
        for index, (facts, info) in enumerate(zip(told, manifest.state, strict=True)):
            if facts["version"] != manifest.version:
                raise CheckpointError(
                    f"{info.name} (of server-{index}) is of version {facts['version']}, the checkpoint is of version "
                    f"{manifest.version}"
                )
            if facts != told[0]:
                raise CheckpointError(f"{info.name} and {manifest.state[0].name} are not of the same moment")
        file, numbers = self._shards[0], {key: told[0][key] for key in _NUMBERS}
        names = _worker_names(file, manifest.state[0].name)
        others = {key: told[0][key] for key in ("counted", "advances", "ever_used")}
        return ShardFacts(**others, rows=_ledger_rows(file), names=names, **numbers)

    # ---- checking

    def check(self, layout: Layout, optimizer: types_pb2.OptimizerSpec) -> ShardFacts:
        """Whether a job with this model and optimizer can go on from here; returns the counts of the shards.

        Reads everything. Raises CheckpointError that names the file, tensor or optimizer state that is damaged,
        missing, or of another model.
        """
        name = self._manifest.name
        if self._manifest.layout_digest != layout.digest:
            raise CheckpointError(f"{name} is of another model: its layout differs")
        groups, optimizers = hypers_of(optimizer, name), optimizers_of(optimizer)
        for file in self._all:
            file.verify()
        facts = self.facts()
        for spec in layout.tensors:
            self.tensor(spec, master_dtype(spec.dtype, spec.kind))
            if spec.kind is Kind.PARAMETER:
                hypers = group_of(spec, groups)
                self._check_state(spec, optimizers.rule(spec.group), hypers)
        return facts

    def _check_state(self, spec: TensorSpec, rule: Rule, hypers: Hypers) -> None:
        """Whether a parameter has no optimizer state, or all that its optimizer needs."""
        parts = self.states(spec.name)
        if not parts:
            return
        sizes = {key: math.prod(shape) for key, shape in rule.arrays_of(hypers, spec.shape).items()}
        needed = sizes.keys() | rule.scalars
        ends: dict[str, int] = {}
        dtype = master_dtype(spec.dtype, spec.kind)
        for part in parts:
            if part.key not in needed:
                raise self._unfit(spec, f"has the state {part.key[:40]!r}, which this optimizer does not keep")
            if part.key in rule.scalars:
                if part.entry.elements != 1:
                    raise self._unfit(spec, f"has {part.entry.elements} numbers as {part.key}, which is one number")
                ends[part.key] = 1
                continue
            if part.entry.dtype != dtype:
                raise self._unfit(spec, f"has {part.key} in another type")
            end = ends.get(part.key, 0)
            if part.start != end:
                raise self._unfit(spec, f"lacks {part.key} from element {end} on, or has some of it twice")
            ends[part.key] = end + part.entry.elements
        for key in sorted(needed):
            if ends.get(key) != sizes.get(key, 1):
                raise self._unfit(spec, f"has {ends.get(key, 0)} of {sizes.get(key, 1)} elements of {key}")

    def _unfit(self, spec: TensorSpec, problem: str) -> CheckpointError:
        return CheckpointError(f"the optimizer state of {self._manifest.name} does not fit: {spec.name!r} {problem}")

    def close(self) -> None:
        self._files.close()


def hypers_of(optimizer: types_pb2.OptimizerSpec, checkpoint: str) -> Sequence[Hypers]:
    """The hyper-parameters of each group. Raises CheckpointError for an optimizer that servers do not know."""
    try:
        groups = groups_from_proto(optimizer.groups)
        optimizers_of(optimizer).validate(groups)
    except ParamServerError as error:
        raise CheckpointError(f"{checkpoint} names an optimizer that servers do not run: {error}") from error
    return groups


def group_of(spec: TensorSpec | types_pb2.TensorSpec, groups: Sequence[T]) -> T:
    """The parameter group of a parameter. Raises CheckpointError if there is no such group."""
    if spec.group >= len(groups):
        raise CheckpointError(f"parameter {spec.name!r} is in group {spec.group} of {len(groups)}")
    return groups[spec.group]


def _told(file: TensorFile, name: str) -> dict[str, Any]:
    """The counts in the file of one shard. Raises CheckpointError."""
    try:
        facts: dict[str, Any] = json.loads(file.metadata["shard"])
        if any(type(facts[key]) is not int or facts[key] < 0 for key in ("version", *_NUMBERS)):
            raise ValueError("a number")
        facts["advances"] = str(facts.get("advances", ""))
        decode(facts["advances"])
        facts["ever_used"] = frozenset(int(index) for index in facts.get("ever_used", ()))
        facts["counted"] = _runs_from_json(facts["counted"])
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError, ProtocolError) as error:
        raise CheckpointError(f"{name} does not say what its shard had counted") from error
    return facts


def runs_to_json(counted: Runs) -> dict[str, list[list[int]]]:
    """Slices as a file has them: ``"7"`` is epoch 7, ``"0-999"`` are the epochs 0 to 999."""
    return {
        f"{run.first}-{run.first + run.epochs - 1}" if run.epochs > 1 else str(run.first): [list(r) for r in run.ranges]
        for run in counted
    }


def _runs_from_json(found: dict[str, list[list[int]]]) -> Runs:
    """The slices that a file has. Raises ValueError, TypeError, AttributeError."""
    runs = []
    for name, ranges in found.items():
        first, _, last = name.partition("-")
        runs.append((int(first), int(last or first) - int(first) + 1, [(int(lo), int(hi)) for lo, hi in ranges]))
    return Counted(sorted(runs)).runs()


def _worker_names(file: TensorFile, name: str) -> dict[int, str]:
    try:
        return {int(ident): str(text) for ident, text in json.loads(file.metadata.get("names", "{}")).items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the names of workers in {name} are damaged") from error


def _ledger_rows(file: TensorFile) -> list[Row]:
    entry = file.entries.get("ledger")
    if entry is None:
        return []
    if entry.dtype != "int64" or len(entry.shape) != 2 or entry.shape[1] != _LEDGER_COLUMNS:
        raise CheckpointError("the ledger in a checkpoint is no table of five columns")
    numbers = array("q")
    numbers.frombytes(file.read("ledger", 0, entry.elements))
    columns = [numbers[column::_LEDGER_COLUMNS] for column in range(_LEDGER_COLUMNS)]
    return list(zip(*columns, strict=True))
