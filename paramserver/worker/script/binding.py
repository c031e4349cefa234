"""A torch module and its optimizers as flat tensors: their description, weights in, gradients and buffers out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from paramserver import errors
from paramserver.core.layout.hypers import Hypers
from paramserver.core.layout.plan import ADDED, Kind, Plan, TensorSpec
from paramserver.tensors.dtypes import SIZES, in_model_type, real_of
from paramserver.tensors.finite import are_finite, is_finite
from paramserver.tensors.hypers import groups_to_proto, optimizer_to_proto
from paramserver.tensors.private import copy_all, largest_of_all, scale_all
from paramserver.v1 import types_pb2
from paramserver.wire.messages import tensor_to_proto
from paramserver.worker.flat import FlatSpace, PartialSum, put, put_all
from paramserver.worker.gradients.backward import Backward
from paramserver.worker.gradients.leftover import Leftover
from paramserver.worker.later.groups import Groups
from paramserver.worker.weights.writes import equal_bits

# Beyond this an integer buffer no longer fits the float64 in which buffers travel.
_EXACT_INTEGER = 2**53


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A buffer by its place in the module, since a forward may put another tensor there."""

    index: int
    module: nn.Module
    key: str
    # Its changes are added up, and not averaged.
    added: bool = False

    @property
    def tensor(self) -> torch.Tensor:
        found = getattr(self.module, self.key)
        assert isinstance(found, torch.Tensor)
        return found


