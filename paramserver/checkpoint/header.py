"""The header of a safetensors file: eight bytes of its length (little-endian), JSON, then the bytes of the tensors.

The JSON says of each tensor its type, its shape, and where its bytes begin and end after the header. Together the
tensors fill the rest of the file without a hole or an overlap. The file may come from anywhere, so everything in it is
checked.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from paramserver.errors import CheckpointError
from paramserver.tensors.dtypes import SIZES

# The limits of the format's own reader, and those of a model on the wire.
MAX_HEADER_BYTES = 100_000_000
MAX_NAME_CHARS = 1024
MAX_DIMENSIONS = 64
MAX_ELEMENTS = 1 << 48

LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_CODES: Mapping[str, str] = MappingProxyType(
    {
        "bool": "BOOL",
        "uint8": "U8",
        "int8": "I8",
        "int16": "I16",
        "int32": "I32",
        "int64": "I64",
        "float16": "F16",
        "bfloat16": "BF16",
        "float32": "F32",
        "float64": "F64",
    }
)
_NAMES: Mapping[str, str] = MappingProxyType({code: name for name, code in _CODES.items()})


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: its name, its torch type ("float32", "bfloat16", "int64", "bool") and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many numbers the tensor has; one if it has no dimensions."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.elements * SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Header:
    """The content of a file. ``offsets``: where each tensor begins, in bytes from the start of the file."""

    entries: Mapping[str, Entry]
    offsets: Mapping[str, int]
    metadata: Mapping[str, str]


def encode(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file that holds ``entries`` in this order. Raises CheckpointError for an invalid entry."""
    table: dict[str, object] = {_METADATA: {"format": "pt", **metadata}}
    start = 0
    for entry in entries:
        problem = _problem(entry)
        if not problem and entry.name in table:
            problem = "is there twice"
        if problem:
            raise CheckpointError(f"tensor {entry.name[:80]!r} cannot be saved: it {problem}")
        end = start + entry.nbytes
        table[entry.name] = {"dtype": _CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH.size)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"the names of {len(entries)} tensors take more than {MAX_HEADER_BYTES} bytes")
    return LENGTH.pack(len(text)) + text


def header_bytes(first: bytes, size: int) -> int:
    """Length of the JSON, from the first eight bytes of a file of ``size`` bytes. Raises CheckpointError."""
    if len(first) < LENGTH.size:
        raise CheckpointError(f"it has {size} bytes and is no safetensors file")
    (length,) = LENGTH.unpack(first[: LENGTH.size])
    if not 2 <= length <= MAX_HEADER_BYTES or LENGTH.size + length > size:
        raise CheckpointError(f"its header would have {length} bytes, in a file of {size}")
    return int(length)


def decode(text: bytes, size: int) -> Header:
    """The header from its JSON, in a file of ``size`` bytes. Raises CheckpointError."""
    table = load_json(text)
    if not isinstance(table, dict):
        raise CheckpointError("its header is no object")
    metadata = table.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError("its metadata are no texts")
    found = sorted((_entry(name, value) for name, value in table.items()), key=lambda item: item[1:])
    begin = LENGTH.size + len(text)
    position = 0
    for entry, start, end in found:
        if start != position:
            raise CheckpointError(f"tensor {entry.name!r} begins at {start}, where {position} was to be")
        if end - start != entry.nbytes:
            raise CheckpointError(f"tensor {entry.name!r} has {end - start} bytes, and its shape {entry.nbytes}")
        position = end
    if begin + position != size:
        raise CheckpointError(f"it has {size} bytes, and its header speaks of {begin + position}")
    return Header(
        MappingProxyType({entry.name: entry for entry, _, _ in found}),
        MappingProxyType({entry.name: begin + start for entry, start, _ in found}),
        MappingProxyType(metadata),
    )


def _entry(name: str, value: object) -> tuple[Entry, int, int]:
    wrong = CheckpointError(f"its header describes tensor {name[:80]!r} in a way that is not the format's")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise wrong
    shape, offsets = value["shape"], value["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or not isinstance(value["dtype"], str):
        raise wrong
    dtype = _NAMES.get(value["dtype"])
    if dtype is None:
        raise CheckpointError(f"tensor {name[:80]!r} is of type {value['dtype'][:40]!r}, which is not supported")
    entry = Entry(name, dtype, tuple(shape))
    problem = _problem(entry)
    if problem:
        raise CheckpointError(f"tensor {name[:80]!r} {problem}")
    return entry, offsets[0], offsets[1]


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 1 << 63 for number in value)


def _problem(entry: Entry) -> str:
    """The reason why a tensor is refused; empty if it is not."""
    if not 0 < len(entry.name) <= MAX_NAME_CHARS or not entry.name.isprintable() or entry.name == _METADATA:
        return f"has a name that is not 1 to {MAX_NAME_CHARS} printable characters"
    if entry.dtype not in SIZES:
        return f"is of type {entry.dtype[:40]!r}, which is not supported"
    if len(entry.shape) > MAX_DIMENSIONS or any(extent < 0 for extent in entry.shape):
        return f"has {len(entry.shape)} dimensions, of {MAX_DIMENSIONS}, or a negative one"
    if entry.elements > MAX_ELEMENTS:
        return f"has {entry.elements} elements, more than {MAX_ELEMENTS}"
    return ""


def load_json(text: bytes) -> object:
    """Parse JSON. Raises CheckpointError, also for doubled names, NaN and infinite numbers."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"it is no proper JSON: {str(error)[:120]}") from error


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no number")
