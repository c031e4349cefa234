"""Checks of trace files: what Perfetto and chrome://tracing accept, and that spans of a step fit into each other."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

Event = dict[str, Any]
_KEYS = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "i": {"name", "cat", "ts", "s", "pid", "tid", "args"},
    "M": {"name", "pid", "tid", "args"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "t": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
}
# The order of the spans through which a contribution passes.
_ORDER = {"send": 0, "receive": 1, "queue": 2, "sum": 3, "update": 4, "sum and update": 4, "publish": 5}
_META = {"process_name": "name", "process_labels": "labels", "process_sort_index": "sort_index"} | {
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


class Trace:
    """A trace file that has passed all checks of the format."""

    def __init__(self, text: str) -> None:
        self.content = json.loads(text)
        assert self.content.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
        self.events: list[Event] = self.content["traceEvents"]
        self.about: Mapping[str, Any] = self.content["otherData"]
        self.processes = {e["pid"]: e["args"]["name"] for e in self.events if e["name"] == "process_name"}
        self.tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in self.events if e["name"] == "thread_name"}
        for event in self.events:
            self._check(event)
        self._check_nesting()
        self._check_flows()

    def _check(self, event: Event) -> None:
        phase = event["ph"]
        assert event.keys() - {"ph"} == _KEYS[phase], event
        assert type(event["pid"]) is int, "processes are numbered"
        assert type(event["tid"]) is int, "threads are numbered"
        assert event["pid"] in self.processes, "each process has a name"
        assert type(event.get("id", 0)) is int, "Perfetto drops arrows whose id is no number"
        if phase == "M":
            assert event["args"].keys() == {_META[event["name"]]}
            return
        assert (event["pid"], event["tid"]) in self.tracks, "each thread has a name"
        assert isinstance(event["ts"], float | int)
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
        assert event.get("s", "g") == "g"
        assert event.get("bp", "e") == "e"

    def _check_nesting(self) -> None:
        """Viewers draw two spans of a thread that overlap, and of which none holds the other, in the wrong place."""
        by_thread: dict[tuple[int, int], list[Event]] = defaultdict(list)
        for event in self.events:
            if event["ph"] == "X":
                by_thread[event["pid"], event["tid"]].append(event)
        for spans in by_thread.values():
            open_: list[float] = []
            for span in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
                while open_ and open_[-1] <= span["ts"] + 0.0005:
                    open_.pop()
                assert not open_ or span["ts"] + span["dur"] <= open_[-1] + 0.0005, span
                open_.append(span["ts"] + span["dur"])

    def _check_flows(self) -> None:
        """Each flow begins once and ends once, in spans."""
        flows: dict[int, list[str]] = defaultdict(list)
        begins = {(e["pid"], e["tid"], e["ts"]) for e in self.events if e["ph"] == "X"}
        for event in self.events:
            if event["ph"] in "stf":
                flows[event["id"]].append(event["ph"])
                assert (event["pid"], event["tid"], event["ts"]) in begins, "a flow goes through spans"
        for phases in flows.values():
            assert phases[0] == "s"
            assert phases[-1] == "f"
            assert set(phases[1:-1]) <= {"t"}

    def spans(self, process: str = "", name: str = "", **arguments: object) -> list[Event]:
        """The spans of processes whose names begin so, with this name and these arguments; in order."""
        found = [
            event
            for event in self.events
            if event["ph"] == "X"
            and self.processes[event["pid"]].startswith(process)
            and name in ("", event["name"])
            and all(event["args"].get(key) == value for key, value in arguments.items())
        ]
        return sorted(found, key=lambda event: event["ts"])

    def ways(self) -> list[list[Event]]:
        """For each contribution at each server, the spans through which it passes, in the order of the flow."""
        spans = {(e["pid"], e["tid"], e["ts"], e["args"].get("step")): e for e in self.events if e["ph"] == "X"}
        by_place = {key[:3]: span for key, span in reversed(spans.items())}
        ways: dict[int, list[Event]] = defaultdict(list)
        for event in self.events:
            if event["ph"] in "stf":
                ways[event["id"]].append(by_place[event["pid"], event["tid"], event["ts"]])
        return list(ways.values())

    def fits(self, error_us: float = 0.0) -> int:
        """Fails unless what follows from something else comes after it, within ``error_us``.

        A contribution is received, counted, added up and published after its worker has begun to send it. Returns how
        many whole ways there are.
        """
        seen = 0
        for way in self.ways():
            if self.processes[way[0]["pid"]].startswith("worker"):  # else the trace began in the middle of it
                assert [_ORDER[span["name"]] for span in way] == sorted(_ORDER[span["name"]] for span in way), way
                for earlier, later in itertools.pairwise(way):
                    assert later["ts"] >= earlier["ts"] - error_us, (earlier, later)
                seen += way[-1]["name"] == "publish"  # else the trace ended in the middle of it
        return seen
