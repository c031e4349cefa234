"""Weights that are received where they belong: the memory of the next version, and when it is not used again."""

from __future__ import annotations

import torch

from paramserver.core.layout.plan import Kind, Plan, TensorSpec, make_layout
from paramserver.tensors.dtypes import buffer_of
from paramserver.v1 import shard_pb2
from paramserver.wire.messages import chunk_ref
from paramserver.worker.flat import FlatSpace
from paramserver.worker.weights.landing import LEAST_BYTES, Landing, Landings

ELEMENTS = LEAST_BYTES // 4
# Two chunks of float32 weights on two shards, then a frozen one and a small one.
LAYOUT = make_layout(
    [
        TensorSpec("a", (ELEMENTS,), "float32"),
        TensorSpec("b", (ELEMENTS,), "float32"),
        TensorSpec("frozen", (ELEMENTS,), "float32", Kind.FROZEN),
        TensorSpec("buffer", (16,), "float32", Kind.BUFFER),
    ],
    LEAST_BYTES,
)
A, B, FROZEN, SMALL = (
    next(c.index for c in LAYOUT.chunks if any(p.tensor == tensor for p in c.pieces)) for tensor in range(4)
)
PLAN = Plan(LAYOUT, 2, tuple({A: 0, B: 1, FROZEN: 0, SMALL: 1}[chunk.index] for chunk in LAYOUT.chunks))


def space() -> FlatSpace:
    return FlatSpace(LAYOUT, torch.device("cpu"))


def header(*chunks: int, **changes: int) -> bytes:
    frame = shard_pb2.FrameHeader(chunks=[chunk_ref(LAYOUT.chunks[index]) for index in chunks])
    for ref in frame.chunks:
        for name, value in changes.items():
            setattr(ref, name, value)
    return frame.SerializeToString()


def lands(landing: Landing, shard: int, chunk: int, value: float = 1.0) -> None:
    place = landing.place(shard, header(chunk), LEAST_BYTES)
    assert place is not None
    place[:] = buffer_of(torch.full((ELEMENTS,), value))


def test_a_chunk_is_received_in_its_place() -> None:
    landing = Landing(space(), PLAN)
    lands(landing, 0, A, 5.0)
    assert landing.used
    assert landing.space.view(0).tolist() == [5.0] * ELEMENTS
    assert landing.space.view(1).count_nonzero() == 0


def test_what_is_not_one_chunk_of_this_shard_is_received_elsewhere() -> None:
    landing = Landing(space(), PLAN)
    n = LEAST_BYTES
    assert landing.place(1, header(A), n) is None  # of another shard
    assert landing.place(0, header(A), n - 64) is None  # of another size
    assert landing.place(0, header(A, B), n) is None
    assert landing.place(0, header(), n) is None
    assert landing.place(0, b"\xff\xff", n) is None
    assert landing.place(0, header(FROZEN), n) is None
    assert landing.place(1, header(SMALL), LAYOUT.chunks[SMALL].nbytes) is None
    assert landing.place(0, header(A, start=1), n) is None
    assert landing.place(0, header(A, index=99), n) is None
    assert landing.place(0, header(A, bytes=n // 2), n) is None
    assert landing.place(0, header(A, encoding=shard_pb2.ENCODING_BF16), n) is None
    assert not landing.used


def test_two_spaces_change_places() -> None:
    landings, present = Landings(), space()
    first = landings.begin(present, PLAN)
    assert first.space is not present
    lands(first, 0, A)
    assert landings.take([first, first], True, present) is first.space
    second = landings.begin(first.space, PLAN)
    assert second.space is present
    lands(second, 0, A)
    assert landings.take([second, second], True, first.space) is present


def test_frozen_weights_are_in_both_spaces() -> None:
    present = space()
    twin = present.twin()
    present.view(2).fill_(7.0)
    present.view(0).fill_(7.0)
    assert twin.view(2).tolist() == [7.0] * ELEMENTS
    assert twin.view(0).count_nonzero() == 0


def test_memory_that_nothing_came_to_is_used_again() -> None:
    landings, present = Landings(), space()
    first = landings.begin(present, PLAN)
    second = landings.begin(present, PLAN)
    assert second.space is first.space
    assert first.place(0, header(A), LEAST_BYTES) is None
    assert landings.take([first], True, present) is None


def test_memory_of_a_pull_that_was_given_up_is_not_used_again() -> None:
    landings, present = Landings(), space()
    first = landings.begin(present, PLAN)
    lands(first, 0, A)
    second = landings.begin(present, PLAN)
    assert second.space is not first.space
    assert second.space is not present
    assert first.place(1, header(B), LEAST_BYTES) is None


def test_answers_from_elsewhere_are_copied_and_the_memory_is_left() -> None:
    landings, present = Landings(), space()
    first = landings.begin(present, PLAN)
    lands(first, 0, A)
    assert landings.take([None, None], True, present) is None
    assert landings.begin(present, PLAN).space is not first.space


def test_after_a_closed_landing_answers_are_copied() -> None:
    landings, present = Landings(), space()
    first = landings.begin(present, PLAN)
    lands(first, 0, A)
    first.close()  # some shards were asked again, for another version
    assert landings.take([first, None], True, present) is None


def test_nothing_has_come_here() -> None:
    landings, present = Landings(), space()
    first = landings.begin(present, PLAN)
    assert landings.take([first], True, present) is None
    assert landings.take([first], False, present) is first.space


def test_memory_where_something_may_still_be_written_is_not_used_again() -> None:
    landings, present = Landings(), space()
    first = landings.begin(present, PLAN)
    lands(first, 0, A)
    assert landings.take([first], True, None) is first.space
    assert landings.begin(first.space, PLAN).space is not present


def test_chunks_in_their_places_are_not_copied() -> None:
    here = space()
    here.view(0).fill_(3.0)
    seen = here.view(0)._version
    here.write({A: buffer_of(here.chunk(A)), B: buffer_of(torch.full((ELEMENTS,), 2.0))})
    assert here.view(0)._version == seen or here.view(0)[0] == 3.0
    assert here.view(1).tolist() == [2.0] * ELEMENTS
