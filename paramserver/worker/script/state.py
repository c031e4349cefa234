"""The optimizer state that a script brings to a job, and the state that it reads from servers, in torch's format."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paramserver import errors
from paramserver.core.layout.hypers import Hypers
from paramserver.core.layout.plan import MAX_CHUNK_BYTES, Chunk, Kind, Layout, joined, units
from paramserver.tensors.dtypes import buffer_of, tensor_from, torch_dtype
from paramserver.tensors.finite import is_finite
from paramserver.tensors.optimizers import given_numbers
from paramserver.v1 import shard_pb2

if TYPE_CHECKING:
    from paramserver.worker.script.binding import ModelBinding


@dataclass(frozen=True, slots=True)
class Brought:
    """Optimizer state that a script had before ``ctx.prepare``: by tensor of the model and key.

    ``arrays``: one number per element of the tensor, flat, in the type in which servers keep the tensor.
    ``scalars``: one number for the whole tensor, float32.
    """

    arrays: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    scalars: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)

    def parts(self, chunks: Sequence[Chunk]) -> list[tuple[shard_pb2.StateRef, memoryview]]:
        """The pieces that go with the chunks of one server, and their bytes."""
        found: list[tuple[shard_pb2.StateRef, memoryview]] = []
        told: set[int] = set()
        for chunk in map(joined, units(chunks)):
            for piece in chunk.pieces:
                tensor = piece.tensor
                for key, array in sorted(self.arrays.get(tensor, {}).items()):
                    # An array may be shorter than its tensor, which then is in one piece. Only then it may need parts.
                    most = MAX_CHUNK_BYTES // array.element_size()
                    end = min(piece.tensor_start + piece.elements, array.numel())
                    for start in range(piece.tensor_start, end, most):
                        found.append(_part(tensor, key, start, array[start : min(start + most, end)], scalar=False))
                for key, number in sorted(self.scalars.get(tensor, {}).items()) if tensor not in told else ():
                    found.append(_part(tensor, key, 0, number.reshape(1), scalar=True))
                told.add(tensor)
        return found

    def digest(self) -> str:
        """A digest of all state; empty if there is no state."""
        if not self.arrays and not self.scalars:
            return ""
        digest = hashlib.sha256()
        for kind in (self.arrays, self.scalars):
            for tensor, states in sorted(kind.items()):
                for key, value in sorted(states.items()):
                    digest.update(f"{tensor} {key} ".encode())
                    digest.update(buffer_of(value.reshape(-1)))
        return digest.hexdigest()


NOTHING = Brought()


def _part(tensor: int, key: str, start: int, values: Tensor, scalar: bool) -> tuple[shard_pb2.StateRef, memoryview]:
    data = buffer_of(values)
    dtype = str(values.dtype).removeprefix("torch.")
    return shard_pb2.StateRef(tensor=tensor, key=key, start=start, bytes=data.nbytes, dtype=dtype, scalar=scalar), data


def bring(binding: ModelBinding, state: Mapping[Tensor, Mapping[str, Any]]) -> Brought:
    """The state of the script's optimizers, by parameter, checked.

    Raises ModelError if servers cannot go on from it.
    """
    arrays: dict[int, dict[str, Tensor]] = {}
    scalars: dict[int, dict[str, Tensor]] = {}
    groups = binding.hypers()
    index_of = {id(parameter): index for index, parameter in enumerate(binding.parameters)}
    for parameter, states in state.items():
        present = {key: value for key, value in states.items() if value is not None}
        index = index_of.get(id(parameter))
        if not present or index is None:  # state of a parameter that the optimizer no longer has
            continue
        spec = binding.specs[index]
        hypers, rule = groups[spec.group], binding.kinds.rule(spec.group)
        if binding.kinds.of(spec.group) == "adagrad" and _untouched(present, hypers):
            continue  # torch has it from the start, servers from the first update on
        arrays_here = rule.arrays_of(hypers, spec.shape)
        for key in sorted(present.keys() - rule.arrays - rule.scalars):
            raise errors.ModelError(
                f"the optimizer state of {spec.name!r} has {str(key)[:40]!r}, which torch.optim.{rule.title} does not "
                "have: load state that this kind of optimizer has saved"
            )
        required = arrays_here.keys() | rule.scalars
        for key in sorted(required - present.keys()):
            raise errors.ModelError(f"the optimizer state of {spec.name!r} lacks {key!r}: load all of it, or none")
        master = torch.float64 if spec.dtype == "float64" else torch.float32
        for key in sorted(required):  # torch reads no arrays that are switched off, either
            value = torch.as_tensor(present[key]).detach()
            shape = arrays_here.get(key, ())
            if value.numel() != math.prod(shape) or (shape and tuple(value.shape) != shape):
                raise errors.ModelError(
                    f"the optimizer state {key!r} of {spec.name!r} has shape {tuple(value.shape)}, its parameter has "
                    f"{spec.shape}: load the state of this model"
                )
            flat = value.to("cpu", torch.float32 if key in rule.scalars else master).reshape(-1).clone()
            if not is_finite(flat):
                raise errors.ModelError(
                    f"the optimizer state {key!r} of {spec.name!r} has a NaN or an infinite number: load finite state"
                )
            (scalars if key in rule.scalars else arrays).setdefault(index, {})[key] = flat
    return Brought(arrays, scalars)


def _untouched(states: Mapping[str, object], hypers: Hypers) -> bool:
    """Adagrad's state of a parameter as its constructor makes it."""
    total, first = states.get("sum"), hypers["initial_accumulator_value"]
    assert isinstance(first, float)
    fresh = torch.as_tensor(states.get("step", 1)).item() == 0
    return fresh and isinstance(total, Tensor) and bool(torch.all(total == first))


