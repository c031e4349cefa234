"""Push and pull of NumPy arrays or tensors by name, without a torch module."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paramserver import errors
from paramserver.core.layout.hypers import RULES, validate
from paramserver.core.layout.naming import instead_of
from paramserver.core.layout.plan import Kind, Plan, TensorSpec
from paramserver.tensors.dtypes import dtype_name
from paramserver.tensors.finite import is_finite
from paramserver.tensors.hypers import groups_to_proto
from paramserver.tensors.optimizers import describe, torch_class
from paramserver.v1 import types_pb2
from paramserver.wire.messages import tensor_to_proto
from paramserver.worker.engine import Engine
from paramserver.worker.flat import FlatSpace

Array = np.ndarray[Any, Any] | torch.Tensor


class RawClient:
    """Named arrays on the servers of a job. `paramserver.Client` is this class with its own way into a job."""

    def __init__(self, engine: Engine, close: Any, chunk_bytes: int = 0) -> None:
        self._engine = engine
        self._close = close
        self._chunk_bytes = chunk_bytes
        self._lock = threading.RLock()
        # The number of each array by its name; empty before there is a model.
        self._index: dict[str, int] = {}
        self._specs: list[TensorSpec] = []
        self._groups: list[types_pb2.GroupHypers] = []
        self._numpy = True

    @property
    def version(self) -> int:
        """The version of the arrays at hand: how many updates they had seen at the last ``init``, ``push`` or ``pull``.

        Raises UserError before these.

        >>> _ = client.init({"total": np.zeros(3)})
        >>> client.version
        0
        """
        self._ready()
        return self._engine.weights.version

    @property
    def rank(self) -> int:
        """This client's number among the workers, from 0. The coordinator gives it.

        >>> client.rank
        0
        """
        return self._engine.member.session.rank

    def init(
        self, arrays: Mapping[str, Array], optimizer: str | torch.optim.Optimizer = "sum", **hypers: float
    ) -> dict[str, Array]:
        """Register the arrays with these first values; returns copies of the job's values, with the same shapes.

        ``arrays``: NumPy arrays or tensors of any shape, float32 or float64, by name. The values of the first client
        count. ``optimizer``: a name, or a torch optimizer, of which the class and the numbers count. "sum" adds what is
        pushed. "sgd", "adam" and so on take their torch hyper-parameters as keyword arguments, torch's defaults
        otherwise. Raises ModelError if an array or the optimizer cannot be served, or if another client registered
        other arrays, UserError for a second call.

        >>> client.init({"w": torch.ones(2)}, "sgd", lr=0.5)["w"]
        tensor([1., 1.])
        """
        with self._lock:
            if self._index:
                raise errors.UserError("this client has been initialised already")
            for name in arrays:
                if not isinstance(name, str):
                    raise errors.ModelError(f"an array is named {name!r}: names are strings")
            tensors = {name: _tensor(name, value) for name, value in arrays.items()}
            if not tensors:
                raise errors.ModelError("there is nothing to serve: give at least one array")
            self._numpy = all(isinstance(value, np.ndarray | np.generic) for value in arrays.values())
            self._specs = [TensorSpec(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items()]
            name, group = _optimizer(optimizer, hypers)
            self._groups = groups_to_proto([group])
            model = types_pb2.ModelSpec(
                tensors=[tensor_to_proto(spec) for spec in self._specs],
                optimizer=types_pb2.OptimizerSpec(name=name, groups=self._groups),
                chunk_bytes=self._chunk_bytes,
            )

            def space(plan: Plan) -> FlatSpace:
                made = FlatSpace(plan.layout, torch.device("cpu"), (Kind.PARAMETER,))
                for index, tensor in enumerate(tensors.values()):
                    made.view(index).copy_(tensor)
                return made

            self._engine.entry.promote_to_begin()
            self._engine.entry.register(model, space)
            self._index = {name: index for index, name in enumerate(tensors)}
            return self._copy(None)

    def push(self, grads: Mapping[str, Array], samples: int = 1) -> int:
        """Contribute gradients (or, with "sum", summands) by name; names that are left out have none.

        Each array has shape and type of the registered one. Synchronous: this is the client's next part of the present
        step, and the call returns when the step is complete. Asynchronous: it is applied at once. Returns the version
        afterwards. ``samples``: the number of samples behind this contribution, which weighs it against the others of
        its step. Raises ModelError for unknown names, other shapes or types, NonFiniteError for numbers that are not
        finite, UserError before ``init`` or ``pull`` and for fewer than one sample.

        >>> _ = client.init({"w": torch.ones(2)}, "sgd", lr=0.5)
        >>> client.push({"w": torch.tensor([1.0, 0.0])})
        1
        """
        with self._lock:
            self._ready()
            if samples < 1:
                raise errors.UserError(f"samples must be at least 1, not {samples}")
            tensors = {name: self._checked(name, value) for name, value in grads.items()}
            self._engine.slices.ensure()
            self._engine.member.promote()
            while not self._contribute(tensors, samples):
                # A worker joined or left, and another worker had this part of the step. The next part is ours.
                self._engine.sender.handed.handed_in_again()
            return self._engine.weights.version

    def _contribute(self, tensors: Mapping[str, torch.Tensor], samples: int) -> bool:
        item = self._engine.loop.next_item(0, False)
        assert item is not None, "without a data set there is always a next slice"
        partial = self._engine.places.pool.take()
        partial.samples = samples
        for name, tensor in tensors.items():
            index = self._index[name]
            partial.space.view(index).copy_(tensor).mul_(samples)
            partial.used.add(index)
        return self._engine.loop.contribute(item, partial, self._groups)

    def pull(self, names: Sequence[str] | None = None, consistent: bool = True) -> dict[str, Array]:
        """Copies of the arrays (all, or those named), by name, in their shapes: all that was counted before this call.

        ``consistent``: each push is in all of the arrays or in none of them. ``False``: asynchronous mode with several
        servers takes what each server has, so a push may be in some arrays (or parts of them) and not in others yet;
        that does not wait. In synchronous mode the two are the same.
        Raises ModelError for an unknown name, UserError if there is no model yet, DeadlineError if a push has reached
        some servers and does not reach the others, as when its worker was lost and no other worker repeats its work.

        >>> _ = client.init({"total": np.zeros(3)})
        >>> version = client.push({"total": np.full(3, 3.0)})
        >>> client.pull(["total"])["total"]
        array([3., 3., 3.])
        """
        with self._lock:
            if not self._index:
                self._attach()
            if consistent:
                self._engine.reading.pull_cut()
            else:
                self._engine.reading.pull_latest()
            return self._copy(names)

    def _attach(self) -> None:
        self._groups = list(self._engine.entry.attach().optimizer.groups)
        self._specs = list(self._engine.shards.plan.layout.tensors)
        self._index = {spec.name: index for index, spec in enumerate(self._specs)}

    def _copy(self, names: Sequence[str] | None) -> dict[str, Array]:
        space = self._engine.weights.space
        result: dict[str, Array] = {}
        for name in self._index if names is None else names:
            value = space.view(self._number(name)).clone()
            result[name] = value.numpy() if self._numpy else value
        return result

    def _number(self, name: str) -> int:
        if name not in self._index:
            raise errors.ModelError(f"no array is named {str(name)[:80]!r}; {instead_of(str(name), self._index)}")
        return self._index[name]

    def _checked(self, name: str, value: Array) -> torch.Tensor:
        spec = self._specs[self._number(name)]
        if spec.kind is not Kind.PARAMETER:
            raise errors.ModelError(f"{name!r} is a {spec.kind.value} of the model: only parameters take gradients")
        tensor = _tensor(name, value)
        if tuple(tensor.shape) != spec.shape:
            raise errors.ModelError(f"{name!r} has shape {spec.shape}, its gradient has {tuple(tensor.shape)}")
        dtype = dtype_name(tensor.dtype)
        if dtype != spec.dtype:
            raise errors.ModelError(f"{name!r} is {spec.dtype}, its gradient is {dtype}")
        if not is_finite(tensor):
            raise errors.NonFiniteError(f"the gradient of {name!r} has a NaN or an infinite number; nothing was pushed")
        return tensor

    def _ready(self) -> None:
        if not self._index:
            raise errors.UserError("call init first")

    def close(self) -> None:
        """Leave the job. A second call does nothing.

        >>> client.close()
        """
        self._close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tensor(name: str, value: Any) -> torch.Tensor:
    """As a tensor in main memory, of the same shape. Raises ModelError for values that clients do not move."""
    if isinstance(value, torch.Tensor):
        if value.is_meta or value.layout is not torch.strided:
            what = "on the meta device, without values" if value.is_meta else "sparse"
            raise errors.ModelError(f"{name!r} is {what}: give a dense array of numbers")
        known = value.dtype in (torch.float32, torch.float64)
    elif isinstance(value, np.ma.MaskedArray):
        raise errors.ModelError(f"{name!r} is a masked array, whose mask would be lost: fill it first (filled())")
    elif isinstance(value, np.ndarray | np.generic):
        known = value.dtype in (np.float32, np.float64)  # in this machine's byte order
    else:
        raise errors.ModelError(f"{name!r} is a {type(value).__name__}: give a NumPy array or a tensor")
    if not known:
        raise errors.ModelError(f"{name!r} is of type {value.dtype}: clients move float32 and float64")
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    array = np.asarray(value, order="C")
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _optimizer(optimizer: str | torch.optim.Optimizer, hypers: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    if isinstance(optimizer, torch.optim.Optimizer):
        name, groups = describe(optimizer)
        if len(groups) > 1 or hypers:
            what = f"{len(groups)} parameter groups" if len(groups) > 1 else "hyper-parameters beside it"
            raise errors.ModelError(f"the optimizer has {what}: all arrays have the numbers of its one group")
        if any(state for state in optimizer.state.values()) and name != "adagrad":
            raise errors.ModelError("the optimizer has state, which arrays cannot take over: give a fresh one")
        return name, groups[0]
    if optimizer == "sum":
        validate("sum", [hypers])
        return "sum", hypers
    if optimizer not in RULES:
        validate(optimizer, [hypers])
    try:
        made = torch_class(optimizer)([torch.zeros(1, 1)], **hypers)
    except (TypeError, ValueError) as error:
        raise errors.ModelError(f"optimizer {optimizer!r}: {error}") from error
    name, groups = describe(made)
    return name, groups[0]
