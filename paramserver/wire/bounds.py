"""Numbers and texts in messages that say how long or how much: checked before anything is done with them.

The cost of a message is bounded by its length: no check makes a list as long as a number in a message.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

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
# The names and values of the metrics of a report.
MAX_METRICS_BYTES = 64 << 10
MAX_COMMAND_CHARS = 300
# Members of one role at a time, and so their names. What a member says of itself at Join is in the record of the job.
MAX_MEMBERS = 4096
MAX_FACTS_BYTES = 1024
# A value, and what a message says around it.
_VALUE_BYTES = 16
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
    counting("index", request.index, MAX_MEMBERS - 1)
    if not text("the restart command", request.restart_command, MAX_COMMAND_CHARS).isprintable():
        raise ProtocolError("the restart command is not one printable line")
    if request.metrics_url and not _METRICS_URL.fullmatch(text("the address of metrics", request.metrics_url)):
        raise ProtocolError("the address of metrics is not http://HOST:PORT/metrics, or the same with https")
    counting("the number of replaced processes", len(request.replaces), MAX_REPLACED)
    text("the table of versions", " ".join((*request.versions, *request.versions.values())))
    if _facts(request) > MAX_FACTS_BYTES:  # people can do without the command
        request.restart_command = ""
    if (size := _facts(request)) > MAX_FACTS_BYTES:
        raise ProtocolError(
            f"address, host and address of metrics have {size} bytes, and {MAX_FACTS_BYTES} is the most"
        )


def _facts(request: coordinator_pb2.JoinRequest) -> int:
    """The bytes of the texts that the record of the job keeps of a newcomer."""
    facts = request.address, request.host, request.metrics_url, request.restart_command
    return sum(len(fact.encode()) for fact in facts)


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
    for name in without(report.metrics, MAX_METRICS, MAX_METRICS_BYTES):
        del report.metrics[name]


def kept(request: coordinator_pb2.SessionRequest) -> coordinator_pb2.SessionRequest:
    """A report without the lists that count once, after these were heard.

    A copy, since a part of a message that somebody keeps keeps the bytes of the whole message in memory.
    """
    if request.HasField("worker"):
        request.worker.ClearField("logged")
        request.worker.ClearField("audited")
    return coordinator_pb2.SessionRequest.FromString(request.SerializeToString())


def without(metrics: Mapping[str, float], most: int, most_bytes: int) -> list[str]:
    """The names that go, so that at most ``most`` metrics stay with at most ``most_bytes`` bytes.

    The first ones in the order of their names stay. Names that are too long go.
    """
    gone, kept, nbytes = [], 0, 0
    for name in sorted(metrics):
        size = len(name.encode()) + _VALUE_BYTES
        if len(name) > MAX_TEXT_CHARS or kept == most or nbytes + size > most_bytes:
            gone.append(name)
        else:
            kept, nbytes = kept + 1, nbytes + size
    return gone
