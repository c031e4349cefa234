"""Causes injected one at a time into real runs: the right worker or server is named, with the right cause.

`make test` has no run of it; `tests/cluster/test_blame.py` shows two causes in one process.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.blame import CAUSES, MODES, SCRIPT, watch
from paramserver.core.blame.causes import Cause
from tests.support.integration.browser import Browser
from tests.support.integration.harness import Place, place_fixture, until


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


@pytest.mark.long
@pytest.mark.timeout(1500.0)
@pytest.mark.parametrize("mode", MODES)
def test_the_right_member_is_named_with_the_right_cause_in_19_of_20_runs(mode: str) -> None:
    missed = [(injected.name, found) for injected in CAUSES if not (found := watch(injected, mode)).right(injected)]
    assert len(CAUSES) == 20
    assert len(missed) <= 1, missed


@pytest.mark.long
@pytest.mark.timeout(900.0)
@pytest.mark.parametrize("mode", MODES)
def test_healthy_runs_name_nobody(mode: str) -> None:
    named = [found for _ in range(10) if not (found := watch(None, mode)).right(None)]
    assert not named


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("slow", "cause"), [("data", Cause.DATA), ("compute", Cause.COMPUTE)])
def test_the_page_names_a_worker_that_was_slowed_on_purpose(place: Place, slow: str, cause: Cause, mode: str) -> None:
    """In a real browser; the line on the page is the one of the API."""
    sizes = ("--servers", "2", "--workers", "3", "--slices-per-step", "3", "--mode", mode)
    bound = ("--staleness", "1") if mode == "async" else ()
    run = place.launch("run", SCRIPT, *sizes, *bound, "--", "--slices", "900", f"--{slow}", "little", "--always")
    run.wait_for(r"dashboard at http://127\.0\.0\.1:\d+")
    found = re.search(r"dashboard at (http://[0-9.:]+)", run.out)
    assert found is not None

    def said() -> list[str]:
        asked = urllib.request.Request(f"{found[1]}/api/v1/status", headers=place.reader())
        with urllib.request.urlopen(asked, timeout=20.0) as answer:
            status: Any = json.load(answer)
        blame: list[str] = status["blame"]
        return [line for line in blame if "worker-1" in line and line.endswith(str(cause))]

    with Browser(place.work / "profile") as browser:
        browser.open(place.page())
        until("worker-1 is named", said, 90.0)
        until("the page says the same", lambda: any(line in browser.text("#blame") for line in said()), 30.0)
    place.paramserver("stop").check()
    run.wait()
