"""Whatever place a crash strikes at, a whole checkpoint is there, and nothing of the attempt stays for good."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramserver.checkpoint.catalog import newest, prune
from paramserver.checkpoint.place import Place
from paramserver.checkpoint.storage.disk import DiskWriter
from paramserver.errors import CheckpointError
from paramserver.failpoints import arm
from tests.support.unit.checkpoints import PLACES, WRITING, Crash, CrashAt, Watch, content, save, temporary_files

FILES = 4
# Where, and at which file.
CRASHES = [*((name, nth) for name in WRITING for nth in range(1, FILES + 1)), *((name, 1) for name in PLACES[6:])]


@pytest.fixture(autouse=True)
def _quick_and_disarmed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """These crashes leave the machine alone, so nothing has to reach its medium."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    yield
    arm(None)


def save_and_prune(place: Place, version: int) -> None:
    save(place, version, fill=2.0)
    prune(place, 1)


def loadable(place: Place) -> float:
    """The number that the newest checkpoint is made of; the test fails if there is none, or if it is mixed."""
    found = newest(place)
    assert found is not None
    (value,) = content(place, found)
    return value


def assert_clean(directory: Path) -> None:
    """Nothing but whole checkpoints, whose index names files that are there."""
    assert temporary_files(directory) == []
    for checkpoint in directory.iterdir():
        manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
        index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
        files = {info["name"] for info in [*manifest["weights"], *manifest["state"]]}
        assert set(index["weight_map"].values()) == {info["name"] for info in manifest["weights"]}
        assert {path.name for path in checkpoint.iterdir()} == {
            *files,
            "MANIFEST.json",
            "model.safetensors.index.json",
        }


@pytest.mark.parametrize("killed", [False, True], ids=["raised", "killed"])
@pytest.mark.parametrize("version", [50, 60], ids=["same", "next"])
@pytest.mark.parametrize(("name", "nth"), CRASHES)
def test_a_crash_anywhere_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, nth: int, version: int, killed: bool
) -> None:
    """E13. 1. Steps 40 and 50 are saved; 2. the crash strikes while 50 or 60 is saved; 3. the old or the new one can
    be loaded, before and after a clean-up; 4. once another step is saved, nothing else is left."""
    place = Place(str(tmp_path))
    save(place, 40, fill=0.0)
    save(place, 50, fill=1.0)
    plan = CrashAt(name, nth)
    arm(plan)
    with monkeypatch.context() as patched:
        if killed:  # nothing runs after the crash
            patched.setattr(DiskWriter, "discard", lambda self: None)
        with pytest.raises(Crash):
            save_and_prune(place, version)
    assert plan.fired
    arm(None)
    completed = name == "ckpt.gc"
    assert loadable(place) == (2.0 if completed else 1.0)
    prune(place, 1)
    assert loadable(place) == (2.0 if completed else 1.0)
    if version == 50 or completed:
        assert_clean(tmp_path)
    save(place, version, fill=3.0)
    prune(place, 1)
    assert loadable(place) == 3.0
    assert place.names() == [f"step-{version:08d}-t1"]
    assert_clean(tmp_path)


def test_at_every_instant_the_old_or_the_new_can_be_loaded(tmp_path: Path) -> None:
    """A reader comes at each of the places, while the same step is saved again."""
    place = Place(str(tmp_path))
    save(place, 50, fill=1.0)

    class Read(Watch):
        values: list[float]

        def reached(self, name: str, step: int) -> None:
            super().reached(name, step)
            self.values.append(loadable(place))

    plan = Read()
    plan.values = []
    arm(plan)
    save(place, 50, fill=2.0)
    assert plan.seen == [*WRITING * FILES, "ckpt.manifest"]
    assert plan.values == [1.0] * (len(WRITING) * FILES + 1)
    assert loadable(place) == 2.0


@pytest.mark.parametrize(("name", "nth"), CRASHES)
def test_a_failing_disk_is_a_checkpoint_error_that_leaves_the_old_or_the_new(
    tmp_path: Path, name: str, nth: int
) -> None:
    """E10 and E11 at every place of a save, as a planned fault raises them."""
    place = Place(str(tmp_path))
    save(place, 40, fill=0.0)
    save(place, 50, fill=1.0)
    plan = CrashAt(name, nth, OSError(errno.ENOSPC, "No space left on device"))
    arm(plan)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_and_prune(place, 60)
    assert plan.fired
    arm(None)
    assert temporary_files(tmp_path) == []
    assert loadable(place) == (2.0 if name == "ckpt.gc" else 1.0)


def test_a_clean_up_that_breaks_off_goes_on_the_next_time(tmp_path: Path) -> None:
    place = Place(str(tmp_path))
    for version in (10, 20, 30):
        save(place, version)
    plan = CrashAt("ckpt.gc", 2)
    arm(plan)
    with pytest.raises(Crash):
        prune(place, 1)
    assert plan.fired
    assert place.names() == ["step-00000020-t1", "step-00000030-t1"]
    assert loadable(place) == 30.0
    arm(None)
    assert prune(place, 1) == ["step-00000020-t1"]
    assert_clean(tmp_path)
