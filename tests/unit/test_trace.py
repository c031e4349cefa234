"""Traces: what is recorded, clocks that are brought together, when a trace is complete, and the file."""

from __future__ import annotations

import json
import random
from itertools import count, pairwise
from pathlib import Path

import pytest

from paramserver.cli.record.parts import Parts, write
from paramserver.cli.record.trace import trace
from paramserver.core.trace.chrome import Recorded, document, lanes
from paramserver.core.trace.clocks import Alignment, Sample, align
from paramserver.core.trace.roll import Roll
from paramserver.core.trace.spans import Span
from paramserver.core.versions.names import AsyncName, SyncName
from paramserver.errors import ConfigError, UserError
from paramserver.membership.pulse import Pulse
from paramserver.membership.tracing import span_from_proto, span_to_proto
from paramserver.tracing import Recorder
from paramserver.v1.coordinator_pb2 import ClockSample, TracePart, TraceResponse
from paramserver.worker.job.phases import COMPUTE, DATA, OTHER, SEND, WAIT, Phases
from tests.support.traces import Trace

MS = 1_000_000


def recorder(most: int = 100) -> Recorder:
    ticks = count(MS, MS)
    return Recorder(lambda: next(ticks), most)


# ---- recording


def test_a_recorder_gives_each_span_once_and_drops_the_oldest_beyond_its_room() -> None:
    trace = recorder(most=3)
    assert not trace.on
    trace.begin(5)
    for number in range(5):
        trace.span("update", "shard 0", number, number, [number])
    taken, dropped = trace.take(2)
    assert ([span.step for span in taken], dropped) == ([2, 3], 2)
    taken, dropped = trace.take(2)
    assert ([span.step for span in taken], dropped, trace.empty) == ([4], 0, True)


def test_another_trace_begins_without_the_rest_of_the_former_one() -> None:
    trace = recorder()
    trace.begin(5)
    trace.span("update", "shard 0", 1)
    trace.end()
    trace.begin(5)
    assert trace.take(10) == ([], 0)


def phases_of(trace: Recorder) -> Phases:
    return Phases(Pulse(), trace)


def test_the_phases_of_a_script_follow_each_other_without_a_gap_and_end_after_the_steps() -> None:
    trace = recorder()
    trace.begin(2, script=True)
    phases = phases_of(trace)
    for step in (7, 7, 8, 9):  # two slices of the first step
        former = phases.enter(WAIT)
        phases.begins(SyncName(step, 0, 1, 2))
        phases.enter(former)
        if not trace.script:
            break
        phases.enter(DATA)
        phases.enter(COMPUTE)
        phases.hands_in(step, asynchronous=False)
        phases.enter(SEND)
        phases.enter(OTHER)
    spans, _ = trace.take(100)
    assert not trace.on
    assert trace.begun == 2
    steps = ["other", "data", "compute", "send", "other", "wait"] * 3
    assert [span.name for span in spans] == steps
    assert [span.step for span in spans] == [7] * 12 + [8] * 6
    assert all(earlier.end_ns == later.begin_ns for earlier, later in pairwise(spans))


def test_a_wait_of_the_script_says_for_whom() -> None:
    trace = recorder()
    trace.begin(2, script=True)
    phases = phases_of(trace)
    phases.begins(SyncName(7, 0, 1, 2))
    phases.enter(WAIT)
    phases.waited(trace.now(), "server-1")
    phases.enter(COMPUTE)
    phases.waited(trace.now(), "server-0")  # in the middle of its work
    phases.enter(OTHER)
    spans, _ = trace.take(100)
    found = [(span.name, span.notes.get("for"), span.step) for span in spans]
    assert found == [("wait", "server-1", 7), ("wait", "server-0", None), ("compute", None, 7)]


def test_in_asynchronous_mode_each_slice_is_a_step() -> None:
    trace = recorder()
    trace.begin(3, script=True)
    phases = phases_of(trace)
    for index in range(5):
        phases.begins(AsyncName(0, index))
        phases.begins(AsyncName(0, index))
    assert trace.begun == 3
    assert not trace.script


def test_a_trace_that_is_ended_from_outside_takes_no_more_phases() -> None:
    trace = recorder()
    trace.begin(3, script=True)
    phases = phases_of(trace)
    phases.begins(SyncName(1, 0, 1, 2))
    trace.end()
    phases.enter(DATA)
    assert not trace.script
    assert trace.take(10) == ([], 0)


def test_the_second_trace_counts_its_own_steps() -> None:
    trace = recorder()
    phases = phases_of(trace)
    for _ in range(2):
        trace.begin(1, script=True)
        phases.begins(SyncName(4, 0, 1, 2))
        phases.enter(DATA)
        assert trace.script, "the same step as at the end of the former trace is a step of this one"
        phases.begins(SyncName(5, 0, 1, 2))
        assert not trace.script


