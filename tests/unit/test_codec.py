"""Frames: the bytes are protobuf's; what comes in is refused, or read as protobuf reads it."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver import config
from paramserver.core.layout.plan import MAX_CHUNK_BYTES
from paramserver.errors import ProtocolError
from paramserver.frames import ALIGNMENT, MAX_FRAME_BYTES, MAX_HEADER_BYTES
from paramserver.tensors import codec
from paramserver.tensors.codec import chunk_frames, decode_frame, frame_of, split_frame
from paramserver.transport.base import MAX_MESSAGE_BYTES
from paramserver.transport.bulk.records import LIMITS, Kind
from paramserver.v1 import shard_pb2 as shard
from paramserver.v1 import types_pb2 as types
from tests.support.frames import encode_frame

F32 = types.DTYPE_FLOAT32

GOLDEN_HEADER = shard.FrameHeader(
    pull=shard.PullHeader(ready=True, version=7, timeline=2, chunks=2),
    chunks=[
        shard.ChunkRef(index=0, start=0, bytes=4, dtype=F32),
        shard.ChunkRef(index=1, start=300, bytes=4, dtype=F32),
    ],
)
GOLDEN_PARTS = ("0000803f", "00000040")  # 1.0 and 2.0
GOLDEN = bytes.fromhex(
    "0a1b"  # field 1: the header, 27 bytes
    "1a08 0801 1007 1802 4002"  # pull: ready, version 7, timeline 2, 2 chunks
    "2204 1804 2001"  # chunk 0: 4 bytes of float32
    "2209 0801 10ac02 1804 2001"  # chunk 1: from element 300, 4 bytes of float32
    "7a1f" + 31 * "00" + "1208"  # field 15: 31 bytes of padding; field 2: the data, 8 bytes, from byte 64 on
    "0000803f 00000040"
)


def parts() -> list[bytes]:
    return [bytes.fromhex(part) for part in GOLDEN_PARTS]


def read(raw: bytes) -> tuple[shard.FrameHeader, bytes]:
    header, data = decode_frame(raw)
    return header, bytes(data)


def test_golden_bytes() -> None:
    """Written as listed here, and read by stock protobuf."""
    assert encode_frame(GOLDEN_HEADER, parts()) == GOLDEN
    assert GOLDEN.index(bytes.fromhex("0000803f")) == ALIGNMENT
    message = shard.Frame.FromString(GOLDEN)
    assert message.header == GOLDEN_HEADER
    assert message.data == b"".join(parts())


def test_golden_bytes_are_read_without_a_copy() -> None:
    header, data = decode_frame(GOLDEN)
    assert header == GOLDEN_HEADER
    assert data == b"".join(parts())
    assert data.obj is GOLDEN
    assert data.readonly


def test_what_stock_protobuf_writes_is_read() -> None:
    raw = shard.Frame(header=GOLDEN_HEADER, data=b"".join(parts())).SerializeToString()
    assert read(raw) == (GOLDEN_HEADER, b"".join(parts()))


@pytest.mark.parametrize("header", [shard.FrameHeader(), GOLDEN_HEADER])
def test_without_data_the_bytes_are_those_of_stock_protobuf(header: shard.FrameHeader) -> None:
    raw = encode_frame(header, [b"", memoryview(b"")])
    assert raw == shard.Frame(header=header).SerializeToString()
    assert read(raw) == (header, b"")


def test_an_empty_message_is_an_empty_frame() -> None:
    assert read(b"") == (shard.FrameHeader(), b"")


HEADERS = st.builds(
    shard.FrameHeader,
    push=st.one_of(
        st.none(),
        st.builds(shard.PushHeader, job=st.text(max_size=80), samples=st.integers(0, 2**64 - 1), used=st.binary()),
    ),
    chunks=st.lists(st.builds(shard.ChunkRef, index=st.integers(0, 2**32 - 1), start=st.integers(0, 2**63))),
    states=st.lists(st.builds(shard.StateRef, key=st.text(max_size=9), scalar=st.booleans()), max_size=4),
)


@settings(max_examples=300, deadline=None)
@given(header=HEADERS, chunks=st.lists(st.binary(max_size=300), max_size=5))
def test_round_trip_in_both_directions(header: shard.FrameHeader, chunks: list[bytes]) -> None:
    raw = encode_frame(header, chunks)
    data = b"".join(chunks)
    message = shard.Frame.FromString(raw)
    assert (message.header, message.data) == (header, data)
    assert read(raw) == (header, data)
    assert read(shard.Frame(header=header, data=data).SerializeToString()) == (header, data)
    if data:
        assert (len(raw) - len(data)) % ALIGNMENT == 0


@pytest.mark.parametrize("length", range(130))
def test_data_begin_aligned_after_any_header(length: int) -> None:
    header = shard.FrameHeader(push=shard.PushHeader(job="x" * length))
    raw = encode_frame(header, [b"abcd"])
    assert (len(raw) - 4) % ALIGNMENT == 0
    assert read(raw) == (header, b"abcd")
    assert shard.Frame.FromString(raw).header == header


def test_parts_of_any_contiguous_type() -> None:
    array = np.arange(3, dtype=np.float32)
    raw = encode_frame(shard.FrameHeader(), [b"ab", bytearray(b"cd"), memoryview(b"xefx")[1:3], array.data])
    assert decode_frame(raw)[1] == b"abcdef" + array.tobytes()


# --- unknown fields -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "unknown",
    [
        "1801",  # field 3, a number
        "18ffffffffffffffffff01",  # field 3, the largest number
        "1901020304050607 08",  # field 3, 64 bits
        "1d01020304",  # field 3, 32 bits
        "1a03010203",  # field 3, bytes
        "1a00",
        "1b 0801 0a0201ff 1c",  # group 3 with fields 1 and 2 inside, which are not ours
        "1b 23 24 1d00000000 1c",  # group 3 with group 4 inside
        "f8ffffff0f 01",  # the largest field number
        "7a020000",  # padding again
    ],
)
@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_unknown_fields_are_skipped_as_protobuf_does(unknown: str, place: str) -> None:
    head, tail = GOLDEN[:29], GOLDEN[29:]
    extra = bytes.fromhex(unknown)
    raw = {"before": extra + GOLDEN, "between": head + extra + tail, "after": GOLDEN + extra}[place]
    message = shard.Frame.FromString(raw)
    assert read(raw) == (message.header, message.data) == (GOLDEN_HEADER, b"".join(parts()))


def test_fields_in_the_other_order() -> None:
    assert read(GOLDEN[29:] + GOLDEN[:29]) == (GOLDEN_HEADER, b"".join(parts()))


# --- attacks ------------------------------------------------------------------------------------------------------

ATTACKS = {
    "header longer than the message": "0a7f 0801",
    "data longer than the message": "1205 00000000",
    "header of 4 GiB": "0affffffff0f",
    "data of 4 GiB": "12ffffffff0f 00",
    "length that does not end": "12" + 20 * "ff",
    "length of six bytes": "12848080808000 00000000",
    "tag that does not end": 20 * "ff",
    "tag of six bytes": "928080808000 00",
    "tag cut off": "92",
    "length cut off": "12ff",
    "no length": "12",
    "field number zero": "0200",
    "field number too large": "faffffff1f 00",
    "header as a number": "0801",
    "header as 64 bits": "09 0000000000000000",
    "header as a group": "0b 0c",
    "header as 32 bits": "0d 00000000",
    "data as a number": "1001",
    "data as a group": "13 14",
    "two headers": "0a00 0a00",
    "two data fields": "120100 120100",
    "unknown number cut off": "18ff",
    "unknown number of eleven bytes": "18" + 10 * "ff" + "01",
    "unknown 64 bits cut off": "19 00000000000000",
    "unknown 32 bits cut off": "1d 000000",
    "unknown bytes cut off": "1a05 00",
    "wire type 6": "1e",
    "wire type 7": "1f",
    "group never ended": "1b 1801",
    "group ended by another": "1b 24",
    "end of no group": "1c",
    "group with a cut field": "1b 1a7f",
    "groups nested deeply": 500 * "1b" + 500 * "1c",
    "header of junk": "0a04 ffffffff",
    "header with a cut chunk": "0a02 2205",
    "header with a name that is no text": "0a05 0a03 0a01ff",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_attack_is_refused(attack: str) -> None:
    with pytest.raises(ProtocolError):
        decode_frame(bytes.fromhex(attack))


def test_every_cut_of_a_frame_is_refused_or_read_as_protobuf_reads_it() -> None:
    for end in range(len(GOLDEN)):
        check_like_protobuf(GOLDEN[:end])


def test_claimed_lengths_allocate_nothing() -> None:
    attacks = [bytes.fromhex(attack) for attack in ATTACKS.values()]
    large = b"\x0a\x00\x12\x80\x80\x80\x03" + bytes(6 * 2**20)  # what it claims is there
    decode_frame(large)
    tracemalloc.start()
    try:
        for attack in attacks:
            with pytest.raises(ProtocolError):
                decode_frame(attack)
        decode_frame(large)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**18


def test_sizes_are_limited() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        decode_frame(bytes(MAX_FRAME_BYTES + 1))
    header = shard.FrameHeader(push=shard.PushHeader(used=bytes(MAX_HEADER_BYTES)))
    with pytest.raises(ProtocolError, match=r"header of .* over the limit"):
        decode_frame(shard.Frame(header=header).SerializeToString())
    with pytest.raises(ValueError, match=r"header of .* over the limit"):
        encode_frame(header, [])
    with pytest.raises(ValueError, match="use smaller chunks"):
        encode_frame(shard.FrameHeader(), [bytes(MAX_FRAME_BYTES)])
    largest = encode_frame(shard.FrameHeader(), [bytes(MAX_FRAME_BYTES - ALIGNMENT)])
    assert len(largest) == MAX_FRAME_BYTES
    assert len(decode_frame(largest)[1]) == MAX_FRAME_BYTES - ALIGNMENT


def test_the_largest_chunk_fits_into_a_frame_of_every_transport() -> None:
    chunk, header = bytes(MAX_CHUNK_BYTES), bytes(MAX_HEADER_BYTES - 16)
    frame = frame_of(shard.FrameHeader(push=shard.PushHeader(used=header)), [chunk])
    assert len(frame.header) <= LIMITS[Kind.FRAME].header
    assert frame.data_bytes <= LIMITS[Kind.FRAME].data
    assert len(frame.message()) <= MAX_FRAME_BYTES < MAX_MESSAGE_BYTES
    assert config.MAX_CHUNK_BYTES == MAX_CHUNK_BYTES


def check_like_protobuf(raw: bytes) -> bool:
    """Either refused with the one error that is meant for it, or read exactly as stock protobuf does."""
    try:
        header, data = decode_frame(raw)
    except ProtocolError:
        return False
    message = shard.Frame.FromString(raw)
    assert header == message.header
    assert data == message.data
    return True


def mutate(raw: bytes, draw: random.Random) -> bytes:
    changed = bytearray(raw)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed)) if changed else 0
        action = draw.randrange(5)
        if action == 0 and changed:
            changed[at] = draw.randrange(256)
        elif action == 1 and changed:
            changed[at] ^= 1 << draw.randrange(8)
        elif action == 2:
            changed[at:at] = draw.randbytes(draw.randint(1, 6))
        elif action == 3:
            del changed[at : at + draw.randint(1, 6)]
        else:
            end = at + draw.randint(1, 12)
            changed[at:at] = changed[end : end + draw.randint(1, 12)]
    return bytes(changed)


def test_ten_thousand_mutations() -> None:
    draw = random.Random(20)
    push = shard.PushHeader(job="j", sync=shard.SyncName(step=3, lo=1, hi=2, of=4), used=b"\x07")
    push.groups.add().hypers.add(name="lr", number=0.1)
    full = shard.FrameHeader(push=push, chunks=[shard.ChunkRef(index=5, start=64, bytes=12, dtype=F32)])
    seeds = [GOLDEN, encode_frame(full, [b"abcdefghijkl"]), shard.Frame(header=full, data=b"xyz").SerializeToString()]
    read = sum(check_like_protobuf(mutate(seeds[number % 3], draw)) for number in range(10_000))
    assert 500 < read < 9_500  # both outcomes are well covered


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=60))
def test_junk(raw: bytes) -> None:
    check_like_protobuf(raw)
    check_like_protobuf(b"\x0a" + bytes([len(raw)]) + raw)


# --- many chunks --------------------------------------------------------------------------------------------------


def ref(index: int, length: int) -> shard.ChunkRef:
    return shard.ChunkRef(index=index, start=index * 100, bytes=length, dtype=F32)


def test_chunks_are_packed_in_order_up_to_the_target() -> None:
    buffers = [bytes([number]) * length for number, length in enumerate((40, 40, 40, 500, 1, 0, 99))]
    chunks = [(ref(number, len(buffer)), buffer) for number, buffer in enumerate(buffers)]
    first = shard.PushHeader(job="j", chunks=7)
    frames = list(chunk_frames(first, chunks, target_bytes=100))
    split = [split_frame(frame) for frame in frames]
    assert [[part.index for part, _ in listed if isinstance(part, shard.ChunkRef)] for _, listed in split] == [
        [0, 1],
        [2],
        [3],
        [4, 5, 6],
    ]
    assert split[0][0].push == first
    assert all(header.WhichOneof("first") is None for header, _ in split[1:])
    assert [(part, bytes(data)) for _, listed in split for part, data in listed] == chunks


@pytest.mark.parametrize(
    ("first", "field"),
    [(shard.PushHeader(), "push"), (shard.InitializeHeader(grant=3), "initialize"), (shard.PullHeader(), "pull")],
)
def test_the_first_header_is_sent_without_chunks(first: codec.First, field: str) -> None:
    (frame,) = chunk_frames(first, [])
    header, data = decode_frame(frame)
    assert header.WhichOneof("first") == field
    assert getattr(header, field) == first
    assert not data


def test_nothing_to_send_is_no_frame() -> None:
    assert list(chunk_frames(None, [])) == []


def test_state_is_packed_like_chunks() -> None:
    state = shard.StateRef(tensor=3, key="step", start=0, bytes=4, dtype="float32", scalar=True)
    (frame,) = chunk_frames(None, [(ref(0, 2), b"ab"), (state, b"cdef")])
    _, listed = split_frame(frame)
    assert [(part, bytes(data)) for part, data in listed] == [(ref(0, 2), b"ab"), (state, b"cdef")]


def test_frames_are_made_as_they_are_asked_for() -> None:
    asked = []

    def chunks() -> Iterator[tuple[codec.Ref, bytes]]:
        for number in range(3):
            asked.append(number)
            yield ref(number, 4), b"1234"

    frames = chunk_frames(None, chunks(), target_bytes=4)
    next(frames)
    assert asked == [0, 1]


def test_many_small_chunks_do_not_overflow_the_header() -> None:
    chunks = [(ref(number, 64), bytes(64)) for number in range(9000)]
    frames = list(chunk_frames(shard.PushHeader(), chunks))
    assert [len(decode_frame(frame)[0].chunks) for frame in frames] == [4096, 4096, 808]


def test_a_wrong_length_is_found_before_it_is_sent() -> None:
    with pytest.raises(ValueError, match="3 bytes were given for a reference to 4 bytes"):
        list(chunk_frames(None, [(ref(0, 4), b"abc")]))


@pytest.mark.parametrize("listed", [[5], [3, 2], [2**63, 2**63], [4, 1], []])
def test_lists_that_do_not_add_up_are_refused(listed: list[int]) -> None:
    raw = encode_frame(shard.FrameHeader(chunks=[ref(0, length) for length in listed]), [b"abcd"])
    with pytest.raises(ProtocolError, match="4 bytes of data follow"):
        split_frame(raw)
