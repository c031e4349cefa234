"""The costs of calls, bytes and arithmetic: measured by `paramserver simulate --calibrate`, or the defaults."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from paramserver.errors import ConfigError

# Of a 2-core machine with grpcio 1.85 and torch 2.13. Nanoseconds per parameter (float32).
_APPLY_NS = {"sgd": 0.3, "momentum": 0.45, "adamw": 0.8}
# By optimizer: numbers that it keeps for each weight.
STATE = {"sgd": 0, "momentum": 1, "adamw": 2}


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one machine.

    ``call_s``: seconds of a small push or pull there and back, with the worker's work around it. ``serve_s``: the part
    of these seconds in which the server is busy.
    ``push_bytes_s``, ``pull_bytes_s``: bytes per second that the transport moves if no link limits it.
    ``sum_ns``: to add one contribution; ``apply_ns``: to apply an update, by optimizer. Nanoseconds per parameter.
    ``check_ns``: to look whether a contribution is finite; ``hand_ns``: other work of a worker on its own gradients and
    on new weights. Nanoseconds per parameter. ``parallel``: how many times as fast arithmetic is with all threads of
    the machine, since memory limits it.
    ``frame_s``: seconds of a processor for a chunk that travels over gRPC, at both ends together. ``send_ns``,
    ``take_ns``: further nanoseconds for each byte.
    ``local_call_s``, ``local_serve_s``: of a call between processes that share memory.
    ``uneven``: how much the shares of connections differ on a link (coefficient of variation). A calibration does not
    measure it: the value was chosen so that steps between emulated hosts are predicted well.
    """

    call_s: float = 0.002
    serve_s: float = 0.0005
    push_bytes_s: float = 1.5e9
    pull_bytes_s: float = 1.6e9
    sum_ns: float = 0.4
    apply_ns: Mapping[str, float] = field(default_factory=lambda: dict(_APPLY_NS))
    check_ns: float = 0.15
    hand_ns: float = 0.6
    parallel: float = 1.7
    frame_s: float = 0.0004
    send_ns: float = 0.44
    take_ns: float = 0.7
    local_call_s: float = 0.0007
    local_serve_s: float = 0.0002
    uneven: float = 0.05

    def apply(self, optimizer: str) -> float:
        """Nanoseconds per parameter. Raises ConfigError for an optimizer that was not measured."""
        if optimizer not in self.apply_ns:
            raise ConfigError(f'--optimizer "{optimizer}" has no cost; there are {", ".join(self.apply_ns)}')
        return self.apply_ns[optimizer]

    def call(self, near: bool) -> tuple[float, float]:
        """Seconds of a call, and of its server. ``near``: the server is on the same host and shares memory."""
        return (self.local_call_s, self.local_serve_s) if near else (self.call_s, self.serve_s)

    def faster(self, threads: int) -> float:
        """How many times as fast as one thread so many threads do arithmetic."""
        return max(1.0, min(float(threads), self.parallel))


def save(costs: Costs, path: Path) -> None:
    """Write the costs as JSON. Raises ConfigError if the file cannot be written."""
    try:
        path.write_text(json.dumps(asdict(costs), indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f'the costs cannot be written to "{path}": {error.strerror}') from error


def load(path: Path) -> Costs:
    """Read a file of :func:`save`. Raises ConfigError if the file holds no costs."""
    try:
        said = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f'the costs in "{path}" cannot be read: {error.strerror}') from error
    except ValueError as error:
        raise ConfigError(f'"{path}" is no JSON: {error}') from error
    names = {one.name for one in fields(Costs)}
    if not isinstance(said, dict) or set(said) != names:
        raise ConfigError(f'"{path}" holds no costs: it must have {", ".join(sorted(names))}; calibrate again')
    apply = said.pop("apply_ns")
    if not isinstance(apply, dict) or not all(map(_is_cost, (*said.values(), *apply.values()))):
        raise ConfigError(f'"{path}" holds a cost that is no positive number; calibrate again')
    return Costs(**said, apply_ns=apply)


def _is_cost(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
