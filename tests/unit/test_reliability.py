"""The document of measured reliability: what it says of good and bad results, and what the cases are."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from paramserver.testing.fired import Fired
from paramserver.testing.places import PLACES
from paramserver.testing.plan import Plan, Planned, parse
from tests.support.faults import document, runs
from tests.support.faults.cases import WHEN, Case, Job, campaign, kills, kills_of_copies, matrix, sampled
from tests.support.faults.history import Seen


def outcome(name: str, place: str, when: str, verdict: str = "ok", total_s: float | None = None) -> runs.Outcome:
    recoveries = [] if total_s is None else [runs.Recovery("server-1", 0.25, total_s)]
    return runs.Outcome(name, "server-1", place, when, verdict, "", 3.0, 1, 1, 2, recoveries)


def test_every_place_and_every_moment_is_in_the_matrix() -> None:
    cases = matrix()
    assert len({case.name for case in cases}) == len(cases)
    struck = Counter(case.place for case in cases)
    for name, place in PLACES.items():
        processes = 2 if place.role == "server" else 1
        assert struck[name] >= processes * len(WHEN), name
    for case in cases:
        assert [str(f) for f in parse(case.plan.to_toml()).faults] == [str(f) for f in case.plan.faults], case.name


def test_the_sample_is_of_all_roles() -> None:
    assert {case.who.partition("-")[0] for case in sampled()} == {"server", "worker", "coordinator", "store"}


def test_a_campaign_has_as_many_faults_as_asked_for_and_every_run_its_own() -> None:
    cases = campaign(3, runs=50, each=4)
    assert sum(len(case.plan.faults) for case in cases) == 200
    assert len({case.plan.to_toml() for case in cases}) == 50
    assert Counter(case.job.mode for case in cases) == {"sync": 38, "async": 12}


@pytest.mark.parametrize("role", ["worker", "server"])
def test_kills_leave_steps_between_them(role: str) -> None:
    (case,) = kills(role, 1, 10)
    steps = [fault.step for fault in case.plan.faults]
    gap = {"worker": 120, "server": 40}[role]
    assert steps == [gap * (time + 1) for time in range(10)]
    assert case.job.steps >= 11 * gap


def test_recovery_of_a_server_is_until_its_successor_publishes() -> None:
    fault = Planned("process", "server-1", "kill", "server-1", step=3)
    case = Case("x", "server-1", "(anywhere)", "middle", Job(), Plan((fault,)))
    noted = [
        Fired(1, "server-0", "commit.after_log_before_reply", "note", 2, 11, 99.0),
        Fired(0, "server-1", "", "kill", 3, 12, 100.0),
        Fired(1, "server-0", "commit.after_log_before_reply", "note", 3, 11, 100.1),
        Fired(3, "coordinator", "coord.before_timeline", "note", -1, 10, 100.5),
        Fired(1, "server-0", "commit.after_log_before_reply", "note", 3, 11, 102.0),
        Fired(1, "server-1", "commit.after_log_before_reply", "note", 3, 13, 102.5),
    ]
    assert runs.recoveries(case, noted) == [runs.Recovery("server-1", 0.5, 2.5)]
    assert runs.recoveries(case, noted[:3]) == [runs.Recovery("server-1", None, None)]


def test_recovery_of_a_worker_is_until_all_servers_have_its_step() -> None:
    fault = Planned("at", "worker.after_grad", "kill", "worker-1", step=3)
    case = Case("x", "worker-1", "worker.after_grad", "middle", Job(), Plan((fault,)))
    noted = [
        Fired(0, "worker-1", "worker.after_grad", "kill", 3, 12, 100.0),
        Fired(1, "server-0", "commit.after_log_before_reply", "note", 2, 11, 100.1),
        Fired(2, "coordinator", "coord.before_generation", "note", -1, 10, 101.0),
        Fired(1, "server-0", "commit.after_log_before_reply", "note", 3, 11, 101.25),
        Fired(1, "server-1", "commit.after_log_before_reply", "note", 3, 13, 101.5),
        Fired(1, "server-0", "commit.after_log_before_reply", "note", 4, 11, 101.75),
    ]
    assert runs.recoveries(case, noted) == [runs.Recovery("worker-1", 1.0, 1.5)]


def test_the_document_shows_what_went_wrong() -> None:
    results = [
        outcome("a", "push.recv", "first", total_s=2.0),
        outcome("b", "push.recv", "second", total_s=3.5),
        outcome("c", "push.recv", "middle", "differs"),
        outcome("d", "apply.mid", "last, chunk 1"),
        outcome("e", "apply.mid", "last, chunk 2", "did not fire"),
        outcome("f replicas", "apply.mid", "last"),
    ]
    text = document.text({result.name: result for result in results})
    copies = sum(case.job.replicas > 0 for case in matrix())
    assert f"5 of {len(matrix()) - copies} cases have been run: 3 ok, 1 differs, 1 did not fire." in text
    assert f"With replicas, 1 of {copies} cases have been run: 1 ok." in text
    assert "| server-1 | `push.recv` | ok | ok | differs | – | 3.50 s |" in text
    assert "| server-1 | `apply.mid` | – | – | – | did not fire (2) | – |" in text


def test_quantiles_of_recovery_times() -> None:
    measured = [runs.Recovery("server-0", 0.1 * n, 1.0 + 0.1 * n) for n in range(1, 21)]
    run = runs.Outcome("kills of servers, run 0", "server", "", "", "ok", "", 60.0, 20, 20, 0, measured)
    text = document.text({run.name: run})
    assert "| server | 20 | detection | 1.00 s | 1.90 s | 2.00 s |" in text
    assert "| server | 20 | total | 2.00 s | 2.90 s | 3.00 s |" in text


def test_kills_of_servers_with_replicas_have_a_table_of_their_own() -> None:
    measured = [runs.Recovery("server-0", 0.05, 0.01 * n) for n in range(6, 26)]
    name = "kills of servers with replicas, sync, run 0"
    run = runs.Outcome(name, "server, sync", "", "", "ok", "", 60.0, 20, 20, 0, measured)
    other = runs.Outcome("kills of servers, run 0", "server", "", "", "ok", "", 60.0, 1, 1, 0, [])
    text = document.text({run.name: run, other.name: other})
    assert "| sync | 20 | promotion | 0.10 s | 0.19 s | 0.20 s |" in text
    assert "| sync | 20 | total | 0.15 s | 0.24 s | 0.25 s |" in text
    assert "1 runs with 20 kills: 1 runs ok. The jobs went back 0 times, and 0 steps were done again." in text


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_kills_of_copies_go_round_and_never_strike_by_themselves(mode: str) -> None:
    first, second = kills_of_copies(mode, 2, 3)
    assert [fault.who for fault in first.plan.faults] == ["server-0", "server-1", "server-0"]
    assert second.plan.faults[0].who == "server-1"
    assert all(fault.step is not None and fault.step > first.job.contributions for fault in first.plan.faults)
    assert first.stays
    assert not first.job.checkpoints


def test_recovery_with_replicas_is_until_a_worker_has_the_next_version() -> None:
    fault = Planned("process", "server-1", "kill", "server-1", step=3)
    case = Case("x", "server-1", "(anywhere)", "middle", Job(replicas=1), Plan((fault,)))
    noted = [
        Fired(0, "server-1", "", "kill", 3, 12, 100.0),
        Fired(1, "coordinator", "coord.before_promotion", "note", -1, 10, 100.125),
    ]
    versions = [(99.0, 3), (100.0625, 3), (100.25, 4)]
    seen = [Seen("w", 0.0, at, 0, (one, one), ("", ""), (0.0, 0.0), 0.0) for at, one in versions]
    assert runs.recoveries(case, noted, seen) == [runs.Recovery("server-1", 0.125, 0.25)]
    assert runs.recoveries(case, noted, seen[:2]) == [runs.Recovery("server-1", 0.125, None)]


def test_results_can_be_read_again(tmp_path: Path) -> None:
    results = {"a": outcome("a", "push.recv", "first", total_s=2.0), "b": outcome("b", "push.recv", "last", "failed")}
    runs.save(tmp_path / "results.json", results)
    assert runs.load(tmp_path / "results.json") == results
    assert runs.load(tmp_path / "none.json") == {}


PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def test_writing_results_keeps_what_people_have_written() -> None:
    former = PAGE.read_text()
    written = document.document(former, {})
    head = former.partition("## Faults on purpose")[0]
    assert written.startswith(head)
    assert "Not run." in written
    with pytest.raises(ValueError, match="Faults on purpose"):
        document.document("# Another page", {})


@pytest.mark.parametrize(
    ("page", "heading", "least"),
    [
        ("reliability.md", "## What cannot happen silently", 50),
        ("migration.md", "## What is as in DDP", 15),
        ("migration.md", "## What differs in meaning", 40),
    ],
)
def test_each_row_of_a_table_of_promises_names_a_test_that_exists(page: str, heading: str, least: int) -> None:
    table = (PAGE.parent / page).read_text().partition(heading)[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")][2:]
    rows = [row for row in rows if row[-1].strip()]  # others are headings
    assert len(rows) > least
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[-1])
        assert named, row
        for path, name in named:
            assert f"def {name}(" in (PAGE.parents[1] / path).read_text(), row
