"""A trace in the format that Perfetto and chrome://tracing open: Chrome's trace events, as JSON.

Each process of the job is a process of the trace, each track of a process a thread. Times are microseconds by the
coordinator's clock, from the first span on. Arrows lead each contribution from its push to the server's publish.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from paramserver.core.trace.clocks import Alignment
from paramserver.core.trace.spans import Span

Event = dict[str, object]
# Numbers of threads of one process.
_THREADS = 1000
# The order in which viewers show roles.
_ROLES = ("coordinator", "server", "worker")


@dataclass(frozen=True, slots=True)
class Recorded:
    """The spans of one process, by its own clock."""

    name: str
    pid: int
    host: str
    spans: Sequence[Span]
    alignment: Alignment


def document(recorded: Iterable[Recorded], about: Mapping[str, object]) -> dict[str, object]:
    """The whole file. ``about``: facts about the trace, which viewers show beside it."""
    processes = with_whom([_aligned(one) for one in sorted(recorded, key=_order)])
    zero_ns = min((span.begin_ns for one in processes for span in one.spans), default=0)
    events: list[Event] = []
    flows: dict[int, list[_Point]] = defaultdict(list)
    for number, one in enumerate(processes, 1):
        events += _process(number, one)
        rows: dict[tuple[str, int], int] = {}
        for span, lane in zip(one.spans, lanes(one.spans), strict=True):
            # Perfetto takes the thread with the number of its process for the main one, and shows it first.
            main = _is_main(span.track) and number not in rows.values()
            thread = rows.setdefault((span.track, lane), number if main else _THREADS * number + len(rows))
            events.append(_event(span, number, thread, zero_ns))
            for flow in span.flows:
                flows[flow].append(_Point(span, number, thread, one.name))
        events += [
            _meta("thread_name", number, thread, name=track if not lane else f"{track} ({lane + 1})")
            for (track, lane), thread in rows.items()
        ]
        events += [_meta("thread_sort_index", number, thread, sort_index=thread) for thread in rows.values()]
    # Perfetto takes only numbers as names of arrows.
    arrows = count(1)
    for points in flows.values():
        events += _arrows(arrows, points, zero_ns)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}


def _is_main(track: str) -> bool:
    """Whether this is the track in which readers begin: of the script, of a shard, of a coordinator's calls."""
    return track in ("script", "calls") or (track.startswith("shard ") and track[6:].isdigit())


def lanes(spans: Sequence[Span]) -> list[int]:
    """By span, a number of its lane: within a lane of a track, two spans are apart, or one holds the other.

    ``spans`` begin in order; of two that begin together the longer one comes first.
    """
    # By track and lane, the ends of the spans that are open.
    open_: dict[str, list[list[int]]] = defaultdict(list)
    found = []
    for span in spans:
        tracks = open_[span.track]
        for ends in tracks:
            while ends and ends[-1] <= span.begin_ns:
                ends.pop()
        lane = next((n for n, ends in enumerate(tracks) if not ends or span.end_ns <= ends[-1]), len(tracks))
        if lane == len(tracks):
            tracks.append([])
        tracks[lane].append(span.end_ns)
        found.append(lane)
    return found


def with_whom(processes: Sequence[Recorded]) -> list[Recorded]:
    """Waits of scripts say for whom, as far as servers know: the reason of the pull that was answered last."""
    # By worker, the waits of its pulls at servers: (end, begin, reason). A worker that came last waits for nobody else.
    pulls: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for one in processes:
        for span in one.spans:
            worker = span.track.removesuffix(" pulls").rpartition(", ")[2]
            if span.name == "wait" and span.track.endswith(" pulls") and "for" in span.notes:
                whom = span.notes["for"]
                reason = one.name if whom.startswith(f"{worker} ") else f"{one.name}, which waited for {whom}"
                pulls[worker].append((span.end_ns, span.begin_ns, reason))
    for waits in pulls.values():
        waits.sort()
    return [replace(one, spans=[_explained(span, pulls.get(one.name, ())) for span in one.spans]) for one in processes]


def _explained(span: Span, pulls: Sequence[tuple[int, int, str]]) -> Span:
    if span.name != "wait" or span.track != "script" or "for" in span.notes or not pulls:
        return span
    last = bisect_right(pulls, (span.end_ns,)) - 1
    if last < 0 or pulls[last][0] <= span.begin_ns:  # none was answered during this wait
        return span
    return replace(span, notes={**span.notes, "for": pulls[last][2]})


@dataclass(frozen=True, slots=True)
class _Point:
    """A span through which a contribution passes, where viewers show it."""

    span: Span
    process: int
    thread: int
    name: str


def _arrows(numbers: Iterator[int], points: Sequence[_Point], zero_ns: int) -> list[Event]:
    """The way of a contribution: from its worker to each server, and there to the version that it is in."""
    sends = [point for point in points if point.name.startswith("worker")]
    events: list[Event] = []
    for server in sorted({point.process for point in points if not point.name.startswith("worker")}):
        there = sorted((p for p in points if p.process == server), key=lambda p: (p.span.begin_ns, p.span.end_ns))
        name = there[0].name
        mine = [p for p in sends if p.span.track in (f"to {name}", "script")][:1]
        way = [*mine, *there]
        if len(way) < 2:
            continue
        number = next(numbers)
        for position, point in enumerate(way):
            phase = "s" if position == 0 else "f" if position == len(way) - 1 else "t"
            event: Event = {
                "ph": phase,
                "id": number,
                "name": "contribution",
                "cat": "contribution",
                "ts": _us(point.span.begin_ns - zero_ns),
                "pid": point.process,
                "tid": point.thread,
            }
            events.append(event | {"bp": "e"} if phase == "f" else event)
    return events


def _aligned(one: Recorded) -> Recorded:
    """The process with its times by the coordinator's clock; spans begin in order, and longer ones come first."""
    to = one.alignment.aligned
    spans = [replace(span, begin_ns=to(span.begin_ns), end_ns=to(span.end_ns)) for span in one.spans]
    spans.sort(key=lambda span: (span.track != "script", span.track.startswith("torch"), span.begin_ns, -span.end_ns))
    return replace(one, spans=spans)


def _order(one: Recorded) -> tuple[int, int, str]:
    role, _, number = one.name.partition("-")
    place = _ROLES.index(role) if role in _ROLES else len(_ROLES)
    return place, int(number) if number.isdigit() else 0, one.name


def _process(number: int, one: Recorded) -> list[Event]:
    return [
        _meta("process_name", number, 0, name=one.name),
        _meta("process_labels", number, 0, labels=f"{one.host}, process {one.pid}"),
        _meta("process_sort_index", number, 0, sort_index=number),
    ]


def _event(span: Span, process: int, thread: int, zero_ns: int) -> Event:
    arguments: dict[str, object] = dict(span.notes)
    if span.step is not None:
        arguments["step"] = span.step
    event: Event = {
        "name": span.name,
        "cat": "torch" if span.track.startswith("torch") else "paramserver",
        "ts": _us(span.begin_ns - zero_ns),
        "pid": process,
        "tid": thread,
        "args": arguments,
    }
    if span.track == "events":
        return event | {"ph": "i", "s": "g"}
    return event | {"ph": "X", "dur": _us(span.end_ns - span.begin_ns)}


def _meta(name: str, process: int, thread: int, /, **arguments: object) -> Event:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": arguments}


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000
