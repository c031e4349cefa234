"""Directories of checkpoints under `paramserver run`: a used one, one that is in use, and a disk that is full."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.integration.harness import ROOT, SCRIPTS, Place, complaint, place_fixture, read_summary

SCRIPT = SCRIPTS / "tiny.py"
SMALL = ("--servers", "1", "--workers", "1", "--store", "memory")


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


def test_a_used_directory_is_refused_or_set_aside(place: Place) -> None:
    tokens = ("run", SCRIPT, *SMALL, "--checkpoint-dir", "ckpt", "--summary", "summary.json")
    place.paramserver(*tokens).check()
    ckpt = place.work / "ckpt"
    before = sorted(path.name for path in ckpt.iterdir())
    said = complaint(place.paramserver(*tokens), 2)
    assert "holds checkpoints of job tiny-" in said
    for choice in ("--resume", "--fresh", "--checkpoint-dir"):
        assert choice in said
    place.paramserver(*tokens, "--fresh").check()
    assert sorted(path.name for path in (place.work / "ckpt.old-1").iterdir()) == before
    assert (ckpt / read_summary(place.work / "summary.json")["checkpoint"] / "MANIFEST.json").is_file()


def test_a_full_disk_ends_the_job_before_its_first_step(place: Place) -> None:
    """The disk is real: 16 kB in a mount namespace of the command's own."""
    disk = place.work / "disk"
    disk.mkdir()
    run = [sys.executable, "-m", "paramserver", "run", SCRIPT, *SMALL, "--checkpoint-dir", disk / "ckpt"]
    line = (
        f"mount -t tmpfs -o size=16k none {disk} && mkdir {disk}/ckpt || exit 99; "
        f"{' '.join(str(word) for word in run)}; code=$?; echo used $(stat -f -c '%b of %f' {disk}); "
        f"find {disk} -type d; exit $code"
    )
    done = place.start("unshare", "--map-root-user", "--mount", "sh", "-c", line).wait().check(1)
    assert "the first checkpoint could not be written" in done.said, done.text
    assert "No space left on device" in done.said
    assert re.search(r"^used 4 of", done.out, re.MULTILINE), "the disk has four pages"
    assert [Path(found).name for found in re.findall(rf"^{disk}.*$", done.out, re.MULTILINE)] == ["disk", "ckpt"]


@pytest.mark.long
def test_the_script_of_the_tutorial_goes_on_when_all_is_done(place: Place) -> None:
    """No worker has a slice then, and the last epoch comes once more."""
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/tutorial.md").read_text(), re.DOTALL)
    script, ckpt = place.work / "train.py", place.work / "ckpt"
    script.write_text(text)
    first = place.paramserver("run", script, "--workers", "2", "--checkpoint-dir", ckpt).check()
    again = place.paramserver("run", "--resume", ckpt).check()
    (digest,) = re.findall("weights sha256 .*", first.out)
    assert digest in again.out
