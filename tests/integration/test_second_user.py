"""A job without certificates on the loopback interface belongs to the user who started it, and to nobody else."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.integration.harness import ROOT, Place, place_fixture, read_summary, until
from tests.support.integration.paced import TRAIN, counts

STRANGER = ROOT / "tests/support/integration/stranger.py"


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


def not_refused(place: Place) -> list[str]:
    """What another user of this machine may do with the only job of this place, and its own commands without a word."""
    status = place.status()
    for folder in (place.root, place.temporary, place.work):  # like /tmp and a home that anybody may enter
        folder.chmod(0o755)
    found = [path for folder in (place.temporary, place.runtime) for path in folder.rglob("*")]
    kinds = {path: path.stat(follow_symlinks=False).st_mode for path in found}
    wishes = {
        "coordinators": [one["address"] for one in status["processes"] if one["role"] == "coordinator"],
        "servers": [one["address"] for one in status["processes"] if one["role"] == "server"],
        "pages": [status["dashboard"]],
        "files": [str(path) for path, mode in kinds.items() if stat.S_ISREG(mode)],
        "sockets": [str(path) for path, mode in kinds.items() if stat.S_ISSOCK(mode)],
        "pids": [str(one["pid"]) for one in status["processes"]],
    }
    assert all(wishes.values()), wishes
    tried = subprocess.run(
        [sys.executable, STRANGER],
        input=json.dumps(wishes),
        env={**place.environ(), "XDG_RUNTIME_DIR": str(place.work / "elsewhere")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=90.0,
    )
    allowed: list[str] = json.loads(tried.stdout)
    return allowed


def test_another_user_can_read_and_do_nothing(place: Place) -> None:
    """One `Shard.Release` of anybody who could connect ended the job, and everybody could read weights and settings."""
    hurry, path = place.work / "hurry", place.work / "summary.json"
    script = ("--pace", "0.5", "--epochs", "20", "--hurry", hurry)
    run = place.launch("run", TRAIN, *counts(2, 1), "--summary", path, "--", *script)
    run.wait_for(r"rank \d of 1 trains")
    assert not_refused(place) == []
    until("it trains", lambda: place.status()["state"] == "training", 30.0)
    hurry.touch()
    run.wait().check()
    assert read_summary(path)["steps"] > 0
    assert place.leftovers() == []