def test_a_span_travels_as_it_is() -> None:
    for span in (
        Span("send", "to server-0", 5, 9, 3, (1 << 62,), {"bytes": "7"}),
        Span("wait", "script", 5, 5),
    ):
        assert span_from_proto(span_to_proto(span)) == span


# ---- clocks


@pytest.mark.parametrize("seed", range(30))
def test_an_alignment_is_right_up_to_the_error_that_it_states(seed: int) -> None:
    """Whatever the way there and the way back take, and however far the clocks are apart."""
    chance = random.Random(seed)
    offset, now, samples = chance.randrange(-(10**12), 10**12), 10**12, []
    for _ in range(chance.randrange(1, 40)):
        there, back = (int(chance.expovariate(1 / (0.2 * MS))) for _ in range(2))
        samples.append(Sample(now, now + there + back, now + there + offset))
        now += 50 * MS
    found = align(samples)
    assert found.error_ns is not None
    assert abs(found.aligned(now) - (now + offset)) <= found.error_ns + 1
    assert found.error_ns <= min(sample.error_ns for sample in samples)


def test_a_clock_that_is_faster_is_followed() -> None:
    """100 millionths over a minute are 6 ms, and each question takes 0.1 ms."""
    samples = []
    for second in range(60):
        asked = second * 1000 * MS
        samples.append(Sample(asked, asked + MS // 10, int((asked + MS / 20) * (1 + 1e-4)) + 17))
    found = align(samples)
    for second in (0, 30, 59):
        at = second * 1000 * MS
        assert abs(found.aligned(at) - at * (1 + 1e-4) - 17) < MS // 10


def test_the_same_clock_is_believed_unless_a_question_shows_the_opposite() -> None:
    plausible = [Sample(1000, 3000, 1500), Sample(5000, 9000, 6000)]
    assert align(plausible, same_clock=True) == Alignment(0, 0)
    assert align([*plausible, Sample(10_000, 10_100, 20_000)], same_clock=True) != Alignment(0, 0)
    assert align(plausible).error_ns == 1000
    assert align([]).error_ns is None


# ---- when a trace is complete


def test_a_trace_is_over_when_all_workers_are_through_and_everybody_has_handed_in_the_rest() -> None:
    roll = Roll({1: "worker-0", 2: "worker-1"}, {3: "server-0"}, 20)
    roll.heard(1, 20, last=True)
    assert not roll.through
    roll.heard(2, 7, last=False)
    assert roll.missing() == {
        "worker-1": "it has not handed in all, 7 of 20 steps have begun",
        "server-0": "it has not handed in all",
    }
    roll.heard(2, 20, last=True)
    assert (roll.through, roll.over) == (True, False)
    roll.heard(3, 0, last=True)
    assert (roll.over, roll.missing()) == (True, {})


def test_who_is_gone_or_stops_early_is_waited_for_no_longer_and_named() -> None:
    roll = Roll({1: "worker-0", 2: "worker-1"}, {3: "server-0"}, 20)
    roll.heard(1, 12, last=True)
    roll.heard(2, 5, last=False)
    roll.present([1, 3, 9])
    roll.heard(9, 20, last=True)  # a newcomer
    assert roll.through
    roll.present([])
    assert roll.over
    assert roll.missing() == {
        "worker-0": "it stopped after 12 of 20 steps",
        "worker-1": "it is gone, 5 of 20 steps have begun",
        "server-0": "it is gone",
    }


# ---- the file


@pytest.mark.parametrize("seed", range(20))
def test_within_a_lane_spans_are_apart_or_hold_each_other(seed: int) -> None:
    chance = random.Random(seed)
    spans = [Span("x", "t", begin, begin + chance.randrange(50)) for begin in range(0, 200, 5)]
    spans.sort(key=lambda span: (span.begin_ns, -span.end_ns))
    for one, in_one in zip(spans, found := lanes(spans), strict=True):
        for other, in_other in zip(spans, found, strict=True):
            if in_one == in_other and one.begin_ns <= other.begin_ns < one.end_ns:
                assert other.end_ns <= one.end_ns


def test_spans_that_do_not_overlap_share_a_lane() -> None:
    assert lanes([Span("x", "t", 0, 9), Span("x", "t", 1, 3), Span("x", "t", 3, 9), Span("x", "t", 9, 12)]) == [0] * 4


def small() -> list[Recorded]:
    """A step of one worker and one server, whose clock is 1 s behind."""
    behind = Alignment(1000 * MS, 5000)
    worker = [
        Span("compute", "script", 1000 * MS, 1004 * MS, 3),
        Span("send", "to server-0", 1004 * MS, 1005 * MS, 3, (77,), {"bytes": "80"}),
        Span("wait", "script", 1004 * MS, 1009 * MS, 3),
    ]
    server = [
        Span("queue", "shard 0, worker-0", 5 * MS, 6 * MS, 3, (77,)),
        Span("sum and update", "shard 0", 6 * MS, 7 * MS, 3, (77,)),
        Span("publish", "shard 0", 7 * MS, 8 * MS, 3, (77,)),
        Span("wait", "shard 0, worker-0 pulls", 5 * MS, 8 * MS, notes={"for": "worker-1 (step 3, slice 1)"}),
    ]
    event = Span("joined", "events", 1002 * MS, 1002 * MS, notes={"text": "worker-1 <b>joined</b>"})
    return [
        Recorded("worker-0", 12, "a", worker, Alignment(0, 20_000)),
        Recorded("server-0", 11, "b", server, behind),
        Recorded("coordinator", 10, "a", [event], Alignment()),
    ]


def test_the_file_has_named_processes_aligned_times_and_the_way_of_each_contribution() -> None:
    trace = Trace(json.dumps(document(small(), {"steps": 1})))
    assert list(trace.processes.values()) == ["coordinator", "server-0", "worker-0"]
    (wait,) = trace.spans("worker", "wait")
    assert wait["args"]["for"] == "server-0, which waited for worker-1 (step 3, slice 1)"
    (way,) = trace.ways()
    assert [(span["name"], span["ts"]) for span in way] == [
        ("send", 4000.0),
        ("queue", 5000.0),
        ("sum and update", 6000.0),
        ("publish", 7000.0),
    ]
    assert trace.fits() == 1
    assert trace.about == {"steps": 1}


def test_a_clock_that_is_not_brought_in_line_is_seen_by_the_check() -> None:
    """The check of real traces would pass on anything if it did not fail here."""
    worker, server, coordinator = small()
    late = Recorded(server.name, server.pid, server.host, server.spans, Alignment(990 * MS))
    trace = Trace(json.dumps(document([worker, late, coordinator], {})))
    with pytest.raises(AssertionError):
        trace.fits(error_us=20.0)


def parts() -> Parts:
    answer = TraceResponse(number=1)
    for index, one in enumerate(small()):
        part = TracePart(name=one.name, pid=one.pid, host=one.host, index=index, clock="c" if one.host == "a" else "d")
        part.spans.extend(map(span_to_proto, one.spans))
        if one.name == "server-0":
            part.clocks.append(ClockSample(asked_ns=0, answered_ns=8000, coordinator_ns=1000 * MS + 4000))
            part.dropped = 4
        answer.parts.append(part)
    found = Parts()
    found.add(answer)
    return found


def test_parts_become_a_file_that_states_its_error(tmp_path: Path) -> None:
    found = parts()
    assert found.dropped(0) == {"server-0": 4}
    assert write(found, tmp_path / "t.json", {}) == pytest.approx(0.004)
    trace = Trace((tmp_path / "t.json").read_text())
    assert trace.about["clock_error_us"] == {"coordinator": 0, "server-0": 4.0, "worker-0": 0}
    assert trace.fits(error_us=4.0) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "t.json").mkdir()
    with pytest.raises(UserError, match="cannot be written to"):
        write(parts(), tmp_path / "t.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_wrong_wishes_are_refused_before_a_job_is_looked_for(tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    there.write_text("mine")
    for steps, output, wait, said in (
        (0, tmp_path / "t.json", 1.0, "--steps is 0, but must be from 1 to 1000"),
        (1001, tmp_path / "t.json", 1.0, "--steps is 1001"),
        (1, tmp_path / "t.json", float("nan"), "--wait is nan"),
        (1, there, 1.0, "exists; remove it, or choose another name with -o"),
        (1, tmp_path / "nowhere" / "t.json", 1.0, "there is no directory"),
        (1, Path("/proc/t.json"), 1.0, "the trace cannot be written to /proc/t.json"),
    ):
        with pytest.raises(ConfigError, match=said):
            trace(steps=steps, output=output, wait=wait)
    assert there.read_text() == "mine"


def test_each_thread_has_a_number_of_its_own_and_the_main_track_that_of_its_process() -> None:
    tracks = ["shard 1, worker-0", "shard 1", "shard 0", "shard 1, worker-0"]
    spans = [Span("wait", track, MS * place, MS * (place + 1)) for place, track in enumerate(tracks)]
    made = Trace(json.dumps(document([Recorded("server-0", 7, "a", spans, Alignment())], {})))
    (process,) = made.processes
    numbers = {track: thread for (_, thread), track in made.tracks.items()}
    assert len(numbers) == len(set(numbers.values())) == 3
    assert numbers["shard 1"] == process
