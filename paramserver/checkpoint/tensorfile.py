"""Files of tensors, in the format of safetensors, written and read in pieces: a file may be larger than the memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paramserver.checkpoint.header import LENGTH, Entry, decode, encode, header_bytes
from paramserver.checkpoint.names import another_name, is_file_name
from paramserver.checkpoint.place import Place, explained
from paramserver.checkpoint.storage.folder import Bytes, Closing, Reader, Writer
from paramserver.errors import CheckpointError
from paramserver.failpoints import reach
from paramserver.tensors.dtypes import SIZES

__all__ = ["Entry", "FileInfo", "TensorFile", "write_tensors"]

# Hashed and written, or read, at a time.
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file of a checkpoint: its name, its size in bytes and its SHA-256 (hexadecimal)."""

    name: str
    bytes: int
    sha256: str


def write_tensors(
    place: Place,
    checkpoint: str,
    name: str,
    entries: Sequence[Entry],
    data: Iterable[Bytes],
    metadata: Mapping[str, str],
    step: int = -1,
) -> FileInfo:
    """Write a file of tensors and return when it is safe on its medium.

    ``data``: buffers that together are the bytes of ``entries`` in order, cut anywhere; each is used up before the next
    one is asked for. ``step``: for failpoints. The file appears under its name at once and whole. An earlier attempt
    to save this step may have left a file of that name. Then that file stays, and the new one gets another name, which
    stands in the result. Raises CheckpointError, and leaves no temporary file behind.
    """
    if not is_file_name(name):
        raise CheckpointError(f"{name[:80]!r} is no name of a file in a checkpoint")
    head = encode(entries, metadata)
    size = len(head) + sum(entry.nbytes for entry in entries)
    inside = place.inside(checkpoint)
    writer = inside.create(name)
    try:
        with explained("write", inside.where(name)):
            reach("ckpt.tmp_open", step)
            sha256 = _write(writer, head, data, size, step)
            reach("ckpt.before_fsync", step)
            writer.sync()
        info = FileInfo(another_name(name, sha256) if inside.exists(name) else name, size, sha256)
        with explained("write", inside.where(name)):
            reach("ckpt.before_rename", step)
            writer.commit(info.name)
            reach("ckpt.before_dirsync", step)
            writer.sync_folder()
            reach("ckpt.shard_done", step)
    except BaseException:
        writer.discard()
        raise
    return info


def _write(writer: Writer, head: bytes, data: Iterable[Bytes], size: int, step: int) -> str:
    """Write header and tensors; the SHA-256 of both."""
    digest = hashlib.sha256(head)
    writer.write(head)
    written, middle = len(head), (len(head) + size) // 2
    if written == middle:  # there are no tensors, or only empty ones
        reach("ckpt.mid_write", step)
    for buffer in data:
        rest = memoryview(buffer).cast("B")
        if written + len(rest) > size:
            raise CheckpointError(f"tensors of {size - len(head)} bytes were announced, and more have come")
        while rest:
            until_middle = middle - written if written < middle else _PIECE_BYTES
            piece = rest[: min(_PIECE_BYTES, until_middle)]
            digest.update(piece)
            writer.write(piece)
            rest = rest[len(piece) :]
            written += len(piece)
            if written == middle:
                reach("ckpt.mid_write", step)
    if written != size:
        raise CheckpointError(
            f"tensors of {size - len(head)} bytes were announced, and {written - len(head)} have come"
        )
    return digest.hexdigest()


class TensorFile(Closing):
    """A file of tensors, open for reading; close it, or use it in ``with``.

    Raises CheckpointError for a file of another size than ``info`` says, and for one whose header is not right. The
    content is not hashed before :meth:`verify`. Several threads may read at once.
    """

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]

    def __init__(self, place: Place, checkpoint: str, info: FileInfo) -> None:
        inside = place.inside(checkpoint)
        self._where = inside.where(info.name)
        self._info = info
        self._reader: Reader = inside.open(info.name)
        try:
            if self._reader.size != info.bytes:
                raise CheckpointError(f"{self._where} has {self._reader.size} bytes, and should have {info.bytes}")
            try:
                length = header_bytes(self._take(0, min(LENGTH.size, info.bytes)), info.bytes)
                header = decode(self._take(LENGTH.size, length), info.bytes)
            except CheckpointError as error:
                raise CheckpointError(f"{self._where} is damaged: {error}") from error
        except BaseException:
            self._reader.close()
            raise
        self.entries, self.metadata, self._offsets = header.entries, header.metadata, header.offsets

    def read(self, name: str, start: int, count: int) -> bytes:
        """The bytes of elements ``[start, start + count)`` of a tensor, in the order of its memory.

        Raises CheckpointError for a tensor or elements that the file does not have.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self._where} has no tensor {name[:80]!r}")
        if start < 0 or count < 0 or start + count > entry.elements:
            raise CheckpointError(
                f"{self._where} has {entry.elements} elements of {name!r}, not those from {start} to {start + count}"
            )
        size = SIZES[entry.dtype]
        return self._take(self._offsets[name] + start * size, count * size)

    def verify(self) -> None:
        """Read the whole file and compare its SHA-256. Raises CheckpointError."""
        digest = hashlib.sha256()
        for start in range(0, self._info.bytes, _PIECE_BYTES):
            digest.update(self._take(start, min(_PIECE_BYTES, self._info.bytes - start)))
        if digest.hexdigest() != self._info.sha256:
            raise CheckpointError(f"{self._where} is damaged: its content is not what was written (SHA-256)")

    def close(self) -> None:
        self._reader.close()

    def _take(self, start: int, count: int) -> bytes:
        with explained("read", self._where):
            data = self._reader.read(start, count)
        if len(data) != count:
            raise CheckpointError(f"{self._where} ends early: {len(data)} of {count} bytes from {start} on")
        return data
