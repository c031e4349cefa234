"""The flat layout and who owns which chunk."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.core.layout.catching_up import groups
from paramserver.core.layout.plan import (
    ALIGNMENT,
    ITEMSIZE,
    Kind,
    Layout,
    Piece,
    Placement,
    Plan,
    Segment,
    TensorSpec,
    default_chunk_bytes,
    joined,
    link_chunk_bytes,
    make_layout,
    make_plan,
    master_dtype,
    units,
)
from tests.support.layouts import validate_layout

KIB = 1024
MIB = 1024 * KIB
PINNED = "3b73402dbdfe7124d4375858901892882fd69328defd6deb3b364a4a9b6dc903"


def every(group: int) -> bool:
    return True


def transformer(layers: int, width: int, vocabulary: int) -> list[TensorSpec]:
    """Weights in group 0, biases and norms in group 1, a mask and a counter as buffers."""
    tensors = [TensorSpec("embed", (vocabulary, width), "float32", aliases=("head",))]
    for i in range(layers):
        for name, shape in (("qkv", (3 * width, width)), ("out", (width, width)), ("up", (4 * width, width))):
            tensors.append(TensorSpec(f"{i}.{name}", shape, "float32"))
            tensors.append(TensorSpec(f"{i}.{name}.bias", shape[:1], "float32", group=1))
        tensors.append(TensorSpec(f"{i}.norm", (width,), "float32", group=1))
    tensors.append(TensorSpec("mask", (64, 64), "float32", Kind.BUFFER, persistent=False))
    tensors.append(TensorSpec("steps", (), "int64", Kind.BUFFER))
    return tensors


def convnet() -> list[TensorSpec]:
    """Like a ResNet-18: few large tensors, many small ones, a buffer trio per normalisation."""
    tensors = []
    for i, (inside, outside) in enumerate(
        [(3, 64), *[(64, 64)] * 4, *[(128, 128)] * 4, *[(256, 256)] * 4, *[(512, 512)] * 4]
    ):
        tensors.append(TensorSpec(f"{i}.conv", (outside, inside, 3, 3), "float32"))
        tensors += [TensorSpec(f"{i}.{name}", (outside,), "float32") for name in ("weight", "bias")]
        tensors += [TensorSpec(f"{i}.{name}", (outside,), "float32", Kind.BUFFER) for name in ("mean", "var")]
        tensors.append(TensorSpec(f"{i}.count", (), "int64", Kind.BUFFER))
    return tensors


def adapters() -> list[TensorSpec]:
    """A frozen bfloat16 model with small trained matrices beside it."""
    tensors = []
    for i in range(12):
        tensors.append(TensorSpec(f"{i}.base", (1024, 1024), "bfloat16", Kind.FROZEN))
        tensors += [TensorSpec(f"{i}.{name}", (1024, 16), "float32") for name in ("a", "b")]
    return tensors


REALISTIC = {
    "transformer": transformer(6, 384, 8192),
    "small transformer": transformer(2, 64, 256),
    "convnet": convnet(),
    "adapters": adapters(),
    "perceptron": [TensorSpec("w", (784, 128), "float32"), TensorSpec("b", (128,), "float32")],
}

SHAPES = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
    st.integers(0, 3000).map(lambda n: (n,)),
)
FLOATS = ["float32", "float64", "bfloat16", "float16"]


@st.composite
def models(draw: st.DrawFn) -> list[TensorSpec]:
    tensors = []
    for i in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(list(Kind)))
        dtypes = [*FLOATS, "int64", "bool"] if kind is Kind.BUFFER else FLOATS
        group = draw(st.integers(0, 2)) if kind is Kind.PARAMETER else 0
        tensors.append(TensorSpec(f"t{i}", draw(SHAPES), draw(st.sampled_from(dtypes)), kind, group))
    return tensors


CHUNK_BYTES = st.one_of(st.just(0), st.integers(1, 100).map(lambda n: n * ALIGNMENT))


# ---- the layout


@settings(max_examples=150, deadline=None)
@given(models(), CHUNK_BYTES, st.booleans())
def test_chunks_tile_segments_and_pieces_tile_tensors(tensors: list[TensorSpec], chunk_bytes: int, whole: bool) -> None:
    """Paint every element of every segment, independently of how validate_layout walks."""
    layout = make_layout(tensors, chunk_bytes, lambda _: whole)
    validate_layout(layout)
    painted: list[list[tuple[int, int] | None]] = [[None] * segment.elements for segment in layout.segments]
    chunk_of: list[list[int]] = [[-1] * segment.elements for segment in layout.segments]
    for chunk in layout.chunks:
        assert (chunk.start * ITEMSIZE[chunk.dtype]) % ALIGNMENT == 0
        for i in range(chunk.start, chunk.start + chunk.elements):
            assert chunk_of[chunk.segment][i] == -1
            chunk_of[chunk.segment][i] = chunk.index
        for piece in chunk.pieces:
            for k in range(piece.elements):
                at = chunk.start + piece.chunk_start + k
                assert chunk_of[chunk.segment][at] == chunk.index
                assert painted[chunk.segment][at] is None
                painted[chunk.segment][at] = (piece.tensor, piece.tensor_start + k)
    assert all(index >= 0 for owners in chunk_of for index in owners)
    expected: list[list[tuple[int, int] | None]] = [[None] * segment.elements for segment in layout.segments]
    for index, (tensor, placement) in enumerate(zip(tensors, layout.placements, strict=True)):
        segment = layout.segments[placement.segment]
        assert (placement.tensor, placement.elements) == (index, prod(tensor.shape))
        assert (placement.offset * ITEMSIZE[segment.dtype]) % ALIGNMENT == 0
        for k in range(placement.elements):
            expected[placement.segment][placement.offset + k] = (index, k)
    assert painted == expected
    for chunk in layout.chunks:
        if chunk.kind is Kind.FROZEN:
            assert chunk.nbytes <= max(layout.chunk_bytes, 256 * KIB)
        elif whole and chunk.kind is Kind.PARAMETER:
            assert chunk.nbytes <= layout.chunk_bytes
            cut = any(piece.elements < tensors[piece.tensor].elements for piece in chunk.pieces)
            assert len(chunk.pieces) == 1 or not cut
            assert cut == (chunk.first is not None)
        else:
            assert chunk.nbytes <= layout.chunk_bytes
    for unit in units(layout.chunks):
        if len(unit) > 1:
            (held,) = {piece.tensor for chunk in unit for piece in chunk.pieces}
            assert joined(unit).pieces == (Piece(held, 0, 0, tensors[held].elements),)
            assert [chunk.leads for chunk in unit] == [True] + [False] * (len(unit) - 1)
    assert make_layout(tensors, layout.chunk_bytes, lambda _: whole) == layout


def test_a_small_layout_in_full() -> None:
    """Two groups and a buffer, chunks of 128 bytes: every number by hand."""
    layout = make_layout(
        [
            TensorSpec("w", (5, 8), "float32"),
            TensorSpec("b", (3,), "bfloat16", group=1),
            TensorSpec("scale", (), "float32"),
            TensorSpec("seen", (2,), "int64", Kind.BUFFER),
            TensorSpec("empty", (0, 4), "float32", group=1),
        ],
        chunk_bytes=128,
    )
    assert layout.segments == (
        Segment(0, Kind.PARAMETER, 0, "float32", 64),
        Segment(1, Kind.PARAMETER, 1, "float32", 16),
        Segment(2, Kind.BUFFER, 0, "float64", 8),
    )
    assert layout.placements == (
        Placement(0, 0, 0, 40),
        Placement(1, 1, 0, 3),
        Placement(2, 0, 48, 1),
        Placement(3, 2, 0, 2),
        Placement(4, 1, 16, 0),
    )
    assert [(c.index, c.segment, c.start, c.elements, c.pieces) for c in layout.chunks] == [
        (0, 0, 0, 32, (Piece(0, 0, 0, 32),)),
        (1, 0, 32, 32, (Piece(0, 32, 0, 8), Piece(2, 0, 16, 1))),
        (2, 1, 0, 16, (Piece(1, 0, 0, 3),)),
        (3, 2, 0, 8, (Piece(3, 0, 0, 2),)),
    ]
    assert [c.nbytes for c in layout.chunks] == [128, 128, 64, 64]
    assert layout.nbytes == 384


def test_nothing_to_lay_out() -> None:
    assert make_layout([]).chunks == ()
    layout = make_layout([TensorSpec("none", (0,), "float32"), TensorSpec("nil", (3, 0), "float32")])
    assert layout.chunks == ()
    assert layout.segments[0].elements == 0
    validate_layout(layout)
    assert make_plan(layout, 3).owner == ()


def test_a_scalar_has_one_element_and_one_piece() -> None:
    layout = make_layout([TensorSpec("s", (), "float64")])
    (chunk,) = layout.chunks
    assert chunk.pieces == (Piece(0, 0, 0, 1),)
    assert chunk.nbytes == ALIGNMENT


def test_whole_tensors_share_a_chunk_until_it_is_full() -> None:
    sizes = [100, 100, 5000, 16, 0, 200, 1]
    layout = make_layout([TensorSpec(f"t{i}", (n,), "float32") for i, n in enumerate(sizes)], 1024, whole=every)
    large = [[2]] * 20
    assert [[piece.tensor for piece in chunk.pieces] for chunk in layout.chunks] == [[0, 1], *large, [3, 5, 1 + 5]]
    assert [chunk.first for chunk in layout.chunks] == [None, *[1] * 20, None]
    assert {make_plan(layout, 3).owner[chunk.index] for chunk in units(layout.chunks)[1]} == {0}
    validate_layout(layout)


def test_chunks_that_are_updated_together_go_to_a_new_backup_together() -> None:
    sizes = [100, 100, 5000, 16, 3000, 1]
    layout = make_layout([TensorSpec(f"t{i}", (n,), "float32") for i, n in enumerate(sizes)], 1024, whole=every)
    sent = groups(layout.chunks, 2048, lambda chunk: chunk.leads)
    assert [chunk for group in sent for chunk in group] == [*layout.chunks]
    assert len(sent) > 2
    for unit in units(layout.chunks):
        assert any({*unit} <= {*group} for group in sent)


def test_whole_tensors_is_about_parameters_only() -> None:
    layout = make_layout([TensorSpec("f", (1000,), "float32", Kind.BUFFER)], 1024, whole=every)
    assert [chunk.elements for chunk in layout.chunks] == [256, 256, 256, 240]


@pytest.mark.parametrize("name", REALISTIC)
def test_default_chunks_of_realistic_models(name: str) -> None:
    layout = make_layout(REALISTIC[name])
    validate_layout(layout)
    trained = sum(chunk.nbytes for chunk in layout.chunks if chunk.kind is not Kind.FROZEN)
    assert layout.chunk_bytes == default_chunk_bytes(trained)
    assert len(layout.chunks) < 80
    payload = sum(t.elements * ITEMSIZE[master_dtype(t.dtype, t.kind)] for t in REALISTIC[name])
    assert payload <= layout.nbytes <= payload + len(REALISTIC[name]) * (ALIGNMENT - 1)


def test_chunks_for_links() -> None:
    """√(M B α / 2), rounded down to a power of two."""
    assert link_chunk_bytes(24_000_000, 100.0) == 256 * KIB
    assert link_chunk_bytes(100_000_000, 1000.0) == MIB
    assert link_chunk_bytes(200_000_000, 10_000.0) == 4 * MIB
    assert link_chunk_bytes(400_000_000, 10_000.0) == link_chunk_bytes(10**12, 10_000.0) == 8 * MIB
    assert link_chunk_bytes(0, 1000.0) == link_chunk_bytes(1000, 1.0) == 64 * KIB


def test_default_chunk_bytes() -> None:
    assert [default_chunk_bytes(n) for n in (0, 1, 100, 8 * MIB, 8 * MIB + 1)] == [256 * KIB] * 4 + [512 * KIB]
    assert default_chunk_bytes(32 * MIB) == MIB
    assert default_chunk_bytes(32 * MIB + 1) == 2 * MIB
    assert default_chunk_bytes(128 * MIB) == 4 * MIB
    assert [default_chunk_bytes(n) for n in (256 * MIB, 10**12)] == [8 * MIB] * 2


# ---- dtypes


def test_master_dtypes() -> None:
    for kind in Kind:
        assert [master_dtype(dtype, kind) for dtype in FLOATS] == ["float32", "float64", "float32", "float32"]
    assert {master_dtype(dtype, Kind.BUFFER) for dtype in ("int64", "int32", "uint8", "bool")} == {"float64"}


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("complex64", Kind.PARAMETER),
        ("int64", Kind.PARAMETER),
        ("int8", Kind.FROZEN),
        ("complex64", Kind.BUFFER),
        ("", Kind.BUFFER),
    ],
)
def test_other_dtypes_are_refused_by_name_of_the_tensor(dtype: str, kind: Kind) -> None:
    with pytest.raises(ValueError, match=rf"tensor layer\.odd: a {kind.value} of dtype {dtype} "):
        make_layout([TensorSpec("fine", (1,), "float32"), TensorSpec("layer.odd", (1,), dtype, kind)])


# ---- what is refused


def test_names_and_aliases_are_unique() -> None:
    one = TensorSpec("one", (1,), "float32", aliases=("uno",))
    for other in ("one", "uno"):
        with pytest.raises(ValueError, match=repr(other)):
            make_layout([one, TensorSpec(other, (1,), "float32")])
        with pytest.raises(ValueError, match=repr(other)):
            make_layout([one, TensorSpec("two", (1,), "float32", aliases=(other,))])


def test_malformed_models_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor t has a negative dimension"):
        make_layout([TensorSpec("t", (-1, 0), "float32")])
    with pytest.raises(ValueError, match="tensor t is in parameter group -1"):
        make_layout([TensorSpec("t", (1,), "float32", group=-1)])
    for chunk_bytes in (-64, 100, 1):
        with pytest.raises(ValueError, match="multiple of 64"):
            make_layout([], chunk_bytes)


def breakages() -> list[tuple[str, Layout]]:
    """A sound layout with one thing wrong."""
    sound = make_layout([TensorSpec("a", (40,), "float32"), TensorSpec("b", (40,), "float32")], 128)
    first, second = sound.chunks[:2]
    placement = sound.placements[1]
    wrong_piece = replace(second, pieces=(replace(second.pieces[0], tensor_start=0), *second.pieces[1:]))
    return [
        ("a placement is missing", replace(sound, placements=sound.placements[:1])),
        ("a placement is too small", replace(sound, placements=(sound.placements[0], replace(placement, elements=39)))),
        ("a placement overlaps", replace(sound, placements=(sound.placements[0], replace(placement, offset=32)))),
        ("a segment is not there", replace(sound, placements=(sound.placements[0], replace(placement, segment=1)))),
        ("a segment is too long", replace(sound, segments=(replace(sound.segments[0], elements=112),))),
        ("a segment has another number", replace(sound, segments=(replace(sound.segments[0], index=1),))),
        ("a segment is of another sort", replace(sound, segments=(replace(sound.segments[0], group=1),))),
        ("a chunk is missing", replace(sound, chunks=sound.chunks[:-1])),
        ("chunks are in another order", replace(sound, chunks=(second, first, *sound.chunks[2:]))),
        ("a chunk begins late", replace(sound, chunks=(replace(first, start=16), *sound.chunks[1:]))),
        ("a chunk is of another sort", replace(sound, chunks=(replace(first, dtype="float64"), *sound.chunks[1:]))),
        ("a chunk is not aligned", replace(sound, chunks=(replace(first, elements=31), *sound.chunks[1:]))),
        ("a chunk is in no segment", replace(sound, chunks=(replace(first, segment=9), *sound.chunks[1:]))),
        ("a piece repeats", replace(sound, chunks=(first, wrong_piece, *sound.chunks[2:]))),
        ("a piece is missing", replace(sound, chunks=(replace(first, pieces=()), *sound.chunks[1:]))),
        (
            "a piece is of no tensor",
            replace(sound, chunks=(replace(first, pieces=(Piece(7, 0, 0, 1),)), *sound.chunks[1:])),
        ),
        ("a piece is empty", replace(sound, chunks=(replace(first, pieces=(Piece(0, 0, 0, 0),)), *sound.chunks[1:]))),
        (
            "a piece is too long",
            replace(sound, chunks=(replace(first, pieces=(Piece(0, 0, 0, 40),)), *sound.chunks[1:])),
        ),
        (
            "a piece is shifted",
            replace(sound, chunks=(replace(first, pieces=(Piece(0, 0, 1, 31),)), *sound.chunks[1:])),
        ),
        (
            "two pieces overlap",
            replace(sound, chunks=(replace(first, pieces=(*first.pieces, Piece(1, 0, 3, 1))), *sound.chunks[1:])),
        ),
        (
            "the last piece is missing",
            replace(sound, chunks=(*sound.chunks[:-1], replace(sound.chunks[-1], pieces=()))),
        ),
        ("names repeat", replace(sound, tensors=(sound.tensors[0], sound.tensors[0]))),
    ]


@pytest.mark.parametrize(
    ("what", "layout"), [pytest.param(*case, id=case[0].replace(" ", "-")) for case in breakages()]
)
def test_validation_finds(what: str, layout: Layout) -> None:
    with pytest.raises(ValueError, match="two tensors" if what == "names repeat" else "the layout contradicts itself"):
        validate_layout(layout)


# ---- the digest


def test_digest_is_pinned_and_depends_on_everything() -> None:
    """The digest is compared between processes, and kept with checkpoints: it may change with its version line only."""
    tensor = TensorSpec("w", (300,), "float32", group=1, aliases=("v",))
    layout = make_layout([tensor], 1024)
    assert layout.digest == PINNED
    others = [
        make_layout([replace(tensor, **change)], 1024)
        for change in (
            {"name": "x"},
            {"shape": (301,)},
            {"shape": (300, 1)},
            {"dtype": "bfloat16"},
            {"kind": Kind.FROZEN},
            {"group": 2},
            {"aliases": ()},
            {"persistent": False},
        )
    ]
    others += [make_layout([tensor], 512), make_layout([tensor], 1024, whole=every), make_layout([], 1024)]
    digests = {layout.digest, *(other.digest for other in others)}
    assert len(digests) == len(others) + 1
    assert make_layout([tensor], 1024).digest == layout.digest


# ---- the plan


def loads(plan: Plan, kind: Kind | None = None) -> list[int]:
    chunks = [plan.chunks_of(server) for server in range(plan.shards)]
    return [sum(c.nbytes for c in owned if kind in (None, c.kind)) for owned in chunks]


@settings(max_examples=80, deadline=None)
@given(models(), CHUNK_BYTES, st.integers(1, 64), st.booleans())
def test_every_chunk_has_one_owner_and_loads_differ_by_one_chunk(
    tensors: list[TensorSpec], chunk_bytes: int, servers: int, whole: bool
) -> None:
    layout = make_layout(tensors, chunk_bytes, lambda _: whole)
    plan = make_plan(layout, servers)
    owned = [chunk for server in range(servers) for chunk in plan.chunks_of(server)]
    assert sorted(c.index for c in owned) == list(range(len(layout.chunks)))
    for chunks in (plan.chunks_of(server) for server in range(servers)):
        assert all(a.index < b.index for a, b in pairwise(chunks))
    for kind in (None, Kind.PARAMETER):
        largest = max((joined(unit).nbytes for unit in units(layout.chunks) if kind in (None, unit[0].kind)), default=0)
        assert max(loads(plan, kind)) - min(loads(plan, kind)) <= largest
    assert make_plan(make_layout(tensors, chunk_bytes, lambda _: whole), servers) == plan


@pytest.mark.parametrize("name", REALISTIC)
@pytest.mark.parametrize("servers", [1, 2, 3, 4, 8])
def test_realistic_models_are_balanced(name: str, servers: int) -> None:
    """Largest load over smallest, of all and of what is trained. Of 16 to 32 chunks, 8 servers may get 2 or 3 each.

    What takes a few megabytes has few chunks, since each costs time; only its share in chunks is even.
    """
    layout = make_layout(REALISTIC[name])
    plan = make_plan(layout, servers)
    assert plan.layout is layout
    bound = 1.3 if servers <= 4 else 1.6
    for kind in (None, Kind.PARAMETER):
        found = loads(plan, kind)
        spare = layout.chunk_bytes if sum(found) < 16 * layout.chunk_bytes else 0
        assert max(found) <= bound * min(found) + spare


def test_a_large_frozen_model_has_chunks_of_its_own_size() -> None:
    layout = make_layout(adapters())
    assert {c.nbytes for c in layout.chunks if c.kind is Kind.FROZEN} == {2 * MIB}
    assert {c.nbytes for c in layout.chunks if c.kind is Kind.PARAMETER} == {256 * KIB}


def test_frozen_chunks_do_not_push_trained_ones_onto_one_server() -> None:
    frozen = TensorSpec("base", (64 * KIB,), "float32", Kind.FROZEN)
    layout = make_layout([frozen, *[TensorSpec(f"t{i}", (256,), "float32", group=i) for i in range(8)]], 16 * KIB)
    assert loads(make_plan(layout, 4), Kind.PARAMETER) == [2 * KIB] * 4


@pytest.mark.parametrize("servers", [1, 5, 64])
def test_layout_does_not_know_the_servers(servers: int) -> None:
    layout = make_layout(REALISTIC["convnet"])
    before = layout.digest
    assert make_plan(layout, servers).layout.digest == before


def test_more_servers_than_chunks() -> None:
    plan = make_plan(make_layout(REALISTIC["perceptron"], 256 * KIB), 64)
    assert len(plan.layout.chunks) == 2
    assert [len(plan.chunks_of(server)) for server in range(64)] == [1, 1, *[0] * 62]
    assert plan.owner == (0, 1)


def test_equal_chunks_go_round_in_turn() -> None:
    layout = make_layout([TensorSpec("w", (1024,), "float32")], 1024)
    assert make_plan(layout, 3).owner == (0, 1, 2, 0)
    assert make_plan(layout, 1).owner == (0, 0, 0, 0)


def test_a_plan_needs_a_server() -> None:
    with pytest.raises(ValueError, match="1 to 4096 shards, not 0"):
        make_plan(make_layout([]), 0)


@settings(max_examples=80, deadline=None)
@given(models(), CHUNK_BYTES, st.lists(st.integers(0, 9), min_size=1, max_size=16).filter(any))
def test_servers_take_their_shares(tensors: list[TensorSpec], chunk_bytes: int, shares: list[int]) -> None:
    """Of what is trained and of all, to within one chunk; and the layout does not know."""
    layout = make_layout(tensors, chunk_bytes)
    plan = make_plan(layout, len(shares), shares)
    assert plan.layout is layout
    for kind in (None, Kind.PARAMETER):
        sizes = [c.nbytes for c in layout.chunks if kind in (None, c.kind)]
        for load, share in zip(loads(plan, kind), shares, strict=True):
            assert abs(load - sum(sizes) * share / sum(shares)) <= max(sizes, default=0) + len(Kind)
            assert share or not load


def test_equal_shares_are_none() -> None:
    layout = make_layout(REALISTIC["convnet"])
    assert make_plan(layout, 5, [7] * 5) == make_plan(layout, 5)


@pytest.mark.parametrize("shares", [[1], [1, 2, 3], [0, 0], [1, -1], [-1, -1]])
def test_shares_that_cannot_be(shares: list[int]) -> None:
    with pytest.raises(ValueError, match="shares"):
        make_plan(make_layout([]), 2, shares)


def test_what_is_too_large_is_refused_by_arithmetic() -> None:
    with pytest.raises(ValueError, match=r"1099511627776 bytes makes 131072 chunks .* 100000 is the most"):
        make_layout([TensorSpec("w", (1 << 38,), "float32")])
    with pytest.raises(ValueError, match="chunk_bytes higher"):
        make_layout([TensorSpec("w", (1 << 24,), "float32")], chunk_bytes=64)
    with pytest.raises(ValueError, match="1 to 4096 shards, not 4294967295"):
        make_plan(make_layout([TensorSpec("w", (4,), "float32")]), 2**32 - 1)
