"""Numbers and texts in messages that say how long or how much: checked before anything is done with them.

The cost of a message is bounded by its length: no check makes a list as long as a number in a message.
"""

from __future__ import annotations

import math
import re

from paramserver.errors import ProtocolError
from paramserver.v1 import coordinator_pb2

# Slices of one step; places among workers.
MAX_SLICES = 100_000
# Clocks and numbers of slices rise one by one, so no honest number is larger. Sums of them fit into a message.
MAX_COUNT = 1 << 48
# Samples of one push, which are added up.
MAX_SAMPLES = 1 << 40
# A host name, a state, a reason.
MAX_TEXT_CHARS = 1000
MAX_METRICS = 1000
MAX_COMMAND_CHARS = 300
# Of a tensor of a contribution.
_DIGEST_BYTES = 8
# Steps of which one report tells.
MAX_STEPS = 64
_METRICS_URL = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):\d{1,5}/metrics")
# Ended processes in whose place a process comes.
MAX_REPLACED = 64


def seconds(name: str, value: float, most: float) -> float:
    """The value, if it is a time from 0 to ``most`` seconds; raises ProtocolError, for NaN too."""
    if not 0 <= value <= most:
        raise ProtocolError(f"{name} must be between 0 and {most:g} seconds, not {value:g}")
    return value


def patience(name: str, value: float, most: float) -> float:
    """How long a caller waits, but no longer than ``most`` seconds; raises ProtocolError for what is no time.

    A timer that is set to NaN is never due, nor are those behind it.
    """
    return min(seconds(name, value, math.inf), most)


def counting(name: str, value: int, most: int = MAX_COUNT) -> int:
    """The value, if something that counts one by one can have come so far; raises ProtocolError."""
    if value > most:
        raise ProtocolError(f"{name} {value} is out of bounds ({most})")
    return value


def text(name: str, value: str, most: int = MAX_TEXT_CHARS) -> str:
    """The value, if it is no longer than ``most`` characters; raises ProtocolError."""
    if len(value) > most:
        raise ProtocolError(f"{name} has {len(value)} characters, and {most} is the most")
    return value


def check_newcomer(request: coordinator_pb2.JoinRequest) -> None:
    """Check a newcomer's facts about itself, since they go to all members. Raises ProtocolError."""
    for name in ("address", "holds", "host"):
        text(name, getattr(request, name))
    counting("index", request.index, MAX_SLICES)
    if not text("the restart command", request.restart_command, MAX_COMMAND_CHARS).isprintable():
        raise ProtocolError("the restart command is not one printable line")
    if request.metrics_url and not _METRICS_URL.fullmatch(text("the address of metrics", request.metrics_url)):
        raise ProtocolError("the address of metrics is not http://HOST:PORT/metrics, or the same with https")
    counting("the number of replaced processes", len(request.replaces), MAX_REPLACED)
    text("the table of versions", " ".join((*request.versions, *request.versions.values())))


def check_report(report: coordinator_pb2.WorkerReport) -> None:
    """Bound a worker's report, which every reader of the status gets: cuts texts, leaves out metrics beyond the limit.

    Raises ProtocolError for numbers that cannot be.
    """
    for name in ("version", "clock", "epoch", "samples", "slices", "epochs_planned"):
        counting(name, getattr(report, name))
    seconds("slice_s", report.slice_s, MAX_COUNT)
    seconds("phase_s", report.phase_s, MAX_COUNT)
    del report.steps[MAX_STEPS:]
    for name in ("state", "waiting_for", "transport", "transport_reason", "host_tier", "phase", "first_metric"):
        if len(getattr(report, name)) > MAX_TEXT_CHARS:
            setattr(report, name, getattr(report, name)[:MAX_TEXT_CHARS] + " …")
    for field in ("logged_from", "logging_timeline", "logging_step"):
        counting(field, getattr(report, field))
    for call in report.logged:
        for field in ("step", "timeline"):
            counting(field, getattr(call, field))
        counting("samples", call.samples, MAX_SAMPLES)
        for name in [name for name in call.values if len(name) > MAX_TEXT_CHARS]:
            del call.values[name]
    for audited in report.audited:
        for field in ("timeline", "step", "slice"):
            counting(field, getattr(audited, field))
        if any(len(digest) > _DIGEST_BYTES for digest in audited.digests):
            raise ProtocolError(f"a digest of a contribution has at most {_DIGEST_BYTES} bytes")
    kept = 0
    for name in sorted(report.metrics):
        kept += len(name) <= MAX_TEXT_CHARS
        if kept > MAX_METRICS or len(name) > MAX_TEXT_CHARS:
            del report.metrics[name]
