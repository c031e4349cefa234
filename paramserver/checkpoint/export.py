"""Checkpoints as files for others: one of torch, one of safetensors, or a directory as loaders of Hugging Face read it.

Weights get the types of the model again. All but the file of torch are written tensor by tensor.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format

from paramserver.checkpoint.contents import Contents, group_of, hypers_of
from paramserver.checkpoint.header import Entry, encode
from paramserver.checkpoint.manifest import Manifest
from paramserver.checkpoint.names import INDEX, temporary_name
from paramserver.checkpoint.place import Place, explained
from paramserver.checkpoint.storage.disk import DiskWriter
from paramserver.checkpoint.storage.folder import Bytes, Closing, write_whole
from paramserver.checkpoint.tensorfile import TensorFile
from paramserver.core.layout.hypers import Hypers, rule_of
from paramserver.core.layout.naming import plain_name
from paramserver.errors import CheckpointError, ConfigError
from paramserver.tensors.dtypes import SIZES, buffer_of, in_model_type, tensor_from, torch_dtype
from paramserver.tensors.hypers import optimizers_of
from paramserver.v1 import types_pb2

if TYPE_CHECKING:
    import torch

# As large as Hugging Face makes its files.
SHARD_BYTES = 5_000_000_000


class Saved(Closing):
    """The tensors of a checkpoint, open for reading. Raises CheckpointError for one that does not fit together."""

    def __init__(self, place: Place, manifest: Manifest) -> None:
        self.manifest = manifest
        self.model = types_pb2.ModelSpec()
        try:
            json_format.ParseDict(manifest.model, self.model, ignore_unknown_fields=True)
        except json_format.ParseError as error:
            raise CheckpointError(f"{manifest.name} describes its model in an unknown way: {error}") from error
        self._contents = Contents(place, manifest)
        try:
            for spec in self.model.tensors:
                self._check(spec)
        except BaseException:
            self.close()
            raise

    def _check(self, spec: types_pb2.TensorSpec) -> None:
        file = self._contents.weights.get(spec.name)
        if spec.dtype not in SIZES:
            raise CheckpointError(f"tensor {spec.name!r} is of type {spec.dtype[:40]!r}, which is not supported")
        if file is None or file.entries[spec.name].shape != tuple(spec.shape):
            raise CheckpointError(f"{self.manifest.name} lacks tensor {spec.name!r} of shape {list(spec.shape)}")

    def specs(self) -> list[types_pb2.TensorSpec]:
        """The tensors of a state_dict, which leaves some buffers out."""
        return [spec for spec in self.model.tensors if spec.persistent]

    def tensor(self, spec: types_pb2.TensorSpec) -> torch.Tensor:
        """A tensor in the model's type and shape."""
        file = self._contents.weights[spec.name]
        entry = file.entries[spec.name]
        flat = _flat(file, entry)
        wanted = torch_dtype(spec.dtype)
        values = in_model_type(flat, wanted) if flat.is_floating_point() else flat.to(wanted)
        return values.view(tuple(spec.shape))

    def state(self, spec: types_pb2.TensorSpec) -> dict[str, Any]:
        """The optimizer state of a parameter, by key; empty before its first update."""
        import torch

        rule = optimizers_of(self.model.optimizer).rule(spec.group)
        found: dict[str, Any] = {}
        parts = self._contents.states(spec.name)
        for key in sorted(rule.scalars | rule.arrays):
            pieces = [part for part in parts if part.key == key]
            if not pieces:
                continue
            if key in rule.scalars:  # each server that has a part of the tensor has written it
                number = _flat(pieces[0].file, pieces[0].entry)[:1].reshape(())
                found[key] = int(number) if key in rule.counts else number
                continue
            shape = rule.array_shape(key, tuple(spec.shape)) or ()
            at, elements = 0, math.prod(shape)
            for piece in pieces:
                if piece.start != at:
                    raise CheckpointError(f"{self.manifest.name} has no {key} of {spec.name!r} from element {at} on")
                at += piece.entry.elements
            if at != elements:
                raise CheckpointError(f"{self.manifest.name} has {at} elements of {elements} of {key} of {spec.name!r}")
            found[key] = torch.cat([_flat(piece.file, piece.entry) for piece in pieces]).view(shape)
        return found

    def close(self) -> None:
        self._contents.close()


