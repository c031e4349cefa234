"""Our files are safetensors files, to the byte; what is not one is refused; a failed write leaves nothing behind."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from paramserver.checkpoint.header import decode, encode, header_bytes
from paramserver.checkpoint.place import Place
from paramserver.checkpoint.tensorfile import Entry, FileInfo, TensorFile, write_tensors
from paramserver.errors import CheckpointError
from paramserver.failpoints import arm
from paramserver.tensors.dtypes import SIZES, buffer_of, dtype_name, torch_dtype
from tests.support.unit.checkpoints import WRITING, CrashAt, Watch, temporary_files

NAME = "step-00000050-t1"
FILE = "weights.safetensors"


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    arm(None)


def tensors() -> dict[str, torch.Tensor]:
    """One of every type, and the awkward shapes."""
    torch.manual_seed(0)
    made = {f"a.{dtype}": (torch.randn(3, 5) * 100).to(torch_dtype(dtype)) for dtype in SIZES}
    made["empty"] = torch.zeros(0, 7)
    made["scalar"] = torch.tensor(7, dtype=torch.int64)
    made["naïve name"] = torch.tensor([float("nan"), float("inf"), -0.0])
    return made


def entries_of(state: dict[str, torch.Tensor]) -> list[Entry]:
    return [Entry(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in state.items()]


def write(place: Place, state: dict[str, torch.Tensor], **metadata: str) -> FileInfo:
    data = [buffer_of(tensor) for tensor in state.values()]
    return write_tensors(place, NAME, FILE, entries_of(state), data, metadata, 50)


def test_the_real_library_reads_what_we_write(tmp_path: Path) -> None:
    state = tensors()
    info = write(Place(str(tmp_path)), state, version="50")
    path = tmp_path / NAME / FILE
    assert info.bytes == path.stat().st_size
    loaded = load_file(path)
    assert set(loaded) == set(state)
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert bytes(buffer_of(loaded[name])) == bytes(buffer_of(tensor))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "version": "50"}


def test_we_read_what_we_write_and_in_parts(tmp_path: Path) -> None:
    state = tensors()
    place = Place(str(tmp_path))
    with TensorFile(place, NAME, write(place, state)) as file:
        file.verify()
        assert list(file.entries.values()) == entries_of(state)
        for name, tensor in state.items():
            whole = bytes(buffer_of(tensor))
            assert file.read(name, 0, tensor.numel()) == whole
            size = tensor.element_size()
            for start in range(tensor.numel()):
                assert file.read(name, start, 1) == whole[start * size : (start + 1) * size]
        for start, count in ((-1, 1), (0, 16), (15, 1), (0, -1)):
            with pytest.raises(CheckpointError, match=r"elements of 'a.float32', not those"):
                file.read("a.float32", start, count)
        with pytest.raises(CheckpointError, match=r"no tensor 'a.float8'"):
            file.read("a.float8", 0, 1)


def test_we_read_what_the_real_library_writes(tmp_path: Path) -> None:
    state = tensors()
    text = save(state, {"format": "pt"})
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / FILE).write_bytes(text)
    with TensorFile(Place(str(tmp_path)), NAME, FileInfo(FILE, len(text), "")) as file:
        for name, tensor in state.items():
            assert file.read(name, 0, tensor.numel()) == bytes(buffer_of(tensor))


@given(cuts=st.lists(st.integers(0, 44), max_size=8))
def test_the_data_may_be_cut_anywhere(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    place = Place(str(tmp_path_factory.mktemp("cuts")))
    data = bytes(range(44))
    edges = [0, *sorted(cuts), 44]
    parts = [data[a:b] for a, b in itertools.pairwise(edges)]
    plan = Watch()
    arm(plan)
    info = write_tensors(
        place, NAME, FILE, [Entry("a", "float32", (3,)), Entry("b", "uint8", (32,))], parts, {}, step=50
    )
    assert plan.seen == list(WRITING)  # the middle is passed once, wherever it lies
    with TensorFile(place, NAME, info) as file:
        file.verify()
        assert file.read("a", 0, 3) + file.read("b", 0, 32) == data


def test_the_middle_of_the_bytes_is_the_middle(tmp_path: Path) -> None:
    place = Place(str(tmp_path))
    sizes: list[int] = []

    class Look(Watch):
        def reached(self, name: str, step: int) -> None:
            assert step == 50
            if name == "ckpt.mid_write":
                sizes.extend(path.stat().st_size for path in temporary_files(tmp_path))

    arm(Look())
    info = write_tensors(place, NAME, FILE, [Entry("a", "uint8", (5000,))], [bytes(5000)], {}, 50)
    assert sizes == [info.bytes - 2500]


def test_more_or_fewer_bytes_than_announced_are_an_error(tmp_path: Path) -> None:
    place = Place(str(tmp_path))
    for data in ([b"123"], [b"1234", b"5"], []):
        with pytest.raises(CheckpointError, match="tensors of 4 bytes were announced"):
            write_tensors(place, NAME, FILE, [Entry("a", "float32", (1,))], data, {})
    assert list((tmp_path / NAME).iterdir()) == []


@pytest.mark.parametrize(
    "entry",
    [
        Entry("", "float32", (1,)),
        Entry("a\0b", "float32", (1,)),
        Entry("__metadata__", "float32", (1,)),
        Entry("x" * 1025, "float32", (1,)),
        Entry("a", "complex64", (1,)),
        Entry("a", "float32", (-1,)),
        Entry("a", "float32", (1 << 40, 1 << 40)),
        Entry("a", "float32", (1,) * 65),
    ],
    ids=str,
)
def test_what_the_format_cannot_hold_is_not_written(tmp_path: Path, entry: Entry) -> None:
    with pytest.raises(CheckpointError, match="cannot be saved"):
        write_tensors(Place(str(tmp_path)), NAME, FILE, [entry], [], {})
    assert not (tmp_path / NAME).exists()


def test_a_name_that_is_there_twice_is_not_written() -> None:
    with pytest.raises(CheckpointError, match="there twice"):
        encode([Entry("a", "bool", (1,)), Entry("a", "bool", (1,))], {})


def test_servers_write_into_one_checkpoint_at_the_same_time(tmp_path: Path) -> None:
    place = Place(str(tmp_path))
    together = Barrier(8)

    def one(number: int) -> FileInfo:
        together.wait(20)
        data = bytes([number]) * 1000
        return write_tensors(place, NAME, f"{number}.safetensors", [Entry("a", "uint8", (1000,))], [data], {})

    with ThreadPoolExecutor(8) as pool:
        infos = list(pool.map(one, range(8)))
    for number, info in enumerate(infos):
        with TensorFile(place, NAME, info) as file:
            file.verify()
            assert set(file.read("a", 0, 1000)) == {number}


# ---- failures while writing


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("name", [*WRITING[:-1], "create", "write", "fsync", "replace"])
def test_a_failed_write_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    """A disk that is full (E10) or broken (E11), at every stage of a file."""
    place = Place(str(tmp_path))
    place.inside(NAME).write_atomically("other.json", b"{}")
    fired = []

    def fail(*_: Any, **__: Any) -> Any:
        fired.append(name)
        raise OSError(code, "broken, as planned")

    if name.startswith("ckpt."):
        plan = CrashAt(name, error=OSError(code, "broken, as planned"))
        arm(plan)
    else:
        monkeypatch.setattr(os, {"create": "open"}.get(name, name), fail)
    with pytest.raises(CheckpointError, match=r"cannot write .*weights.safetensors: broken, as planned"):
        write_tensors(place, NAME, FILE, [Entry("a", "float32", (8,))], [bytes(32)], {}, 50)
    monkeypatch.undo()
    assert plan.fired if name.startswith("ckpt.") else len(fired) == 1  # what failed is not tried again
    assert temporary_files(tmp_path) == []
    left = {path.name for path in (tmp_path / NAME).iterdir()}
    assert left == {"other.json"} | ({FILE} if name == "ckpt.before_dirsync" else set())


def test_a_name_that_never_reached_the_medium_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory's fsync fails; the file's own did not."""
    place = Place(str(tmp_path))
    place.inside(NAME).write_atomically("other.json", b"{}")
    calls: list[int] = []

    def second_fails(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(errno.EIO, "broken, as planned")

    monkeypatch.setattr(os, "fsync", second_fails)
    with pytest.raises(CheckpointError, match="as planned"):
        write_tensors(place, NAME, FILE, [Entry("a", "float32", (8,))], [bytes(32)], {})
    assert len(calls) == 2


def test_an_error_of_whoever_gives_the_data_passes_through(tmp_path: Path) -> None:
    def data() -> Iterator[bytes]:
        yield bytes(16)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_tensors(Place(str(tmp_path)), NAME, FILE, [Entry("a", "float32", (8,))], data(), {})
    assert list((tmp_path / NAME).iterdir()) == []


def test_a_file_that_is_there_is_not_touched(tmp_path: Path) -> None:
    """Another checkpoint of the same step may be complete, and stays so until its manifest is replaced."""
    place = Place(str(tmp_path))
    old = write(place, {"a": torch.ones(3)})
    new = write(place, {"a": torch.zeros(3)})
    again = write(place, {"a": torch.zeros(3)})
    assert old.name == FILE
    assert new.name == again.name == f"weights-{new.sha256[:12]}.safetensors"
    for info, value in ((old, 1.0), (new, 0.0)):
        with TensorFile(place, NAME, info) as file:
            file.verify()
            assert np.frombuffer(file.read("a", 0, 3), np.float32).tolist() == [value] * 3


# ---- damage, and attacks


def test_damage_is_found(tmp_path: Path) -> None:
    """E09: a byte short, a bit flipped, a page of zeros, another step's file."""
    place = Place(str(tmp_path))
    path = tmp_path / NAME / FILE
    info = write(place, {"a": torch.arange(1, 4097, dtype=torch.float32)})
    good = path.read_bytes()
    flipped, zeroed = bytearray(good), bytearray(good)
    flipped[len(good) // 2] ^= 1
    zeroed[8192:12288] = bytes(4096)
    other = bytearray(encode([Entry("a", "float32", (4096,))], {})) + bytes(4096 * 4)
    assert len(other) == len(good)
    for bad in (good[:-1], good + b"\0", bytes(flipped), bytes(zeroed), bytes(other)):
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=f"{NAME}/{FILE}"), TensorFile(place, NAME, info) as file:
            file.verify()
    path.write_bytes(good)
    with TensorFile(place, NAME, info) as file:
        file.verify()


def test_every_flipped_bit_of_a_header_is_found(tmp_path: Path) -> None:
    place = Place(str(tmp_path))
    path = tmp_path / NAME / FILE
    info = write(place, {"a": torch.ones(3)})
    good = path.read_bytes()
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises(CheckpointError), TensorFile(place, NAME, info) as file:
            file.verify()


def file_with(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def torch_file() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(3)}, buffer)
    return buffer.getvalue()


