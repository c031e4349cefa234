"""Real libraries on the backend "paramserver": ``make test-frameworks`` installs them. A rank is killed in each run.

The reference is the same script with gloo, and without a kill.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.integration.harness import ROOT, Done, Place, place_fixture

SCRIPTS = ROOT / "tests" / "support" / "frameworks"
# A run imports a library in two processes, and again after the kill: on a busy machine that takes minutes.
RUN_S = 400.0
pytestmark = pytest.mark.timeout(2 * RUN_S)


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


def run(place: Place, script: str, *arguments: str | Path, backend: str = "paramserver") -> Done:
    flags = ("--servers", "1", "--workers", "2", "--")
    command = place.launch(
        "run", "--ddp", SCRIPTS / script, *flags, *arguments, environ={"BACKEND": backend, "HF_HUB_OFFLINE": "1"}
    )
    return command.wait(RUN_S).check()


def assert_as_gloo(place: Place, name: str) -> None:
    found, expected = (torch.load(place.work / one, weights_only=True) for one in (name, "gloo.pt"))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-5, msg=key)


def assert_killed(done: Done, flag: Path) -> None:
    assert flag.exists(), "rank 1 has killed itself"
    assert "worker-1 ended unexpectedly (signal 9): all 2 ranks are started again" in done.said


def test_accelerate(place: Place) -> None:
    flag = place.work / "flag"
    assert_killed(run(place, "accelerated.py", place.work / "result.pt", flag), flag)
    run(place, "accelerated.py", place.work / "gloo.pt", backend="gloo")
    assert_as_gloo(place, "result.pt")


def test_the_trainer_of_transformers_goes_on_from_its_checkpoint(place: Place) -> None:
    flag = place.work / "flag"
    done = run(place, "trainer.py", place.work / "result.pt", place.work / "out", flag)
    assert_killed(done, flag)
    assert done.said.count("goes on from nothing") == 2
    assert done.said.count("goes on from checkpoint-3") == 2
    run(place, "trainer.py", place.work / "gloo.pt", place.work / "out-gloo", backend="gloo")
    assert_as_gloo(place, "result.pt")


def test_lightning_goes_on_from_its_checkpoint(place: Place) -> None:
    flag = place.work / "flag"
    done = run(place, "lit.py", place.work / "result.pt", place.work / "out", flag)
    assert_killed(done, flag)
    assert done.said.count("goes on from nothing") == 2
    assert done.said.count("goes on from last.ckpt") == 2
    run(place, "lit.py", place.work / "gloo.pt", place.work / "out-gloo", backend="gloo")
    assert_as_gloo(place, "result.pt")


def test_lightning_says_when_the_numbers_of_processes_differ(place: Place) -> None:
    script = (SCRIPTS / "lit.py", "--workers", "3", "--", place.work / "result.pt", place.work / "out")
    done = place.launch("run", "--ddp", *script).wait(RUN_S)
    assert done.code == 2
    assert "the Trainer has 2 processes (num_nodes × devices), and the job has 3 ranks" in done.said
