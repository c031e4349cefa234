"""A check of a whole layout, for tests: it walks what `make_layout` has made."""

from __future__ import annotations

from paramserver.core.layout.plan import ALIGNMENT, ITEMSIZE, Layout, master_dtype


def validate_layout(layout: Layout) -> None:
    """Walk all ranges: tensors lie apart and aligned, chunks tile segments, pieces tile tensors.

    Raises ValueError at the first thing that is not as :func:`make_layout` promises.
    """
    names = {name for tensor in layout.tensors for name in (tensor.name, *tensor.aliases)}
    _require(len(names) == sum(1 + len(tensor.aliases) for tensor in layout.tensors), "two tensors have one name")
    _require(len(layout.placements) == len(layout.tensors), "there must be one placement per tensor")
    ends = [0] * len(layout.segments)
    for index, (tensor, placement) in enumerate(zip(layout.tensors, layout.placements, strict=True)):
        what = f"tensor {tensor.name}"
        _require(placement.tensor == index and placement.elements == tensor.elements, f"{what} has a wrong placement")
        _require(0 <= placement.segment < len(ends), f"{what} is in segment {placement.segment}, which is not there")
        segment = layout.segments[placement.segment]
        place = (tensor.kind, tensor.group, master_dtype(tensor.dtype, tensor.kind))
        _require(place == (segment.kind, segment.group, segment.dtype), f"{what} is in a segment of another sort")
        _require(placement.offset == ends[placement.segment], f"{what} does not begin where the one before it ends")
        align = ALIGNMENT // ITEMSIZE[segment.dtype]
        ends[placement.segment] += -(-tensor.elements // align) * align
    for index, segment in enumerate(layout.segments):
        _require(segment.index == index, f"segment {index} calls itself {segment.index}")
        _require(segment.elements == ends[index], f"segment {index} has {segment.elements} elements, not {ends[index]}")
    _validate_chunks(layout)


def _validate_chunks(layout: Layout) -> None:
    filled = [0] * len(layout.segments)
    covered = [0] * len(layout.tensors)
    before = 0
    for index, chunk in enumerate(layout.chunks):
        what = f"chunk {index}"
        _require(chunk.index == index, f"{what} calls itself {chunk.index}")
        _require(before <= chunk.segment < len(filled), f"{what} is out of order, in segment {chunk.segment}")
        before = chunk.segment
        segment = layout.segments[chunk.segment]
        sort = (chunk.kind, chunk.group, chunk.dtype)
        _require(sort == (segment.kind, segment.group, segment.dtype), f"{what} is of another sort than its segment")
        _require(chunk.start == filled[chunk.segment], f"{what} does not begin where the one before it ends")
        _require(chunk.elements > 0 and chunk.nbytes % ALIGNMENT == 0, f"{what} has {chunk.elements} elements")
        filled[chunk.segment] += chunk.elements
        at = 0
        for piece in chunk.pieces:
            _require(0 <= piece.tensor < len(covered), f"{what} holds tensor {piece.tensor}, which is not there")
            name, placement = layout.tensors[piece.tensor].name, layout.placements[piece.tensor]
            _require(at <= piece.chunk_start, f"{what} has overlapping pieces, at {name}")
            _require(piece.elements > 0, f"{what} has an empty piece of {name}")
            _require(piece.tensor_start == covered[piece.tensor], f"{what} does not go on with {name} where it must")
            inside = placement.offset + piece.tensor_start == chunk.start + piece.chunk_start
            _require(inside and placement.segment == chunk.segment, f"{what} has {name} at the wrong place")
            covered[piece.tensor] += piece.elements
            at = piece.chunk_start + piece.elements
        _require(at <= chunk.elements, f"{what} has pieces beyond its end")
    for segment in layout.segments:
        _require(filled[segment.index] == segment.elements, f"the chunks do not fill segment {segment.index}")
    for tensor, elements in zip(layout.tensors, covered, strict=True):
        _require(elements == tensor.elements, f"pieces hold {elements} of {tensor.elements} elements of {tensor.name}")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(f"the layout contradicts itself: {problem}")
