"""Optimizers and hyper-parameters as messages. Their meaning is checked by `paramserver.core.layout.optimizers`."""

from __future__ import annotations

from collections.abc import Iterable

from paramserver.core.layout.hypers import Hypers, HyperValue
from paramserver.core.layout.optimizers import Optimizers
from paramserver.errors import ProtocolError
from paramserver.v1 import types_pb2 as types


def to_proto(hypers: Hypers) -> types.GroupHypers:
    """The message of one parameter group, sorted by name, so that equal groups give equal bytes."""
    message = types.GroupHypers()
    for name in sorted(hypers):
        value = hypers[name]
        if isinstance(value, bool):
            message.hypers.append(types.Hyper(name=name, flag=value))
        elif isinstance(value, tuple):
            message.hypers.append(types.Hyper(name=name, numbers=types.Numbers(values=value)))
        else:
            message.hypers.append(types.Hyper(name=name, number=float(value)))
    return message


def from_proto(message: types.GroupHypers) -> dict[str, HyperValue]:
    """The hyper-parameters of one group, unchecked. Raises ProtocolError for a doubled name or one without a value."""
    hypers: dict[str, HyperValue] = {}
    for hyper in message.hypers:
        if hyper.name in hypers:
            raise ProtocolError(f"hyper-parameter {hyper.name[:40]!r} is given twice in one group")
        kind = hyper.WhichOneof("value")
        if kind == "flag":
            hypers[hyper.name] = hyper.flag
        elif kind == "number":
            hypers[hyper.name] = hyper.number
        elif kind == "numbers":
            hypers[hyper.name] = tuple(hyper.numbers.values)
        else:
            raise ProtocolError(f"hyper-parameter {hyper.name[:40]!r} has no value")
    return hypers


def groups_to_proto(groups: Iterable[Hypers]) -> list[types.GroupHypers]:
    return [to_proto(hypers) for hypers in groups]


def groups_from_proto(messages: Iterable[types.GroupHypers]) -> list[dict[str, HyperValue]]:
    """Raises ProtocolError as `from_proto` does."""
    return [from_proto(message) for message in messages]


def optimizers_of(message: types.OptimizerSpec) -> Optimizers:
    """The optimizers of a model, by parameter group; what servers do not know is not refused here."""
    return Optimizers(tuple(message.names) or (message.name,))


def optimizer_to_proto(optimizers: Optimizers, groups: Iterable[types.GroupHypers]) -> types.OptimizerSpec:
    """As a message."""
    several = len(optimizers.names) > 1
    name, names = ("", optimizers.names) if several else (optimizers.names[0], ())
    return types.OptimizerSpec(name=name, names=names, groups=groups)
