"""How `paramserver run` ends: with one line that says that everything promised is there, or with exit code 1."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paramserver.checkpoint import catalog
from paramserver.checkpoint.place import Place as Checkpoints
from tests.support.integration.harness import SCRIPTS, Place, place_fixture, read_summary

UNEVEN = SCRIPTS / "uneven.py"


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


def flags(place: Place, *more: str) -> list[str]:
    saved = ["--checkpoint-dir", str(place.work / "ckpt"), "--checkpoint-every", "1000"]
    counts = ["--servers", "1", "--workers", "2", "--slices-per-step", "2"]
    return [*counts, *saved, "--summary", str(place.work / "summary.json"), *more]


@pytest.mark.long
def test_a_script_that_just_ends_and_everything_is_there(place: Place) -> None:
    done = place.paramserver("run", UNEVEN, *flags(place), "--", "3", "6").check()
    summary = read_summary(place.work / "summary.json")
    assert summary["contributions_applied"] == 9
    assert summary["contributions_not_counted"] == {}
    assert summary["broken_promises"] == []
    assert summary["steps"] == 5
    assert done.out.splitlines()[-1] == (
        "everything promised is there: 5 steps, 9 contributions counted once, 0 contributions not counted, "
        f"last checkpoint {summary['checkpoint']}"
    )
    assert catalog.complete(Checkpoints(str(place.work / "ckpt")))[0].version == 5


def test_a_contribution_that_is_in_no_version_ends_the_run_with_code_1(place: Place) -> None:
    """Its worker was killed and nobody comes in its place."""
    lonely = flags(place, "--set", "cluster.max_restarts=0")
    done = place.paramserver("run", UNEVEN, *lonely, "--", "2", "2", "kill").check(1)
    summary = read_summary(place.work / "summary.json")
    assert summary["contributions_applied"] == 4
    assert summary["contributions_not_counted"] == {"incomplete": 1}
    (sentence,) = summary["broken_promises"]
    assert sentence.startswith("1 contributions are not counted")
    assert done.out.splitlines()[-1] == f"promise broken: {sentence}"


def test_a_script_that_has_not_trained_leaves_no_files_and_says_so(place: Place) -> None:
    script = place.work / "nothing.py"
    script.write_text("print('hello')\n")
    saved, summary = place.work / "model.safetensors", place.work / "summary.json"
    done = place.paramserver("run", script, *flags(place, "--save", str(saved))).check(1)
    assert done.out.splitlines()[-3:] == [
        "the script ended without training: it never called ctx.prepare or Client.init",
        f"promise broken: nothing was trained, so {saved}, which run.save names, was not written",
        f"promise broken: nothing was trained, so {summary}, which run.summary names, was not written",
    ]
    assert not saved.exists()
