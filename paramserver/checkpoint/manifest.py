"""MANIFEST.json lists the files of a checkpoint and is written last. Without a whole one there is no checkpoint."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any, cast

from paramserver.checkpoint.header import LENGTH, load_json
from paramserver.checkpoint.names import checkpoint_name, is_file_name, parse_name
from paramserver.checkpoint.tensorfile import FileInfo
from paramserver.config import is_job_name
from paramserver.errors import CheckpointError

__all__ = ["FORMAT_VERSION", "Manifest", "NewerFormatError", "checkpoint_name", "decode", "encode", "parse_name"]

FORMAT_VERSION = 1
# The file with the state of registered objects, if a checkpoint has one.
REGISTERED = "registered.safetensors"
MAX_BYTES = 256 << 20

_MAX_NUMBER = 10**18 - 1
_MAX_SERVERS = 1 << 16
_HEX = re.compile(r"[0-9a-f]{1,128}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
# Copies that a server keeps of checkpoints that are not complete yet: one is being written, one waits.
COPIES_KEPT = 2


class NewerFormatError(CheckpointError):
    """The checkpoint was written by a later version of paramserver, which alone may change it."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One checkpoint.

    ``version``, ``timeline``, ``term``: which weights these are, and the coordinator that had them saved. ``weights``
    and ``state``: one file each per server, in the order of their indices. ``model``: the ModelSpec as protobuf JSON.
    ``position``: where training stands (data, schedule, consistency, seed). ``run``: how it was started. Both are JSON
    that belongs to others. ``written``: ISO 8601, UTC. ``paramserver``, ``torch``: versions. ``finite``: False if some
    weight is NaN or infinite; such a checkpoint is complete, but not good.
    """

    job: str
    timeline: int
    version: int
    term: int
    servers: int
    layout_digest: str
    model: dict[str, Any]
    weights: tuple[FileInfo, ...]
    state: tuple[FileInfo, ...]
    position: dict[str, Any]
    run: dict[str, Any]
    written: str
    paramserver: str
    torch: str
    finite: bool = True

    @property
    def name(self) -> str:
        """The checkpoint's directory."""
        return checkpoint_name(self.version, self.timeline)

    @property
    def history(self) -> str:
        """The history that wrote it (see `owner`), which stands with where training stands; "" if none does."""
        named = self.position.get("histories")
        first = named[0] if isinstance(named, list) and named else ""
        return first if isinstance(first, str) else ""

    @property
    def files(self) -> tuple[FileInfo, ...]:
        """All files that belong to it."""
        return (*self.weights, *self.state, *self._registered)

    @property
    def _registered(self) -> tuple[FileInfo, ...]:
        """The file with the state of registered objects, which stands with where training stands."""
        named = self.position.get("registered")
        if not isinstance(named, dict) or named.get("name") != REGISTERED:
            return ()
        size, sha256 = str(named.get("bytes", "")), str(named.get("sha256", ""))
        _require(size.isdigit() and _SHA256.fullmatch(sha256) is not None, "position")
        return (FileInfo(REGISTERED, int(size), sha256),)

    @property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        return sum(info.bytes for info in self.files)


def encode(manifest: Manifest) -> bytes:
    """The text of MANIFEST.json. Raises CheckpointError for one that could not be read again."""
    table: dict[str, Any] = {**asdict(manifest), "format_version": FORMAT_VERSION}
    try:
        table["sha256"] = _digest(table)
        text = json.dumps(table, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the manifest of {manifest.name} cannot be written as JSON: {error}") from error
    if decode(text) != manifest:
        raise CheckpointError(f"the manifest of {manifest.name} holds values that JSON does not keep, such as tuples")
    return text


def decode(text: bytes) -> Manifest:
    """The manifest in a MANIFEST.json. Raises CheckpointError that says what is wrong with it."""
    table = load_json(text)
    if not isinstance(table, dict):
        raise CheckpointError("the manifest is no object")
    _check_format(table.get("format_version"))
    expected = {field.name for field in fields(Manifest)} | {"format_version", "sha256"}
    if set(table) != expected:
        odd = sorted(str(name)[:40] for name in set(table) ^ expected)
        raise CheckpointError(f"the manifest lacks, or should not have, {', '.join(odd[:5])}")
    if table["sha256"] != _digest(table):
        raise CheckpointError("the manifest is damaged: its content is not what was written (SHA-256)")
    values: dict[str, Any] = {field.name: table[field.name] for field in fields(Manifest)}
    _check(values)
    values |= {key: _infos(key, values[key], values["servers"]) for key in ("weights", "state")}
    names = [info.name for key in ("weights", "state") for info in values[key]]
    if len(set(names)) != len(names):
        raise CheckpointError("the manifest names a file twice")
    return Manifest(**values)


def _digest(table: Mapping[str, Any]) -> str:
    """SHA-256 over all but itself, so that a flipped bit does not go unnoticed."""
    rest = {key: value for key, value in table.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_format(number: object) -> None:
    if type(number) is not int or number < 1:
        raise CheckpointError("the manifest does not say which format it has")
    if number > FORMAT_VERSION:
        raise NewerFormatError(
            f"it has format {number}, which a later paramserver has written; this one reads up to {FORMAT_VERSION}: "
            "use that one"
        )


def _check(values: Mapping[str, Any]) -> None:
    """Raises CheckpointError, with the name of the field, for a value that cannot be right."""
    for key in ("timeline", "version", "term"):
        _require(type(values[key]) is int and 0 <= values[key] <= _MAX_NUMBER, key)
    _require(type(values["servers"]) is int and 1 <= values["servers"] <= _MAX_SERVERS, "servers")
    _require(type(values["finite"]) is bool, "finite")
    for key in ("job", "layout_digest", "written", "paramserver", "torch"):
        text = values[key]
        _require(isinstance(text, str) and len(text) <= 200 and (text.isprintable() or not text), key)
    _require(is_job_name(values["job"]), "job")
    _require(_HEX.fullmatch(values["layout_digest"]) is not None, "layout_digest")
    for key in ("model", "position", "run"):
        _require(isinstance(values[key], dict), key)
    try:
        zone = datetime.fromisoformat(values["written"]).utcoffset()
    except ValueError:
        zone = None
    _require(zone is not None, "written")


def _infos(key: str, found: object, servers: int) -> tuple[FileInfo, ...]:
    _require(isinstance(found, list) and len(found) == servers, key)
    infos = []
    for item in cast("list[object]", found):
        if not isinstance(item, dict) or set(item) != {"name", "bytes", "sha256"}:
            raise _wrong(key)
        name, size, sha256 = item["name"], item["bytes"], item["sha256"]
        _require(isinstance(name, str) and is_file_name(name) and name.endswith(".safetensors"), key)
        _require(type(size) is int and LENGTH.size < size <= _MAX_NUMBER, key)
        _require(isinstance(sha256, str) and _SHA256.fullmatch(sha256) is not None, key)
        infos.append(FileInfo(name, size, sha256))
    return tuple(infos)


def _require(right: bool, key: str) -> None:
    if not right:
        raise _wrong(key)


def _wrong(key: str) -> CheckpointError:
    return CheckpointError(f'the manifest has a value in "{key}" that cannot be right')
