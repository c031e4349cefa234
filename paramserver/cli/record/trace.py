"""``paramserver trace``: record what all processes of a running job do, as a file that Perfetto opens."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paramserver.cli.common import tell
from paramserver.cli.record.parts import Parts, write
from paramserver.cli.target import NEAR, Target, Where, find_target
from paramserver.errors import ConfigError, DeadlineError, ParamServerError

if TYPE_CHECKING:
    from paramserver.v1.coordinator_pb2 import TraceRequest, TraceResponse

_PARK_S = 2.0
_CALL_S = 10.0
# How long processes may take to hand in the rest when the command waits no longer.
_REST_S = 5.0
_INCOMPLETE = 6
MOST_STEPS = 1000
_LONGEST_S = 3600.0
# Bytes that have to be free before anything is recorded; most traces take more.
_ROOM = 65_536


def trace(
    *,
    steps: int = 20,
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("trace.json"),
    profiler: bool = False,
    wait: float = 120.0,
    where: Where = NEAR,
) -> int:
    """Record what all processes of a running job do, for Perfetto (ui.perfetto.dev) and chrome://tracing.

    The file shows for each worker how its time goes (data, compute, send, wait for whom, receive), and for each server
    when contributions come, are added up and are published, by one clock. If something is missing, the file has the
    rest, and the exit code is 6. Ctrl-C ends the trace early.

    Parameters
    ----------
    steps
        Steps of each worker, from 1 to 1000; 20 if not given. In asynchronous mode: slices of each worker.
    output
        The file, which must not exist; trace.json if not given.
    profiler
        Also record the operations of torch in the scripts (torch.profiler), which makes the steps slower.
    wait
        Seconds until the command writes what has come by then; 120 if not given.
    """
    _check(steps, output, wait)
    target = find_target(where)
    from paramserver.v1.coordinator_pb2 import TraceRequest

    parts = Parts()
    answer = _ask(target, TraceRequest(steps=steps, profiler=profiler))
    number, deadline, trouble = answer.number, time.monotonic() + wait, ""
    tell(f"Recording {steps} steps of {', '.join(answer.processes)} ...", file=sys.stderr)
    while True:
        parts.add(answer)
        left_s = deadline - time.monotonic()
        if answer.over or left_s <= -_REST_S:
            break
        request = TraceRequest(number=number, received=parts.received, stop=left_s <= 0)
        request.wait_s = min(_PARK_S, max(0.2, left_s))
        try:
            answer = _ask(target, request)
        except ParamServerError as error:
            trouble = str(error)
            break
        except KeyboardInterrupt:  # the trace ends early; another interrupt ends the command
            if left_s <= 0:
                raise
            deadline = time.monotonic()
    return _finish(parts, output, steps, answer, trouble)


def _check(steps: int, output: Path, wait: float) -> None:
    """Raises ConfigError before anything is recorded for nothing."""
    if not 1 <= steps <= MOST_STEPS:
        raise ConfigError(f"--steps is {steps}, but must be from 1 to {MOST_STEPS}")
    if not 0 < wait <= _LONGEST_S:
        raise ConfigError(f"--wait is {wait:g}, but must be above 0 and at most {_LONGEST_S:g} seconds")
    if output.exists() or output.is_symlink():
        raise ConfigError(f"{output} exists; remove it, or choose another name with -o")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"there is no directory {output.absolute().parent}; make it, or choose another name with -o")
    try:
        with tempfile.NamedTemporaryFile(dir=output.absolute().parent, prefix=f".{output.name}.") as file:
            file.write(bytes(_ROOM))
            file.flush()
    except OSError as error:
        raise ConfigError(f"the trace cannot be written to {output}: {error.strerror or error}") from error


def _ask(target: Target, request: TraceRequest) -> TraceResponse:
    from paramserver.v1.coordinator_pb2 import TraceResponse

    response = target.call("Coordinator.Trace", request, _CALL_S)
    assert isinstance(response, TraceResponse)
    return response


def _finish(parts: Parts, output: Path, steps: int, answer: TraceResponse, trouble: str) -> int:
    """Write what has come, and say what is missing; the exit code."""
    missing = dict(answer.missing)
    for name, why in sorted(missing.items()):
        _warn(f"{name}: {why}")
    if trouble:
        _warn(f"the job could not be asked for the rest: {trouble}")
    dropped = parts.dropped(answer.dropped)
    for name, count in sorted(dropped.items()):
        _warn(f"{name}: {count} spans were dropped, since more came than are kept: trace fewer steps")
    if not parts.spans:
        raise DeadlineError("no process has handed anything in, so there is no file")
    error_ms = write(parts, output, {"steps": steps, "missing": missing, "dropped": dropped})
    clocks = f"their clocks agree within {error_ms:.3f} ms" if error_ms else "they read the same clock"
    if error_ms is None:
        clocks = "how well their clocks agree is not known"
    tell(f"{output}: {parts.spans} spans of {len(parts.names)} processes; {clocks}.")
    tell("Open it at https://ui.perfetto.dev, or in chrome://tracing.")
    return _INCOMPLETE if missing or trouble or dropped else 0


def _warn(text: str) -> None:
    tell(f"paramserver: warning: {text}", file=sys.stderr)