def tensor(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4), **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


HOSTILE: dict[str, bytes] = {
    "empty file": b"",
    "seven bytes": b"1234567",
    "length of everything": struct.pack("<Q", 2**64 - 1) + b"{}",
    "length over the cap": struct.pack("<Q", 100_000_001) + b"{}",
    "length over the file": struct.pack("<Q", 3) + b"{}",
    "no JSON": file_with(b"{]"),
    "no UTF-8": file_with(b'{"\xff": 1}'),
    "deep JSON": file_with(b"[" * 200_000),
    "a list": file_with([]),
    "huge number": file_with(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}'),
    "name twice": file_with(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
    ),
    "NaN": file_with(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', bytes(4)),
    "no tensor": file_with({"a": 1}),
    "more fields": file_with({"a": tensor(code="os.system")}, bytes(4)),
    "fewer fields": file_with({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
    "other type": file_with({"a": tensor("F8_E4M3", (4,))}, bytes(4)),
    "type is a list": file_with({"a": tensor(["F32"])}, bytes(4)),
    "negative dimension": file_with({"a": tensor(shape=(-1,))}, bytes(4)),
    "dimension is true": file_with({"a": tensor(shape=(True,))}, bytes(4)),
    "dimension is a fraction": file_with({"a": tensor(shape=(1.0,))}, bytes(4)),
    "product overflows 64 bits": file_with({"a": tensor(shape=(1 << 33, 1 << 33))}, bytes(4)),
    "product wraps to one": file_with({"a": tensor("U8", (2**62, 4, 1), (0, 0))}),
    "many dimensions": file_with({"a": tensor(shape=[1] * 65)}, bytes(4)),
    "offsets swapped": file_with({"a": tensor(offsets=(4, 0))}, bytes(4)),
    "three offsets": file_with({"a": tensor(offsets=(0, 2, 4))}, bytes(4)),
    "offset negative": file_with({"a": tensor(offsets=(-4, 0))}, bytes(4)),
    "offsets over the end": file_with({"a": tensor(shape=(2,), offsets=(0, 8))}, bytes(4)),
    "shape and offsets differ": file_with({"a": tensor(offsets=(0, 8))}, bytes(8)),
    "a hole before": file_with({"a": tensor(offsets=(4, 8))}, bytes(8)),
    "a hole between": file_with({"a": tensor(), "b": tensor(offsets=(8, 12))}, bytes(12)),
    "overlap": file_with({"a": tensor(), "b": tensor(offsets=(0, 4))}, bytes(4)),
    "bytes left over": file_with({"a": tensor()}, bytes(5)),
    "name with NUL": file_with({"a\0b": tensor()}, bytes(4)),
    "no name": file_with({"": tensor()}, bytes(4)),
    "metadata are numbers": file_with({"__metadata__": {"a": 1}, "a": tensor()}, bytes(4)),
    "a pickle": b"cos\nsystem\n(S'touch fired'\ntR.",
    "a file of torch": torch_file(),
    "metadata are a list": file_with({"__metadata__": [], "a": tensor()}, bytes(4)),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files_are_refused(tmp_path: Path, what: str) -> None:
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / FILE).write_bytes(HOSTILE[what])
    with pytest.raises(CheckpointError, match="is damaged: "):
        TensorFile(Place(str(tmp_path)), NAME, FileInfo(FILE, len(HOSTILE[what]), ""))


@given(text=st.binary(max_size=200))
def test_anything_is_read_or_refused(text: bytes) -> None:
    size = len(text) + 8
    try:
        length = header_bytes(struct.pack("<Q", len(text)), size)
        decode(text[:length], size)
    except CheckpointError:
        pass


@given(
    shapes=st.lists(st.tuples(st.sampled_from(sorted(SIZES)), st.lists(st.integers(0, 4), max_size=3)), max_size=5),
    metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
def test_what_is_encoded_is_decoded_and_the_library_agrees(
    shapes: list[tuple[str, list[int]]], metadata: dict[str, str]
) -> None:
    entries = [Entry(f"t{index}", dtype, tuple(shape)) for index, (dtype, shape) in enumerate(shapes)]
    metadata.pop("format", None)
    head = encode(entries, metadata)
    size = len(head) + sum(entry.nbytes for entry in entries)
    header = decode(head[8:], size)
    assert sorted(header.entries.values(), key=lambda entry: entry.name) == entries
    assert header.metadata == {"format": "pt", **metadata}
    from safetensors import deserialize

    try:
        found = {name: tuple(info["shape"]) for name, info in deserialize(head + bytes(size - len(head)))}  # type: ignore[no-untyped-call]
    except SafetensorError as error:  # pragma: no cover - says what the library did not like
        raise AssertionError(head) from error
    assert found == {entry.name: entry.shape for entry in entries}
