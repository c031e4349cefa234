"""Facts about the time of steps as messages, and back."""

from __future__ import annotations

from typing import Any

from paramserver.core.blame.facts import Blamed, Held, Made, Worked
from paramserver.core.blame.sentences import of_step, slices
from paramserver.core.blame.spent import LOSSES, PHASES, Spent
from paramserver.v1 import coordinator_pb2, shard_pb2

_FIELDS = (*PHASES, *LOSSES)
_SECONDS = tuple(f"{name}_s" for name in _FIELDS)
_MOST_S = 1e9


def spent_to_proto(spent: Spent) -> coordinator_pb2.Phases:
    """Seconds by phase."""
    return coordinator_pb2.Phases(**{f"{name}_s": getattr(spent, name) for name in _FIELDS})


def spent_from_proto(phases: coordinator_pb2.Phases) -> Spent:
    """Seconds by phase."""
    return Spent(*(_seconds(getattr(phases, field)) for field in _SECONDS))


def _seconds(value: float) -> float:
    """The value; 0 if it is no time."""
    return value if 0 <= value <= _MOST_S else 0.0


def worked_from_proto(step: coordinator_pb2.WorkerStep) -> Worked:
    """The time of a worker from one slice to the next one."""
    return Worked(step.step, spent_from_proto(step.phases), step.first)


def made_from_proto(times: shard_pb2.VersionTimes, shard: int, server: str, owner: int | None) -> Made:
    """How a version came about on this shard of this server. ``owner``: of the slices that came last, if known."""
    return Made(
        step=times.step,
        shard=shard,
        server=server,
        others=_seconds(times.others_s),
        last=_seconds(times.last_s),
        published=_seconds(times.published_s),
        worker=times.last if times.others else None,
        before=times.others or None,
        owner=owner,
        lo=times.lo,
        hi=times.hi,
        starved=_seconds(times.starved_s),
        paused=_seconds(times.paused_s),
        asynchronous=times.asynchronous,
    )


def held_from_proto(hold: shard_pb2.Hold) -> Held:
    """A worker that was held at the bound."""
    return Held(hold.worker, hold.by, hold.clock, _seconds(hold.seconds))


def blamed_to_proto(blamed: Blamed, offset_s: float) -> coordinator_pb2.BlamedStep:
    """A step that waited noticeably. ``offset_s``: from the clock of `Blamed.at` to seconds since 1970."""
    return coordinator_pb2.BlamedStep(
        step=blamed.step,
        asynchronous=blamed.asynchronous,
        waited_s=blamed.waited,
        member=blamed.member,
        slices=slices(blamed.lo, blamed.hi),
        cause=blamed.cause,
        cause_s=blamed.seconds,
        sentence=of_step(blamed),
        at_s=blamed.at + offset_s,
    )


def describe_blame(blame: coordinator_pb2.Blame) -> dict[str, Any]:
    """As plain values, for JSON."""
    return {
        "sentence": blame.sentence,
        "chronic": blame.chronic,
        "worst": [{name: getattr(step, name) for name in _STEP} for step in blame.worst],
        "held": [{name: getattr(held, name) for name in ("worker", "by", "times", "seconds")} for held in blame.held],
        "staleness": list(blame.staleness),
        "steps": blame.steps,
        "waited_s": blame.waited_s,
        "usual_s": blame.usual_s,
    }


def describe_phases(phases: coordinator_pb2.Phases) -> dict[str, float]:
    """Seconds by phase, under the names of the phases."""
    return {name: round(getattr(phases, f"{name}_s"), 4) for name in _FIELDS}


_STEP = ("step", "asynchronous", "waited_s", "member", "slices", "cause", "cause_s", "sentence", "at_s")