def export(place: Place, manifest: Manifest, to: str, out: Path) -> list[Path]:
    """Write a checkpoint as ``to`` ("torch", "hf", "safetensors") to ``out``, which must not exist yet.

    Returns the files written. Raises ConfigError if ``out`` exists or its directory does not, and CheckpointError if
    the checkpoint does not fit together or the files cannot be written. What is read is not verified here.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} exists; remove it, or choose another name")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"there is no directory {out.absolute().parent}; create it")
    with Saved(place, manifest) as saved:
        return FORMATS[to](saved, out)


def state_dict(saved: Saved) -> dict[str, torch.Tensor]:
    """The state for ``model.load_state_dict``. Tied tensors are one tensor under all their names."""
    found: dict[str, torch.Tensor] = {}
    for spec in saved.specs():
        found |= dict.fromkeys(_all_names(spec), saved.tensor(spec))
    return found


def optimizer_state_dicts(saved: Saved) -> list[tuple[dict[str, Any], list[str]]]:
    """The state for ``load_state_dict`` of the same torch optimizer, and the parameters' names in the order of it.

    One for each class of optimizer, in the order of the parameter groups. The parameters are numbered group by group,
    in the order of the model. Empty if the job had no torch optimizer. Raises CheckpointError for an optimizer that
    servers do not know.
    """
    hypers = hypers_of(saved.model.optimizer, saved.manifest.name)
    optimizers = optimizers_of(saved.model.optimizer)
    specs: list[list[types_pb2.TensorSpec]] = [[] for _ in hypers]
    for spec in saved.model.tensors:
        if spec.kind == types_pb2.TENSOR_KIND_PARAMETER:
            group_of(spec, specs).append(spec)
    numbers = range(len(hypers))
    found = []
    for name, members in itertools.groupby(numbers, optimizers.of):
        if rule_of(name).title or rule_of(name).own:
            found.append(_described(saved, name, [(specs[number], hypers[number]) for number in members]))
    return found


def _described(
    saved: Saved, name: str, groups: Sequence[tuple[list[types_pb2.TensorSpec], Hypers]]
) -> tuple[dict[str, Any], list[str]]:
    """The state dict of one optimizer with these groups, and the names of its parameters."""
    import torch

    from paramserver.tensors.optimizers import arguments

    # torch itself says what else a parameter group has in this version; the tensors here have no memory.
    made: list[dict[str, Any]] = []
    for specs, hypers in groups:
        params = [torch.empty(tuple(spec.shape), device="meta") for spec in specs]
        made.append({"params": params, **arguments(name, hypers)})
    described: dict[str, Any] = _plain_groups(made) if rule_of(name).own else _torch_class(name)(made).state_dict()
    ordered = [spec for specs, _ in groups for spec in specs]
    states = {number: saved.state(spec) for number, spec in enumerate(ordered)}
    described["state"] = {number: state for number, state in states.items() if state}
    return described, [plain_name(spec.name) for spec in ordered]


def _torch_class(name: str) -> Any:
    from paramserver.tensors.optimizers import torch_class

    return torch_class(name)


def _plain_groups(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state dict of an optimizer without state, whose class need not be here."""
    numbers = itertools.count()
    described = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups]
    return {"state": {}, "param_groups": described}


# ---- the formats


def _to_torch(saved: Saved, out: Path) -> list[Path]:
    import torch

    manifest = saved.manifest
    content: dict[str, Any] = {
        "model": state_dict(saved),
        "job": manifest.job,
        "version": manifest.version,
        "timeline": manifest.timeline,
    }
    found = optimizer_state_dicts(saved)
    if found:
        states, names = [state for state, _ in found], [named for _, named in found]
        several = len(found) > 1
        content["optimizer"], content["optimizer_names"] = (states, names) if several else found[0]
    temporary = out.with_name(temporary_name(out.name))
    try:
        with explained("write", str(out)):
            try:
                with temporary.open("xb") as file:
                    torch.save(content, file)
                    file.flush()
                    os.fsync(file.fileno())
            except RuntimeError as error:  # torch's own, when it cannot write
                raise OSError(str(error)) from error
            os.replace(temporary, out)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return [out]


def _to_safetensors(saved: Saved, out: Path) -> list[Path]:
    specs = saved.specs()
    entries = [(spec, Entry(name, spec.dtype, tuple(spec.shape))) for spec in specs for name in _all_names(spec)]
    _write_tensors(saved, out, entries)
    return [out]


def _to_hf(saved: Saved, out: Path) -> list[Path]:
    shards: list[list[tuple[types_pb2.TensorSpec, Entry]]] = [[]]
    filled = total = 0
    for spec in saved.specs():
        entry = Entry(plain_name(spec.name), spec.dtype, tuple(spec.shape))
        if shards[-1] and filled + entry.nbytes > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append((spec, entry))
        filled += entry.nbytes
        total += entry.nbytes
    where: dict[str, str] = {}
    temporary = out.with_name(temporary_name(out.name))
    try:
        with explained("write", str(out)):
            temporary.mkdir()
            for number, shard in enumerate(shards, 1):
                name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
                _write_tensors(saved, temporary / name, shard)
                where |= {entry.name: name for _, entry in shard}
            index = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True)
            _write(temporary / INDEX, [index.encode(), b"\n"])
            temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(out.iterdir())


FORMATS: Mapping[str, Callable[[Saved, Path], list[Path]]] = {
    "torch": _to_torch,
    "hf": _to_hf,
    "safetensors": _to_safetensors,
}


def _write_tensors(saved: Saved, path: Path, entries: Sequence[tuple[types_pb2.TensorSpec, Entry]]) -> None:
    """One file of safetensors. Large elements first, so that every tensor lies at a multiple of its element's size."""
    ordered = sorted(entries, key=lambda pair: -SIZES[pair[1].dtype])
    manifest = saved.manifest
    metadata = {"format": "pt", "version": str(manifest.version), "timeline": str(manifest.timeline)}

    def content() -> Iterator[Bytes]:
        yield encode([entry for _, entry in ordered], metadata)
        for spec, _ in ordered:
            yield buffer_of(saved.tensor(spec))

    _write(path, content())


def _write(path: Path, content: Iterable[Bytes]) -> None:
    with explained("write", str(path)):
        write_whole(DiskWriter(path.parent, temporary_name(path.name)), path.name, content)


def _all_names(spec: types_pb2.TensorSpec) -> tuple[str, ...]:
    return tuple(map(plain_name, (spec.name, *spec.aliases)))


def _flat(file: TensorFile, entry: Entry) -> torch.Tensor:
    """All elements of a tensor in a file, in memory of their own."""
    return tensor_from(bytearray(file.read(entry.name, 0, entry.elements)), entry.dtype)