def in_torch_format(
    binding: ModelBinding, layout: Layout, parts: Sequence[tuple[shard_pb2.StateRef, memoryview]]
) -> dict[Tensor, dict[str, Any]]:
    """Optimizer state from servers as the ``state`` of a torch optimizer: by parameter and key, in float32 or float64.

    Arrays have the parameter's shape and are on its device. Raises ProtocolError for pieces that do not fit together.
    """
    groups = binding.hypers()
    flat: dict[int, dict[str, Tensor]] = {}
    filled: dict[tuple[int, str], int] = {}
    for ref, data in parts:
        rule = binding.kinds.rule(layout.tensors[ref.tensor].group) if ref.tensor < len(layout.tensors) else None
        if rule is None or ref.key not in (rule.scalars if ref.scalar else rule.arrays):
            raise errors.ProtocolError(f"a server sent the state {ref.key[:40]!r} of tensor {ref.tensor}")
        placement = layout.placements[ref.tensor]
        dtype = "float32" if ref.scalar else layout.segments[placement.segment].dtype
        values = tensor_from(bytearray(data), dtype)
        size = 1 if ref.scalar else rule.array_elements(ref.key, layout.tensors[ref.tensor].shape)
        if ref.dtype != dtype or ref.start + values.numel() > size:
            raise errors.ProtocolError(f"a server sent the state {ref.key!r} of tensor {ref.tensor} in another shape")
        states = flat.setdefault(ref.tensor, {})
        if ref.key not in states:
            states[ref.key] = torch.empty(size, dtype=torch_dtype(dtype))
        states[ref.key][ref.start : ref.start + values.numel()] = values
        if not ref.scalar:
            filled[ref.tensor, ref.key] = filled.get((ref.tensor, ref.key), 0) + values.numel()
    for (tensor, key), elements in filled.items():
        spec = layout.tensors[tensor]
        if elements != binding.kinds.rule(spec.group).array_elements(key, spec.shape):
            raise errors.ProtocolError(f"the servers sent only a part of the state {key!r} of tensor {tensor}")
    found: dict[Tensor, dict[str, Any]] = {}
    for index, parameter in enumerate(binding.parameters):
        spec = binding.specs[index]
        states = flat.get(index, {})
        if spec.kind is not Kind.PARAMETER or binding.script_groups.waits(spec.group):
            continue
        rule = binding.kinds.rule(spec.group)
        if binding.kinds.of(spec.group) == "adagrad" and not states:  # torch has it from the start
            placement = layout.placements[index]
            master = torch_dtype(layout.segments[placement.segment].dtype)
            first = float(groups[spec.group]["initial_accumulator_value"])  # type: ignore[arg-type]
            states = {"step": torch.zeros(1), "sum": torch.full((placement.elements,), first, dtype=master)}
        if states:
            numbers = {key: value.reshape(()) for key, value in states.items() if key in rule.scalars}
            arrays = {
                key: value.view(rule.array_shape(key, spec.shape) or ()).to(parameter.device)
                for key, value in states.items()
                if key not in numbers
            }
            found[parameter] = dict(sorted({**arrays, **given_numbers(rule, numbers)}.items()))
    return found


def same(ours: Mapping[Any, Mapping[str, Any]], theirs: Mapping[Any, Mapping[str, Any]]) -> bool:
    """Whether two states, by parameter number, are equal bit for bit; entries that are None or empty do not count."""
    one, other = _without_none(ours), _without_none(theirs)
    return one.keys() == other.keys() and all(
        one[p].keys() == other[p].keys()
        and all(_equal(torch.as_tensor(one[p][key]), torch.as_tensor(other[p][key])) for key in one[p])
        for p in one
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.cpu(), other.cpu())


def _without_none(state: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    kept = {p: {key: value for key, value in states.items() if value is not None} for p, states in state.items()}
    return {p: states for p, states in kept.items() if states}


class FarState(Mapping[Tensor, dict[str, Any]]):
    """``optimizer.state`` of a prepared optimizer: reads from the servers with each access, and cannot be written to.

    ``fetch`` gives the state by parameter; a parameter without state has an empty one.
    """

    def __init__(self, fetch: Callable[[], Mapping[Tensor, dict[str, Any]]]) -> None:
        self._fetch = fetch

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        return self._fetch().get(parameter, {})

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        """As of a dict."""
        return self._fetch().get(parameter, default)

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._fetch()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._fetch())

    def __len__(self) -> int:
        return len(self._fetch())

    def items(self) -> ItemsView[Tensor, dict[str, Any]]:
        """As of a dict, read once."""
        return self._fetch().items()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self._fetch()),)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise lost()

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = _refuse


def lost() -> errors.ModelError:
    """The refusal of a change that the servers would not see."""
    return errors.ModelError(
        "the script changes optimizer.state, which is a copy of the servers' state here, so the change would be lost: "
        "change it before ctx.prepare, or change optimizer.state_dict() and give it to ctx.load(optimizer=...) in "
        "every worker"
    )
