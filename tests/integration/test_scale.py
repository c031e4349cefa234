"""`paramserver scale` in a run: workers and servers come and go while it trains."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.integration.harness import SCRIPTS, Place, complaint, place_fixture, read_summary

TRAIN = SCRIPTS / "train.py"
EPOCHS = ("--epochs", "10")
TRAINS = r"worker-\d \| rank \d of \d trains"


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


@pytest.mark.long
def test_more_and_fewer_workers(place: Place) -> None:
    alone, scaled, hurry = place.work / "alone.json", place.work / "scaled.json", place.work / "hurry"
    environ = {"PARAMSERVER_RUN__SUMMARY": str(alone), "PARAMSERVER_TRAINING__SLICES_PER_STEP": "4"}
    place.python(TRAIN, *EPOCHS, environ=environ).check()
    flags = ("--servers", "2", "--workers", "2", "--slices-per-step", "4", "--summary", scaled)
    running = place.launch("run", TRAIN, *flags, "--", *EPOCHS, "--pace", "0.5", "--hurry", hurry)
    running.wait_for(TRAINS, count=2)
    assert place.paramserver("scale", "workers=4").check().out == "4 workers now.\n"
    running.wait_for(r"worker-[23] \| rank [23] of \d trains", count=2)
    assert place.paramserver("scale", "workers=1").check().out == "1 workers now.\n"
    text = complaint(place.paramserver("scale", "servers=0"), 2)
    assert 'servers is "0", but must be an integer from 1' in text
    hurry.touch()
    done = running.wait().check()
    assert "4 workers are wished for, 2 are there" in done.out
    for rank in (1, 2, 3):
        assert f"worker-{rank} was told to leave; its slices go to the others" in done.out
    well, found = read_summary(alone), read_summary(scaled)
    for key in ("weights_sha256", "buffers_sha256", "optimizer_sha256", "steps", "contributions_applied"):
        assert found[key] == well[key], key
    assert found["restarts"] == {}
    assert place.leftovers() == []


@pytest.mark.long
def test_more_and_fewer_servers(place: Place) -> None:
    alone, scaled, hurry = place.work / "alone.json", place.work / "scaled.json", place.work / "hurry"
    environ = {"PARAMSERVER_RUN__SUMMARY": str(alone), "PARAMSERVER_TRAINING__SLICES_PER_STEP": "2"}
    place.python(TRAIN, *EPOCHS, environ=environ).check()
    flags = ("--servers", "2", "--workers", "2", "--slices-per-step", "2", "--summary", scaled)
    running = place.launch("run", TRAIN, *flags, "--", *EPOCHS, "--pace", "0.5", "--hurry", hurry)
    running.wait_for(TRAINS, count=2)
    assert place.paramserver("scale", "servers=4").check().out.startswith("4 servers now. Workers waited for ")
    assert place.paramserver("scale", "servers=1").check().out.startswith("1 servers now. Workers waited for ")
    hurry.touch()
    done = running.wait().check()
    assert "4 servers are wished for, 2 are there" in done.out
    well, found = read_summary(alone), read_summary(scaled)
    for key in ("weights_sha256", "buffers_sha256", "optimizer_sha256", "steps", "contributions_applied"):
        assert found[key] == well[key], key
    assert (found["restarts"], found["servers"], found["rollbacks"]) == ({}, 1, 0)
    assert place.leftovers() == []
