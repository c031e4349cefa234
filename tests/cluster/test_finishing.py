"""The end of a job waits for its last checkpoint, unless that cannot be had; a bad or slow disk stops nobody."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paramserver import errors
from paramserver.checkpoint import catalog
from paramserver.checkpoint.place import Place
from paramserver.results import gather as gathering
from paramserver.roles import coordinating
from tests.support.cluster.harness import until, wait
from tests.support.cluster.small_job import SLICES, program
from tests.support.failover.rollback import Rig, Strike, same, twin

LAST = 8


def versions(rig: Rig) -> list[int]:
    """Complete checkpoints, newest first."""
    return [manifest.version for manifest in catalog.complete(Place(str(rig.checkpoints)))]


def left_over(rig: Rig) -> list[str]:
    """Temporary files."""
    return [path.name for path in rig.checkpoints.rglob("*") if path.is_file() and path.name.startswith(".")]


def test_who_is_through_waits_for_the_last_checkpoint(tmp_path: Path) -> None:
    reached, go = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        go.wait(30.0)

    with Rig(tmp_path, 3, [Strike("ckpt.before_rename", "server-1", LAST, do=hold)]) as rig:
        rig.begin(program())
        wait(reached, "the last checkpoint")
        engines = [hand.context.engine for hand in rig.hands if hand.context is not None]
        until("both wait", lambda: [engine.progress.state for engine in engines] == ["finishing"] * 2)
        assert all(hand.alive for hand in rig.hands)
        until("the one before is complete", lambda: versions(rig)[0] == 6)
        go.set()
        summary = rig.finish()
        assert versions(rig)[0] == LAST
    same(summary, twin("faults", program(), slices_per_step=SLICES))


POINTS = ["ckpt.tmp_open", "ckpt.mid_write", "ckpt.before_fsync", "ckpt.before_rename", "ckpt.before_dirsync"]


@pytest.mark.parametrize("at", POINTS)
def test_e10_one_that_cannot_be_written(at: str, tmp_path: Path) -> None:
    """E11: it counts as failed, is not tried again, and the others are there."""
    failing = Strike(at, "server-1", 3, do="error")
    with Rig(tmp_path, 3, [failing], checkpoint__keep=10) as rig:
        rig.begin(program())
        summary = rig.finish()
        assert failing.fired == 1
        assert versions(rig) == [LAST, 6, 0]
        assert left_over(rig) == []
    same(summary, twin("faults", program(), slices_per_step=SLICES))


def test_one_that_was_given_up_before_the_other_server_had_copied_it(tmp_path: Path) -> None:
    """Server-0 needs a part of server-1's copy, which is gone by then: it does not wait for it."""
    failing = Strike("ckpt.tmp_open", "server-1", 3, do="error")

    def hold() -> None:
        job = rig.leader.service
        assert job is not None
        until("it was given up", lambda: 3 in job.job.checkpoints.given_up())

    with Rig(tmp_path, 3, [failing, Strike("apply.mid", "server-0", 2, do=hold)], checkpoint__keep=10) as rig:
        rig.begin(program())
        began = time.monotonic()
        summary = rig.finish()
        assert time.monotonic() - began < 20.0
        assert failing.fired == 1
        assert versions(rig) == [LAST, 6, 0]
    same(summary, twin("faults", program(), slices_per_step=SLICES))


def test_a_server_dies_and_there_is_none(tmp_path: Path) -> None:
    """Nobody has asked for checkpoints; in the launcher's own place none can be written."""
    strikes = [Strike("ckpt.tmp_open", "server-0", do="error", times=100), Strike("apply.mid", "server-1", 5)]
    with Rig(tmp_path, 3, strikes) as rig:
        rig.begin(program(), histories=("own",), private=True)
        with pytest.raises(errors.JobFailedError, match="there is no complete checkpoint"):
            rig.join()


def test_h10_a_slow_disk(tmp_path: Path) -> None:
    """E15: copies that would be the third are skipped, training goes on, and the last one is made."""
    reached, go = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        go.wait(30.0)

    with Rig(tmp_path, 1, [Strike("ckpt.tmp_open", "server-1", 2, do=hold)], checkpoint__keep=20) as rig:
        rig.begin(program())
        wait(reached, "the disk")
        until("all steps are done", lambda: [stats.version for stats in rig.stats()] == [LAST, LAST])
        go.set()
        summary = rig.finish()
        kept = versions(rig)
        assert kept[0] == LAST
        assert {0, 1, 2} <= set(kept)
        assert len(kept) < LAST, f"none was skipped: {kept}"
    same(summary, twin("faults", program(), slices_per_step=SLICES))


def test_a_server_dies_while_the_result_is_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers have left by then: it comes back with the last checkpoint."""
    killed: list[bool] = []

    async def gather(*args: Any) -> Any:
        if not killed:
            killed.append(True)
            rig.strike("server-1")
            raise errors.UnavailableError("server-1 is dead")
        return await gathering.gather(*args)

    monkeypatch.setattr(coordinating, "gather", gather)
    with Rig(tmp_path, 3, []) as rig:
        rig.begin(program())
        summary = rig.finish()
        assert killed
        assert rig.rollbacks == 1
    same(summary, twin("faults", program(), slices_per_step=SLICES))
