"""Between the generated messages and the plain values of the core. No decisions here."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import prod

from paramserver.core.layout.plan import (
    ADDED,
    Chunk,
    Kind,
    Layout,
    Plan,
    TensorSpec,
    make_layout,
    make_plan,
    model_bytes,
)
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.core.versions.counted import Counted, Runs
from paramserver.core.versions.events import (
    AtClock,
    AtLeast,
    Exactly,
    Joining,
    Latest,
    Want,
)
from paramserver.core.versions.names import AsyncName, Name, SyncName
from paramserver.core.work.slices import DataSpec, SyncSchedule
from paramserver.core.work.stealing import Assignment
from paramserver.errors import DataError, ModelError, ProtocolError
from paramserver.tensors.dtypes import wire_dtype
from paramserver.tensors.hypers import optimizers_of
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.wire.bounds import MAX_SLICES, counting

# Raised when two releases no longer understand each other.
PROTOCOL = 6
# How numbers to agree on are named that belong to one run of a job, and not to a job that goes on from a checkpoint.
OF_RUN = "of run "

# Limits of a model, which are checked before memory is allocated.
MAX_TENSORS = 200_000
MAX_NAME_CHARS = 512
MAX_DIMENSIONS = 64
MAX_ELEMENTS = 1 << 42

_MODES = {Mode.SYNC: types_pb2.MODE_SYNC, Mode.ASYNC: types_pb2.MODE_ASYNC}
_MODES_BACK = {number: mode for mode, number in _MODES.items()}
_KINDS = {
    Kind.PARAMETER: types_pb2.TENSOR_KIND_PARAMETER,
    Kind.BUFFER: types_pb2.TENSOR_KIND_BUFFER,
    Kind.FROZEN: types_pb2.TENSOR_KIND_FROZEN,
}
_KINDS_BACK = {number: kind for kind, number in _KINDS.items()}


def mode_from_proto(mode: types_pb2.Mode, default: Mode) -> Mode:
    """``default`` where none is given."""
    return _MODES_BACK.get(mode, default)


def mode_to_proto(mode: Mode) -> types_pb2.Mode:
    """The wire number of a mode."""
    return _MODES[mode]


def consistency_to_proto(value: Consistency) -> types_pb2.Consistency:
    """As a message; an unbounded staleness is left unset."""
    return types_pb2.Consistency(
        revision=value.revision,
        mode=_MODES[value.mode],
        staleness=value.staleness,
        from_version=value.from_version,
    )


def consistency_from_proto(message: types_pb2.Consistency) -> Consistency:
    """Raises ProtocolError for a mode that this version does not know."""
    mode = _MODES_BACK.get(message.mode)
    if mode is None:
        raise ProtocolError(f"unknown consistency mode number {message.mode}")
    staleness = message.staleness if message.HasField("staleness") else None
    return Consistency(mode, staleness, message.revision, message.from_version)


def tensor_to_proto(spec: TensorSpec) -> types_pb2.TensorSpec:
    """As a message."""
    return types_pb2.TensorSpec(
        name=spec.name,
        shape=spec.shape,
        dtype=spec.dtype,
        kind=_KINDS[spec.kind],
        group=spec.group,
        aliases=spec.aliases,
        persistent=spec.persistent,
    )


def tensors_from_proto(message: types_pb2.ModelSpec) -> tuple[TensorSpec, ...]:
    """The tensors of a model, checked against the named limits; raises ProtocolError."""
    names = len(message.tensors) + sum(len(tensor.aliases) for tensor in message.tensors)
    if names > MAX_TENSORS:
        raise ProtocolError(f"the model has {names} tensors and further names of them, more than {MAX_TENSORS}")
    return tuple(_tensor_from_proto(tensor) for tensor in message.tensors)


def _tensor_from_proto(message: types_pb2.TensorSpec) -> TensorSpec:
    for name in (message.name, *message.aliases):
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise ProtocolError(
                f"a tensor is named {name[:40]!r}: names are 1 to {MAX_NAME_CHARS} printable characters"
            )
    kind = _KINDS_BACK.get(message.kind)
    if kind is None:
        raise ProtocolError(f"tensor {message.name!r} has the unknown kind number {message.kind}")
    shape = tuple(message.shape[: MAX_DIMENSIONS + 1])
    if len(shape) > MAX_DIMENSIONS or any(size > MAX_ELEMENTS for size in shape) or prod(shape) > MAX_ELEMENTS:
        raise ProtocolError(f"tensor {message.name!r} of shape {shape[:8]} is larger than allowed")
    return TensorSpec(
        name=message.name,
        shape=shape,
        dtype=message.dtype,
        kind=kind,
        group=message.group,
        aliases=tuple(message.aliases),
        persistent=message.persistent,
    )


def layout_of(message: types_pb2.ModelSpec, most_bytes: int = 0) -> Layout:
    """The flat layout that a specification leads to, wherever it is computed.

    Raises ModelError if there can be none, or, by arithmetic alone, if the weights have more than ``most_bytes`` (0:
    there is no limit).
    """
    tensors = tensors_from_proto(message)
    try:
        nbytes = model_bytes(tensors)
        if 0 < most_bytes < nbytes:
            raise ModelError(
                f"the model has {nbytes} bytes ({nbytes / 2**30:.4g} GiB), and this job takes {most_bytes} "
                f"({most_bytes / 2**30:.4g} GiB): set cluster.max_model_bytes higher if the servers have the memory"
            )
        return make_layout(tensors, message.chunk_bytes, optimizers_of(message.optimizer).whole)
    except ValueError as error:
        raise ModelError(str(error)) from error


def plan_of(message: types_pb2.ModelSpec, shards: int) -> Plan:
    """The plan that a specification leads to, wherever it is computed. Raises ModelError if there can be none."""
    try:
        return make_plan(layout_of(message), shards, message.shares)
    except ValueError as error:
        raise ModelError(str(error)) from error


def first_difference(ours: types_pb2.ModelSpec, theirs: types_pb2.ModelSpec) -> str:
    """In words, how the second model differs from the first; empty if it does not."""
    for index, (a, b) in enumerate(zip(ours.tensors, theirs.tensors, strict=False)):
        if a.name != b.name:
            return f"tensor {index} is {b.name!r}, but {a.name!r} in the model registered first"
        if a != b:
            return f"{a.name!r} is {_describe(b, a)}, but {_describe(a, b)} in the model registered first"
    if len(ours.tensors) != len(theirs.tensors):
        longer, text = (theirs, "only here") if len(theirs.tensors) > len(ours.tensors) else (ours, "missing here")
        return f"{longer.tensors[min(len(ours.tensors), len(theirs.tensors))].name!r} is {text}"
    if ours.optimizer != theirs.optimizer:
        return _optimizer_difference(ours.optimizer, theirs.optimizer)
    if theirs.chunk_bytes and ours.chunk_bytes != theirs.chunk_bytes:
        return f"training.chunk_bytes is {theirs.chunk_bytes}, but {ours.chunk_bytes} in the model registered first"
    return ""


def _describe(tensor: types_pb2.TensorSpec, other: types_pb2.TensorSpec) -> str:
    """In words, with all that distinguishes it from the other tensor."""
    kind = _KINDS_BACK.get(tensor.kind, Kind.PARAMETER).value
    text = f"a {kind} of shape {tuple(tensor.shape)} and type {tensor.dtype}"
    if tensor.group != other.group and kind == Kind.BUFFER.value:
        text += f" whose changes are {'added' if tensor.group == ADDED else 'averaged'} over the slices of a step"
    elif tensor.group != other.group:
        text += f" in parameter group {tensor.group}"
    if tensor.aliases != other.aliases:
        others = ", ".join(map(repr, tensor.aliases[:3])) + (" and more" if len(tensor.aliases) > 3 else "")
        text += f", tied with {others}" if others else ", tied with nothing"
    if tensor.persistent != other.persistent:
        text += f", {'' if tensor.persistent else 'not '}in the state_dict"
    return text


def _optimizer_difference(ours: types_pb2.OptimizerSpec, theirs: types_pb2.OptimizerSpec) -> str:
    """In words, how the second optimizer differs from the first."""
    one, other = optimizers_of(ours), optimizers_of(theirs)
    if (one, len(ours.groups)) != (other, len(theirs.groups)):
        return (
            f"the optimizer is {other} with {len(theirs.groups)} parameter group(s), but {one} with "
            f"{len(ours.groups)} in the model registered first"
        )
    for index, (a, b) in enumerate(zip(ours.groups, theirs.groups, strict=True)):
        first, second = ({hyper.name: _value(hyper) for hyper in group.hypers} for group in (a, b))
        for name in sorted(first.keys() | second.keys()):
            mine, yours = first.get(name, "nothing"), second.get(name, "nothing")
            if mine != yours:
                return f"{name} of parameter group {index} is {yours}, but {mine} in the model registered first"
    return "its optimizer has other numbers than that of the model registered first"


def _value(hyper: types_pb2.Hyper) -> str:
    kind = hyper.WhichOneof("value")
    if kind == "numbers":
        return repr(tuple(hyper.numbers.values))
    return "nothing" if kind is None else repr(getattr(hyper, kind))


def assignment_to_proto(assignment: Assignment) -> shard_pb2.Assignment:
    """As a message, without the worker, which the message around it names."""
    return shard_pb2.Assignment(place=assignment.place, workers=assignment.workers, work_s=assignment.work_s)


def data_to_proto(data: DataSpec) -> types_pb2.DataSpec:
    """As a message."""
    return types_pb2.DataSpec(
        samples=data.samples,
        slice_size=data.slice_size,
        drop_last=data.drop_last,
        shuffle=data.shuffle,
        batches=data.batches,
        slices_per_step=data.slices_per_step,
        drawn=data.drawn,
        turns=data.turns,
    )


def data_from_proto(message: types_pb2.DataSpec) -> DataSpec:
    """From a message; raises DataError for data that makes no slice, ProtocolError for more than there can be."""
    samples = counting("the number of samples", message.samples)
    size = counting("the size of a slice", message.slice_size)
    batches = counting("the batches of a slice", message.batches) or 1
    slices = counting("the slices of a step", message.slices_per_step)
    turns = counting("the turns of a batch", message.turns) or 1
    try:
        return DataSpec(samples, size, message.drop_last, message.shuffle, batches, slices, message.drawn, turns)
    except ValueError as error:
        raise DataError(str(error)) from error


def name_from_proto(header: shard_pb2.PushHeader | shard_pb2.ContributionRef) -> Name:
    """The name of a contribution; raises ProtocolError if it has none."""
    match header.WhichOneof("name"):
        case "sync":
            if header.sync.of > MAX_SLICES:
                raise ProtocolError(f"a step of {header.sync.of} slices is out of bounds")
            return SyncName(header.sync.step, header.sync.lo, header.sync.hi, header.sync.of)
        case "async":
            name = getattr(header, "async")
            return AsyncName(counting("epoch", name.epoch), counting("slice", name.index))
        case _:
            raise ProtocolError("a contribution without a name")


def put_name(header: shard_pb2.PushHeader | shard_pb2.ContributionRef, name: Name) -> None:
    """Write the name into the header."""
    if isinstance(name, SyncName):
        header.sync.CopyFrom(shard_pb2.SyncName(step=name.step, lo=name.lo, hi=name.hi, of=name.of))
    else:
        getattr(header, "async").CopyFrom(shard_pb2.AsyncName(epoch=name.epoch, index=name.index))


def want_from_proto(request: shard_pb2.PullRequest) -> Want:
    """The version that a pull asks for. Raises ProtocolError if the request does not say."""
    match request.WhichOneof("want"):
        case "min_version":
            return AtLeast(request.min_version)
        case "exact_version":
            return Exactly(request.exact_version)
        case "clock":
            return AtClock(counting("clock", request.clock))
        case "join":
            return Joining()
        case "latest":
            return Latest()
        case _:
            raise ProtocolError("a pull that does not say which version it wants")


def put_want(request: shard_pb2.PullRequest, want: Want) -> None:
    """Write the wanted version into the request."""
    match want:
        case AtLeast(version):
            request.min_version = version
        case Exactly(version):
            request.exact_version = version
        case AtClock(clock):
            request.clock = clock
        case Joining():
            request.join = True
        case Latest():
            request.latest = True


def chunk_ref(
    chunk: Chunk, encoding: shard_pb2.Encoding = shard_pb2.ENCODING_EXACT, nbytes: int | None = None
) -> shard_pb2.ChunkRef:
    """How a frame lists a chunk. ``nbytes``: as it is encoded; left out: as it is."""
    return shard_pb2.ChunkRef(
        index=chunk.index,
        start=chunk.start,
        bytes=chunk.nbytes if nbytes is None else nbytes,
        dtype=wire_dtype(chunk.dtype),
        encoding=encoding,
    )


def slices_to_proto(counted: Runs) -> list[shard_pb2.EpochSlices]:
    """Slices by epoch, as messages."""
    return [
        shard_pb2.EpochSlices(
            epoch=run.first, epochs=run.epochs, slices=[types_pb2.Range(start=lo, stop=hi) for lo, hi in run.ranges]
        )
        for run in counted
    ]


def slices_from_proto(epochs: Iterable[shard_pb2.EpochSlices]) -> Runs:
    """Slices by epoch; raises ProtocolError for ranges that are none, and for epochs that are not sorted."""
    try:
        return Counted((e.epoch, e.epochs or 1, [(part.start, part.stop) for part in e.slices]) for e in epochs).runs()
    except ValueError as error:
        raise ProtocolError(str(error)) from error


def pack_mask(bits: Collection[int], length: int) -> bytes:
    """A bit per tensor, least significant first."""
    mask = bytearray((length + 7) // 8)
    for bit in bits:
        mask[bit >> 3] |= 1 << (bit & 7)
    return bytes(mask)


def unpack_mask(mask: bytes, length: int) -> frozenset[int]:
    """The set bits; raises ProtocolError for a mask of the wrong length or with bits beyond the end."""
    if len(mask) != (length + 7) // 8:
        raise ProtocolError(f"the mask of used tensors has {len(mask)} bytes, the model needs {(length + 7) // 8}")
    bits = frozenset(i for i in range(len(mask) * 8) if mask[i >> 3] >> (i & 7) & 1)
    if any(bit >= length for bit in bits):
        raise ProtocolError(f"the mask of used tensors names a tensor beyond the {length} of the model")
    return bits


def origin_to_proto(schedule: SyncSchedule) -> types_pb2.SyncOrigin:
    """Where synchronous steps begin."""
    ranges: Iterable[tuple[int, int]] = schedule.remaining or ()
    return types_pb2.SyncOrigin(
        base_version=schedule.base_version,
        epoch=schedule.epoch,
        remaining=[types_pb2.Range(start=start, stop=stop) for start, stop in ranges],
        partial=schedule.remaining is not None,
    )


def schedule_from_proto(view: types_pb2.View, data: DataSpec | None) -> SyncSchedule:
    """The schedule of synchronous steps that a view describes. ``data``: of the job, None if it has none."""
    origin = view.sync_origin
    return SyncSchedule(
        slices_per_epoch=data.slices_per_epoch if data is not None else 0,
        turns=data.turns if data is not None else 1,
        slices_per_step=view.slices_per_step,
        base_version=origin.base_version,
        epoch=origin.epoch,
        remaining=tuple((r.start, r.stop) for r in origin.remaining) if origin.partial else None,
    )


def record_age(record: coordinator_pb2.JobRecord) -> tuple[int, int]:
    """(term, edition): of two records of one job the greater one is the newer one."""
    return record.view.term, record.edition