class ModelBinding:
    """Ties the tensors of one model, in the model's order, to their places in a flat space.

    Order: the model's parameters as ``model.parameters()`` gives them (then those that only an optimizer has), then
    its buffers. Parameters that no optimizer has are frozen, unless they are in ``later``, the parameter groups that
    the script adds to its only optimizer afterwards. ``only_trained``: frozen parameters are left
    out, and servers know nothing of them. ``rules``: how changes of buffers count, by pattern of names. Raises
    ModelError for what cannot be trained.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        later: Sequence[object] = (),
        only_trained: bool = False,
        rules: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.optimizers, self.script_groups = list(optimizers), Groups(optimizers, later)
        self.kinds = self.script_groups.kinds
        self.only_trained = only_trained
        # With `only_trained`: frozen parameters and their names, of which servers know nothing.
        self.left_out: list[tuple[str, nn.Parameter]] = []
        self.parameters: list[nn.Parameter] = []
        self.specs: list[TensorSpec] = []
        self._buffers: list[_Buffer] = []
        # Buffers of which only the change that slice 0 makes counts, by index.
        self._of_first: set[int] = set()
        # The parameters that train now.
        self._trained: list[int] = []
        self._collect_parameters(model)
        self._sort_out()
        self._collect_buffers(model, rules)
        self._check()
        self.leftover = Leftover(self.parameters)
        self._weights: FlatSpace | None = None
        # The space of which parameters are views.
        self._adopted: FlatSpace | None = None
        # How often each buffer had been written to when a slice began, or was gathered.
        self._buffer_marks: list[tuple[int, int]] = []
        # The name of the first buffer that was written to between two slices.
        self.written_buffer = ""
        # The hyper-parameters of the last call, and their messages.
        self._said: tuple[list[Hypers], list[types_pb2.GroupHypers]] = ([], [])

    # ---- description of the model

    def _collect_parameters(self, model: nn.Module) -> None:
        groups = self.script_groups.all()
        group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        names: dict[int, list[str]] = {}
        found: dict[int, nn.Parameter] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
            found[id(parameter)] = parameter
        for i, group in enumerate(groups):
            for j, parameter in enumerate(group["params"]):
                if id(parameter) not in found:
                    names[id(parameter)], found[id(parameter)] = [f"optimizer.{i}.{j}"], parameter
        for key, parameter in found.items():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise errors.ModelError(
                    f"parameter {names[key][0]!r} has no shape yet: run the model once before ctx.prepare"
                )
            group_index = group_of.get(key)
            if group_index is None and self.only_trained:
                self.left_out.append((names[key][0], parameter))
                continue
            self.parameters.append(parameter)
            self.specs.append(
                TensorSpec(
                    name=names[key][0],
                    shape=tuple(parameter.shape),
                    dtype=_dtype_name(parameter, names[key][0]),
                    kind=Kind.FROZEN if group_index is None else Kind.PARAMETER,
                    group=group_index or 0,
                    aliases=tuple(names[key][1:]),
                )
            )

    def _collect_buffers(self, model: nn.Module, rules: Mapping[str, str]) -> None:
        names: dict[int, list[str]] = {}
        found: list[tuple[nn.Module, str, torch.Tensor]] = []
        for prefix, module in model.named_modules(remove_duplicate=False):
            for key, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if id(buffer) not in names:
                    found.append((module, key, buffer))
                names.setdefault(id(buffer), []).append(f"{prefix}.{key}" if prefix else key)
        for module, key, buffer in found:
            name, *aliases = names[id(buffer)]
            rule = rule_of_buffer([name, *aliases], rules)
            if rule == "first":
                self._of_first.add(len(self.specs))
            self._buffers.append(_Buffer(len(self.specs), module, key, added=rule != "mean"))
            self.specs.append(
                TensorSpec(
                    name=name,
                    shape=tuple(real_of(buffer).shape),
                    dtype=_dtype_name(real_of(buffer), name),
                    kind=Kind.BUFFER,
                    group=ADDED if rule != "mean" else 0,
                    aliases=tuple(aliases),
                    persistent=key not in module._non_persistent_buffers_set,
                )
            )

    def _check(self) -> None:
        if not self._trained:
            raise errors.ModelError(
                "the model has no parameters to train: give the optimizer at least one (model.parameters())"
            )
        devices = {p.device for p in self.parameters} | {b.tensor.device for b in self._buffers}
        if len(devices) > 1:
            raise errors.ModelError(
                f"the model is spread over {', '.join(sorted(map(str, devices)))}: "
                "put it on one device before ctx.prepare"
            )
        for buffer in self._buffers:
            tensor = real_of(buffer.tensor)
            if tensor.is_floating_point() or tensor.dtype is torch.bool or not tensor.numel():
                continue
            low, high = tensor.aminmax()
            if max(-int(low), int(high)) > _EXACT_INTEGER:
                raise errors.ModelError(
                    f"buffer {self.specs[buffer.index].name!r} holds integers beyond 2**53, which would lose digits: "
                    "keep it out of the model's buffers"
                )

    def tensors(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The parameters and buffers as they are now, by index."""
        yield from enumerate(self.parameters)
        yield from ((buffer.index, buffer.tensor) for buffer in self._buffers)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.parameters[0].device

    def message(self, chunk_bytes: int) -> types_pb2.ModelSpec:
        """The model as the coordinator hears of it."""
        return types_pb2.ModelSpec(
            tensors=[tensor_to_proto(spec) for spec in self.specs],
            optimizer=optimizer_to_proto(self.kinds, self.groups()),
            chunk_bytes=chunk_bytes,
        )

    def groups(
        self, lr_factor: float = 1.0, present: Sequence[dict[str, Any]] | None = None
    ) -> list[types_pb2.GroupHypers]:
        """The hyper-parameters by parameter group, as they are now or in ``present``; rates are times ``lr_factor``."""
        hypers = self.script_groups.hypers(present)
        if lr_factor != 1.0:
            hypers = [{**group, "lr": float(group["lr"]) * lr_factor} for group in hypers]  # type: ignore[arg-type]
        if hypers != self._said[0]:
            self._said = hypers, groups_to_proto(hypers)
        return self._said[1]

    def hypers(self) -> list[Hypers]:
        """The hyper-parameters as plain values; raises ModelError for values that servers do not take."""
        return self.script_groups.hypers()

    def add_group(self, group: dict[str, object], epoch: int) -> None:
        """The script adds a later group in this epoch: its parameters train from now on. Raises ModelError."""
        self.script_groups.add(group, epoch)
        self._sort_out()

    def back_to(self, epoch: int) -> None:
        """The script begins this epoch: groups that it added in this or a later epoch wait again."""
        if self.script_groups.back_to(epoch):
            self._sort_out()

    def _sort_out(self) -> None:
        waits = self.script_groups.waits
        self._trained[:] = [
            index for index, spec in enumerate(self.specs) if spec.kind is Kind.PARAMETER and not waits(spec.group)
        ]
        vars(self).pop("backward", None)  # another one watches these parameters

    # ---- weights

    def space(self, plan: Plan) -> FlatSpace:
        """A flat space filled with the present values of the model, whose parameters become views of it."""
        space = FlatSpace(plan.layout, self.device)
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters):
                view = space.view(index)
                view.copy_(parameter)
                if view.dtype == parameter.dtype:
                    parameter.data = view
            for buffer in self._buffers:
                space.view(buffer.index).copy_(real_of(buffer.tensor))
        self._weights = space
        return space

    def load(self, weights: FlatSpace) -> None:
        """Bring the model to the version in ``weights``.

        Parameters become views of it where the element type allows that, so that a pull is one copy, or none.
        """
        self._weights = weights
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters):
                view = weights.view(index)
                if weights is not self._adopted and view.dtype == parameter.dtype:
                    parameter.data = view
                elif parameter.data_ptr() != view.data_ptr():
                    parameter.copy_(view)
        self._adopted = weights
        self.reset_buffers()

    def differ(self, originals: Mapping[int, torch.Tensor]) -> list[int]:
        """Which of these parameters do not have the values that they should have."""
        with torch.no_grad():
            return [
                index
                for index, value in sorted(originals.items())
                if not equal_bits(self.parameters[index], value.to(self.parameters[index].dtype))
            ]

    def reset_buffers(self) -> None:
        """Every slice begins with the buffers of its version."""
        if self._buffer_marks and not self.written_buffer:
            marks = zip(self._buffers, self._buffer_marks, self._marks(), strict=True)
            found = (self.specs[buffer.index].name for buffer, was, now in marks if was != now)
            self.written_buffer = next(found, "")
        with torch.no_grad():
            if tensors := [buffer.tensor for buffer in self._buffers]:
                starts = [self._start(buffer, tensor) for buffer, tensor in zip(self._buffers, tensors, strict=True)]
                copy_all(tensors, starts)
        self._buffer_marks = self._marks()

    def _marks(self) -> list[tuple[int, int]]:
        tensors = (buffer.tensor for buffer in self._buffers)
        return [(id(tensor), tensor._version) for tensor in tensors]

    def _now_and_start(self, buffer: _Buffer) -> tuple[torch.Tensor, torch.Tensor]:
        return real_of(buffer.tensor), real_of(self._start(buffer, buffer.tensor))

    def _start(self, buffer: _Buffer, like: torch.Tensor) -> torch.Tensor:
        assert self._weights is not None
        return in_model_type(self._weights.view(buffer.index), like.dtype)

    # ---- gradients

    def steps(self, only: Collection[int] | None = None) -> None:
        """The script steps on these parameters (None: on all). Raises UserError for gradients of an earlier step."""
        index = self.leftover.steps(self._trained if only is None else only)
        if index is not None:
            raise errors.UserError(
                f"the gradient of {self.specs[index].name!r} holds what an earlier step has left, since the script has "
                "not cleared it (optimizer.zero_grad()): a worker that takes this one's place does not have that, so "
                "the result would depend on who computes what. Clear gradients once for each step; to add gradients up "
                "over k batches, step on each k-th one, and say so with ctx.prepare(model, optimizer, loader, "
                "accumulate=k)"
            )

    def lacking(self, ever_used: Collection[int], only: Collection[int] | None = None) -> bool | None:
        """Whether tensors of zeros are missing which one process of torch would have. None: that is not known yet.

        See :meth:`gather`. Raises UserError if the script clears some gradients in one way and some in another.
        """
        trained = self._trained if only is None else only
        absent = [index for index in trained if index in ever_used and self.parameters[index].grad is None]
        try:
            ways = {self.leftover.keeps(index) for index in absent}
        except ValueError:
            raise errors.UserError(
                "the script sets some gradients to None and others to zeros, so a worker that has just come cannot "
                f"tell what the gradient of {self.specs[absent[0]].name!r} is, which this slice does not use: clear "
                "all gradients in one way (optimizer.zero_grad())"
            ) from None
        return True if True in ways else None if None in ways else False

    def gather(
        self,
        partial: PartialSum,
        samples: int,
        unscale: float = 1.0,
        only: Collection[int] | None = None,
        ever_used: Collection[int] = (),
    ) -> None:
        """Write samples × gradient of every parameter, and samples × change of every buffer, into a new partial sum.

        ``unscale``: the gradient is multiplied by this number first (one over the loss scale). ``only``: the parameters
        that this step is about, by index; others count as if they had no gradient. ``ever_used``: the parameters that
        earlier versions had gradients for: where the script keeps the tensors of gradients, one process of torch would
        have zeros for them.
        """
        partial.samples = samples
        places: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        with torch.no_grad():
            for index in self._trained if only is None else only:
                gradient = self.parameters[index].grad
                if gradient is None:
                    if index in ever_used and self.leftover.keeps(index):
                        partial.used.add(index)
                        partial.space.view(index).zero_()
                    continue
                if not self.leftover.counts(index, ever_used):
                    continue
                if gradient.is_sparse:
                    raise errors.ModelError(
                        f"the gradient of {self.specs[index].name!r} is sparse, "
                        "which servers do not take: use sparse=False"
                    )
                partial.used.add(index)
                if self.device.type == "cpu":
                    put(partial.space.view(index), gradient, samples, unscale)
                else:
                    places.append(partial.space.view(index))
                    gradients.append(gradient)
            put_all(places, gradients, samples, unscale)
        self.gather_buffers(partial, samples)

    def gather_buffers(self, partial: PartialSum, samples: int) -> None:
        """Write samples × change of every buffer into a partial sum; of one whose changes are added, the change."""
        with torch.no_grad():
            if self.device.type == "cpu":
                for buffer in self._buffers:
                    self._gather_buffer(buffer, partial, 1 if buffer.added else samples)
            elif self._buffers:
                self._gather_buffers(partial, samples)
        self._buffer_marks = self._marks()

    def leave_to_first(self, partial: PartialSum) -> None:
        """This is the sum of a slice that is not slice 0 of its step: some buffers do not change by it."""
        left = partial.used & self._of_first
        partial.used -= left
        partial.space.written |= left

    @cached_property
    def backward(self) -> Backward:
        """Takes gradients up while autograd makes them."""
        return Backward({index: self.parameters[index] for index in self._trained})

    def held_back(self) -> AbstractContextManager[None]:
        """Context of a backward pass that another one follows: its gradients do not leave."""
        backward: Backward | None = vars(self).get("backward")
        return nullcontext() if backward is None else backward.held_back()  # None: nothing has left early so far

    def has_gradients(self, only: Collection[int] | None = None) -> bool:
        """Whether a trained parameter has a gradient of this slice that is not zero. ``only``: of these, by index."""
        return self.leftover.has_new(self._trained if only is None else only)

    def _gather_buffer(self, buffer: _Buffer, partial: PartialSum, samples: int) -> None:
        tensor, start = self._now_and_start(buffer)
        if torch.equal(tensor, start):
            return
        place = partial.space.view(buffer.index)
        if tensor.dtype == place.dtype:
            torch.sub(tensor, start, out=place)
            if is_finite(place):  # almost always, and quick
                place.mul_(samples)
                partial.used.add(buffer.index)
                return
        elif not tensor.is_floating_point():
            torch.sub(tensor.to(place.dtype), start.to(place.dtype), out=place).mul_(samples)
            partial.used.add(buffer.index)
            return
        change = _change(tensor.to(place.dtype), start.to(place.dtype))
        torch.mul(change, samples, out=place)
        (partial.used if _has_changed([change]).item() else partial.space.written).add(buffer.index)

    def _gather_buffers(self, partial: PartialSum, samples: int) -> None:
        """Write all buffers of a device, and ask the device once which of them have changed.

        A device takes an operation on all numbers in the time of an operation on one buffer.
        """
        buffers: dict[torch.dtype, list[_Buffer]] = {}
        for buffer in self._buffers:
            if self.specs[buffer.index].elements:
                buffers.setdefault(partial.space.view(buffer.index).dtype, []).append(buffer)
        changed = []
        for dtype, alike in buffers.items():
            places = [partial.space.view(buffer.index) for buffer in alike]
            both = zip(*map(self._now_and_start, alike), strict=True)
            now, start = (torch.cat([one.reshape(-1).to(dtype) for one in ones]) for ones in both)
            changes = list(torch.split(_change(now, start), [place.numel() for place in places]))
            changed.append(_has_changed(changes))
            copy_all(places, [one.view_as(place) for one, place in zip(changes, places, strict=True)])
            averaged = [place for place, buffer in zip(places, alike, strict=True) if not buffer.added]
            if averaged:
                scale_all(averaged, samples)
        if changed:
            found = torch.cat(changed).tolist()
            for buffer, used in zip((one for alike in buffers.values() for one in alike), found, strict=True):
                (partial.used if used else partial.space.written).add(buffer.index)

    def clip(self, partial: PartialSum, limit: float) -> None:
        """Scale down gradients (not buffers) if the norm of their mean over the partial sum's samples exceeds limit."""
        views = [partial.space.view(index) for index in self._trained if index in partial.used]
        if not views or not partial.samples:
            return
        squares = [torch.linalg.vector_norm(view, dtype=torch.float64).square() for view in views]
        norm = float(torch.stack(squares).sum().sqrt()) / partial.samples
        factor = limit / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ has it
        if factor < 1.0:
            for view in views:
                view.mul_(factor)

    def non_finite(self, partial: PartialSum) -> str | None:
        """The name of the first tensor of the partial sum with a NaN or an infinite number, or None."""
        if are_finite(partial.space.segments()):
            return None
        for index in sorted(partial.used):
            if not is_finite(partial.space.view(index)):
                return self.specs[index].name
        return None


def _change(now: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """The change of each number; zero for infinities and NaNs that stay."""
    same = (now == start) | (now.isnan() & start.isnan())
    return (now - start).masked_fill_(same, 0)


def _has_changed(changes: list[torch.Tensor]) -> torch.Tensor:
    """Which of these have a number other than zero, on their device. None of them is empty."""
    return largest_of_all(changes) != 0


def rule_of_buffer(names: Sequence[str], rules: Mapping[str, str]) -> str:
    """By the first pattern that fits one of the buffer's names; without such a pattern the mean."""
    return next((rule for pattern, rule in rules.items() if any(fnmatchcase(name, pattern) for name in names)), "mean")


def _dtype_name(tensor: torch.Tensor, name: str) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_complex():
        raise errors.ModelError(
            f"{name!r} is of type {dtype}, which is not supported: make it a parameter of real numbers, with a last "
            "dimension of 2, and call torch.view_as_complex in the forward pass"
        )
    if dtype not in SIZES:
        raise errors.ModelError(f"{name!r} is of type {dtype}, which is not supported; supported: {', '.join(SIZES)}")
    return dtype
