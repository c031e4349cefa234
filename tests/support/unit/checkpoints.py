"""Small checkpoints for the tests, saved the way servers and coordinator do it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import json_format

from paramserver.checkpoint.catalog import write_manifest
from paramserver.checkpoint.manifest import Manifest, checkpoint_name
from paramserver.checkpoint.place import Place
from paramserver.checkpoint.tensorfile import Entry, FileInfo, TensorFile, write_tensors
from paramserver.v1 import types_pb2
from paramserver.wire.messages import layout_of

# The places at which a crash may strike while a step is saved, in this order.
WRITING = (
    "ckpt.tmp_open",
    "ckpt.mid_write",
    "ckpt.before_fsync",
    "ckpt.before_rename",
    "ckpt.before_dirsync",
    "ckpt.shard_done",
)
PLACES = (*WRITING, "ckpt.manifest", "ckpt.gc")

MODEL: dict[str, Any] = {
    "tensors": [
        {
            "name": "weight",
            "shape": ["2", "3"],
            "dtype": "float32",
            "kind": "TENSOR_KIND_PARAMETER",
            "persistent": True,
        },
        {"name": "bias", "shape": ["4"], "dtype": "float32", "kind": "TENSOR_KIND_PARAMETER", "persistent": True},
    ],
    "optimizer": {
        "name": "sgd",
        "groups": [
            {
                "hypers": [
                    {"name": "dampening", "number": 0.0},
                    {"name": "lr", "number": 0.1},
                    {"name": "maximize", "flag": False},
                    {"name": "momentum", "number": 0.9},
                    {"name": "nesterov", "flag": False},
                    {"name": "weight_decay", "number": 0.0},
                ]
            }
        ],
    },
}
# Where training stands; servers and coordinator ignore what they do not know.
POSITION: dict[str, Any] = {
    "view": {"consistency": {"mode": "MODE_SYNC"}, "slices_per_step": 2},
    "seed": 7,
}


def facts(version: int, **others: Any) -> dict[str, str]:
    """What a shard knows beside its tensors, as it stands in its file."""
    numbers = {"applied": 2 * version, "skipped": 0, "samples": 20 * version, "folded_steps": 0}
    return {"shard": json.dumps({"version": version, **numbers, "counted": {}, **others})}


def digest(model: dict[str, Any]) -> str:
    """Of the layout of a model."""
    return layout_of(json_format.ParseDict(model, types_pb2.ModelSpec())).digest


def save_files(
    place: Place, version: int, timeline: int = 1, fill: float | None = None
) -> tuple[tuple[FileInfo, ...], tuple[FileInfo, ...]]:
    """Weights and state of two servers, all numbers equal to ``fill``, or to the version."""
    value = float(version) if fill is None else fill
    weights, state = [], []
    for server, entry in enumerate((Entry("weight", "float32", (2, 3)), Entry("bias", "float32", (4,)))):
        data = np.full(entry.shape, value, np.float32).tobytes()
        checkpoint = checkpoint_name(version, timeline)
        name = f"weights-{server}-of-2.safetensors"
        weights.append(write_tensors(place, checkpoint, name, [entry], [data], {}, version))
        piece = Entry(f"optimizer/{entry.name}/momentum_buffer", "float32", entry.shape)
        name = f"state-{server}-of-2.safetensors"
        state.append(write_tensors(place, checkpoint, name, [piece], [data], facts(version), version))
    return tuple(weights), tuple(state)


def manifest(
    weights: Sequence[FileInfo], state: Sequence[FileInfo], version: int = 50, timeline: int = 1, **others: Any
) -> Manifest:
    """The manifest of these files."""
    made = Manifest(
        job="digits",
        timeline=timeline,
        version=version,
        term=3,
        servers=len(weights),
        layout_digest=digest(MODEL),
        model=MODEL,
        weights=tuple(weights),
        state=tuple(state),
        position=POSITION,
        run={"script": "digits.py", "args": ["--fast"]},
        written="2026-11-21T15:00:00+00:00",
        paramserver="0.1.0",
        torch="2.13.0",
    )
    return dataclasses.replace(made, **others)


def save(place: Place, version: int, timeline: int = 1, fill: float | None = None, **others: Any) -> Manifest:
    """A whole checkpoint."""
    weights, state = save_files(place, version, timeline, fill)
    made = manifest(weights, state, version, timeline, **others)
    write_manifest(place, made)
    return made


def content(place: Place, made: Manifest) -> set[float]:
    """All numbers in a checkpoint; one if it is not mixed from several."""
    found: set[float] = set()
    for info in made.files:
        with TensorFile(place, made.name, info) as file:
            for entry in file.entries.values():
                found |= set(np.frombuffer(file.read(entry.name, 0, entry.elements), np.float32).tolist())
    return found


def temporary_files(directory: Path) -> list[Path]:
    """Files of a local place that have no name yet."""
    return [path for path in directory.rglob("*") if path.name.startswith(".tmp-")]


class Crash(BaseException):
    """The end of the process, as far as a test in one process can see."""


class Watch:
    """A plan that only writes down where the code has been."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def reached(self, name: str, step: int) -> None:
        self.seen.append(name)

    def touched(self, writes: bool) -> None:
        """See `failpoints.Plan`."""

    def plans(self, name: str) -> bool:
        return False

    def through(self, channel: Any) -> Any:
        return channel

    def named(self, name: str) -> None:
        pass


class CrashAt(Watch):
    """A plan that ends everything when ``name`` is reached for the ``nth`` time."""

    def __init__(self, name: str, nth: int = 1, error: BaseException | None = None) -> None:
        super().__init__()
        self.name = name
        self.left = nth
        self.error = error if error is not None else Crash(name)

    @property
    def fired(self) -> bool:
        return self.left == 0

    def reached(self, name: str, step: int) -> None:
        super().reached(name, step)
        if name == self.name and self.left:
            self.left -= 1
            if not self.left:
                raise self.error
