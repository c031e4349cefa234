"""BEST.json in a place of checkpoints: the best checkpoints by a logged value, the best one first."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from paramserver.checkpoint.header import load_json
from paramserver.checkpoint.names import BEST, parse_name
from paramserver.checkpoint.place import Place
from paramserver.errors import CheckpointError

_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Ranked:
    """A checkpoint with its value. ``history``: the one that wrote it (see `owner`)."""

    name: str
    history: str
    metric: str
    value: float


def write(place: Place, ranked: Sequence[Ranked]) -> None:
    """Write the file. Raises CheckpointError."""
    rows = [{"name": r.name, "history": r.history, "metric": r.metric, "value": r.value} for r in ranked]
    place.top.write_atomically(BEST, json.dumps({"best": rows}, indent=1).encode() + b"\n")


def read(place: Place) -> list[Ranked]:
    """The best checkpoints, the best one first; none if there is no such file, or none that makes sense."""
    try:
        if not place.top.exists(BEST):
            return []
        table = load_json(place.top.read(BEST, _MAX_BYTES))
        rows = table["best"] if isinstance(table, dict) else []
        found = [Ranked(r["name"], r["history"], r["metric"], float(r["value"])) for r in rows]
    except (CheckpointError, KeyError, TypeError, ValueError, OverflowError):
        return []
    texts = all(isinstance(text, str) and text.isprintable() for r in found for text in (r.name, r.history, r.metric))
    whole = texts and all(parse_name(r.name) is not None and math.isfinite(r.value) for r in found)
    return found if whole else []
