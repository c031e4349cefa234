"""The report of a run under faults, and what the command refuses before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paramserver.cli.main import main, split_script_arguments
from paramserver.testing import chaos
from paramserver.testing.fired import Fired
from paramserver.testing.places import PLACES
from paramserver.testing.plan import parse
from paramserver.testing.report import Report

PLAN = parse("""
[[fault]]
at = "push.recv"
who = "server-1"
step = 7
do = "kill"

[[fault]]
call = "Shard.Push"
do = "drop"
""")
KILL = Fired(0, "server-1", "push.recv", "kill", 7, 4711, 101.5)
DROP = Fired(1, "worker-0", "Shard.Push", "drop", 2, 4712, 100.25)
GOOD: dict[str, Any] = {
    "mode": "sync",
    "weights_sha256": "w",
    "optimizer_sha256": "o",
    "buffers_sha256": "b",
    "contributions_applied": 40,
    "contributions_duplicate": 3,
    "seconds": 2.0,
}


def report(**changes: Any) -> Report:
    """One in which all went well, but for these changes."""
    facts: dict[str, Any] = {"fired": (KILL, DROP), "code": 0, "summary": GOOD, "twin": GOOD, **changes}
    return Report(PLAN, begun=100.0, **facts)


def test_a_good_run_has_no_problems() -> None:
    assert report().problems() == []
    assert report().lines() == [
        "#  planned                             struck    after   step  pid",
        "1  kill server-1 at push.recv, step 7  server-1  1.50 s  7     4711",
        "2  drop Shard.Push of *                worker-0  0.25 s  2     4712",
        "",
        "faults: 2 of 2 struck, 2 times in all",
        "contributions: 40 counted, 3 came again and changed nothing, 0 lost, 0 counted twice",
        "time: 2.0 s of training, 2.0 s without faults",
        "digests: weights, optimizer, buffers equal to those of the run without faults",
        "ok",
    ]


def test_a_fault_that_never_struck_is_a_failure_unless_that_is_allowed() -> None:
    idle = report(fired=(DROP,))
    assert idle.unfired == [0]
    assert idle.problems() == ["faults that never struck: 1"]
    assert idle.problems(allow_unfired=True) == []
    assert any("never" in line for line in idle.lines())


@pytest.mark.parametrize("key", ["weights_sha256", "optimizer_sha256", "buffers_sha256"])
def test_other_bits_are_a_failure(key: str) -> None:
    assert report(summary={**GOOD, key: "x"}).problems() == [f"{key} differ from the run without faults"]


def test_asynchronous_bits_may_differ_but_not_the_number_of_contributions() -> None:
    twin = {**GOOD, "mode": "async"}
    assert report(twin=twin, summary={**twin, "weights_sha256": "x"}).problems() == []
    lost = report(twin=twin, summary={**twin, "contributions_applied": 38})
    assert lost.problems() == ["2 contributions were lost"]
    twice = report(twin=twin, summary={**twin, "contributions_applied": 41})
    assert twice.problems() == ["1 contributions were counted twice"]


def test_a_run_that_failed_is_a_failure() -> None:
    assert report(code=3, summary=None).problems() == ["the run ended with exit code 3"]
    assert report(summary=None).problems() == ["the run left no summary"]


def test_without_a_twin_nothing_is_compared() -> None:
    alone = report(twin=None, summary={**GOOD, "weights_sha256": "x"})
    assert alone.problems() == []
    assert "digests: not compared, there was no run without faults" in alone.lines()


def test_the_report_for_programs_can_be_written() -> None:
    facts = json.loads(json.dumps(report(fired=(DROP,)).as_json()))
    assert facts["problems"] == ["faults that never struck: 1"]
    assert facts["faults"][0]["struck"] == []
    assert facts["faults"][1]["struck"] == [{"who": "worker-0", "after_s": 0.25, "step": 2, "pid": 4712}]
    assert parse(facts["plan"]) == PLAN


# ---- the command


def test_the_first_dashes_belong_to_chaos_and_the_second_to_the_run() -> None:
    tokens = ["chaos", "--plan", "p", "--", "run", "x.py", "--", "--epochs", "3"]
    assert split_script_arguments(tokens) == (["chaos", "--plan", "p"], ["run", "x.py", "--", "--epochs", "3"])


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [
        (["--", "run", "x.py"], "give either --plan FILE, or --seed and --faults"),
        (["--plan", "p", "--seed", "1", "--", "run", "x.py"], "give either --plan FILE"),
        (["--plan", "p", "--faults", "1", "--", "run", "x.py"], "go with --seed"),
        (["--seed", "1", "--", "run", "x.py"], "--seed needs --faults"),
        (["--seed", "1", "--faults", "1", "--no-twin", "--", "run", "x.py"], "--shape must say"),
        (["--seed", "1", "--faults", "1", "--shape", "2,2", "--", "run", "x.py"], "--shape is servers,workers,steps"),
        (["--seed", "1", "--faults", "1", "--shape", "2,0,3", "--", "run", "x.py"], "--shape is servers,workers,steps"),
        (["--seed", "1", "--faults", "0", "--shape", "2,2,3", "--", "run", "x.py"], "at least one fault"),
        (
            ["--seed", "1", "--faults", "1", "--shape", "2,2,3", "--kinds", "disk", "--", "run"],
            "no kind of fault 'disk'",
        ),
        (["--plan", "/nowhere/p", "--", "run", "x.py"], "the plan /nowhere/p cannot be read"),
        (["--seed", "1", "--faults", "1"], 'the command to run comes after "--"'),
        (["--seed", "1", "--faults", "1", "--", "status"], 'the command to run comes after "--"'),
        (["--seed", "1", "--faults", "1", "--", "run", "--resume", "ckpt"], "leave out --resume"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    tokens: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", *tokens]) == 2
    assert complaint in capsys.readouterr().err


def test_a_seeded_plan_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--seed", "7", "--faults", "5", "--shape", "2,3,20", "--print-plan"]) == 0
    assert len(parse(capsys.readouterr().out).faults) == 5


def test_the_run_without_faults_gets_files_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What one of the runs writes must not be read, or overwritten, by the other."""
    runs: list[list[str]] = []

    def run(command: list[str], variables: dict[str, str], output: Any = None) -> int:
        runs.append(list(command))
        Path(command[command.index("--summary") + 1]).write_text(
            json.dumps({**GOOD, "servers": 1, "workers": 1, "steps": 4})
        )
        return 0

    monkeypatch.setattr(chaos, "_paramserver", run)
    mine = str(tmp_path / "mine.json")
    command = [
        "run",
        "x.py",
        "--summary",
        mine,
        "--save",
        "w.safetensors",
        "--checkpoint-dir",
        "ckpt",
        "--",
        "--save",
        "z",
    ]
    options = chaos.Options(lambda shape: PLAN, allow_unfired=True)
    assert chaos.chaos(command, options, say=lambda line: None) == 0
    twin, real = runs
    assert real == command
    assert twin[:2] == ["run", "x.py"]
    assert twin[-3:] == ["--", "--save", "z"]
    for option in ("--summary", "--save", "--checkpoint-dir"):
        value = twin[twin.index(option) + 1]
        assert "paramserver-chaos-" in value
        assert not Path(value).parent.exists()  # all of it is gone


def test_the_document_has_all_places_and_its_example_is_a_plan() -> None:
    text = (Path(__file__).parents[2] / "docs" / "chaos.md").read_text()
    for name, place in PLACES.items():
        assert f"| `{name}` | {place.role} | {place.when} | {place.error or '–'} |" in text
    example = text.partition("```toml\n")[2].partition("```")[0]
    assert [str(fault) for fault in parse(example).faults] == [
        "kill server-1 at push.after_stage, step 7",
        "lose_reply Shard.P* of worker-*, 10% of them, every time",
        "stop coordinator for 2 s, after 1.5 s",
        "full checkpoints for 5 s, step 20",
    ]
