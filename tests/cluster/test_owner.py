"""A directory of checkpoints is one job's and one history's: nothing else is read, deleted, or gone back to."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from paramserver import errors
from paramserver.checkpoint import catalog, owner
from paramserver.checkpoint.owner import Wish
from paramserver.checkpoint.place import Place
from paramserver.resume import claiming
from paramserver.resume.claiming import Claim
from paramserver.worker.context import Context
from tests.support.cluster.harness import until, wait
from tests.support.cluster.programs import Program, cosine, dataset, sgd
from tests.support.failover.rollback import Rig, Stop, Strike, same, twin

SLICES = 4
# Steps of the program.
LAST = 8


def program(each: Callable[[Context, int], None] | None = None) -> Program:
    return Program(dataset(120), 8, 2, optimizer=sgd, schedule=cosine, each=each)


def wanted() -> Mapping[str, Any]:
    """What comes of it undisturbed."""
    return twin("owner", program(), slices_per_step=SLICES)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody here is just about to end."""
    monkeypatch.setattr(claiming, "ENDING_S", 0.05)


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def versions(rig: Rig) -> list[int]:
    return [manifest.version for manifest in catalog.complete(Place(str(rig.checkpoints)))]


def trained(place: Path) -> Rig:
    with Rig(place, 3) as rig:
        rig.begin(program())
        rig.finish()
    return rig


def test_a_second_run_is_refused_or_sets_the_first_ones_checkpoints_aside(tmp_path: Path) -> None:
    trained(tmp_path)
    before = names(tmp_path / "ckpt")
    with Rig(tmp_path, 3) as rig:
        leader = rig.coordinate("leader")
        until("it is refused", leader.task.done)
        with pytest.raises(errors.ConfigError, match=r"holds checkpoints of job test .*--from-checkpoint .*--fresh"):
            leader.task.result()
    assert names(tmp_path / "ckpt") == before
    with Rig(tmp_path, 3) as rig:
        rig.begin(program(), fresh=True)
        summary = rig.finish()
        assert (rig.checkpoints / summary["checkpoint"]).is_dir()
        assert {m.timeline for m in catalog.complete(Place(str(rig.checkpoints)))} == {0}
    assert names(tmp_path / "ckpt.old-1") == before
    same(summary, wanted())


def test_a_second_job_is_refused_while_the_first_one_trains(tmp_path: Path) -> None:
    stop = Stop(2)
    with Rig(tmp_path, 3) as rig:
        rig.begin(program(stop))
        wait(stop.reached, "version 2")
        for wish in (Wish.BEGIN, Wish.FRESH, Wish.RESUME):
            with pytest.raises(errors.ConfigError, match=r"in use: job test \(coordinator at leader, .* since 20"):
                asyncio.run(claiming.claim(Place(str(rig.checkpoints)), Claim("other", wish)))
        stop.released.set()
        rig.finish()


def test_a_dead_server_does_not_make_the_job_another_one(tmp_path: Path) -> None:
    """Somebody has put the checkpoints of another run, which look newer, into the directory."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    trained(old)
    with Rig(old, 3, checkpoint__resume=str(old / "ckpt")) as rig:
        rig.begin(program())
        rig.finish()
    (foreign,) = (old / "ckpt").glob("step-*8-t1")
    stop = Stop(4)
    with Rig(new, 3, [Strike("commit.before_log", "server-1", 6)], checkpoint__keep=1) as rig:
        rig.begin(program(stop))
        wait(stop.reached, "version 4")
        shutil.copytree(foreign, rig.checkpoints / foreign.name)
        stop.released.set()
        summary = rig.finish()
        assert {version for _, _, _, version in rig.orders.timelines} <= {0, 3, 6}
        assert (rig.checkpoints / summary["checkpoint"]).is_dir()
        assert summary["checkpoint"] == f"step-{LAST:08d}-t1"
    same(summary, wanted())


def test_going_on_in_another_directory_leaves_the_first_one_as_it_is(tmp_path: Path) -> None:
    """The first checkpoint there is made before anybody computes: a server that dies then finds it."""
    trained(tmp_path)
    before = names(tmp_path / "ckpt")
    shutil.rmtree(tmp_path / "ckpt" / next(name for name in before if name.startswith("step-00000008")))
    before = names(tmp_path / "ckpt")
    other = tmp_path / "other"
    other.mkdir()
    strikes = [Strike("commit.before_log", "server-1", 7)]
    with Rig(other, 0, strikes, checkpoint__resume=str(tmp_path / "ckpt")) as rig:
        rig.begin(program())
        summary = rig.finish()
        assert {version for _, _, _, version in rig.orders.timelines} == {6}
        assert summary["rollbacks"] == 1
    assert names(tmp_path / "ckpt") == before
    assert {"step-00000006-t1", "OWNER.json"} <= {*names(other / "ckpt")}
    same(summary, wanted())


def test_a_coordinator_that_takes_over_goes_on_there_without_a_word(tmp_path: Path) -> None:
    with Rig(tmp_path, 3, [Strike("ckpt.pointer", "leader", 3)]) as rig:
        rig.begin(program())
        summary = rig.finish()
        assert len(rig.reigns) == 2
        (histories,) = {tuple(m.position["histories"]) for m in catalog.complete(Place(str(rig.checkpoints)))}
        assert len(histories) == 1
    same(summary, wanted())


def test_a_job_that_the_store_has_forgotten_goes_on_from_its_own_checkpoints(tmp_path: Path) -> None:
    """Everybody has died at once, the store included; the coordinator is started again with --resume."""
    place = Place(str(trained(tmp_path).checkpoints))
    shutil.rmtree(tmp_path / "ckpt" / f"step-{LAST:08d}-t0")
    kept = owner.read(place)
    assert kept is not None
    assert kept.ended
    owner.write(place, dataclasses.replace(kept, live=True, ended=False))
    with Rig(tmp_path, 3, lease_s=1.0) as rig:
        rig.begin(program(), resume=True)
        summary = rig.finish()
        assert rig.orders.begun_with() == 6
        assert {tuple(m.position["histories"]) for m in catalog.complete(place)} == {(kept.history,)}
    same(summary, wanted())


@pytest.mark.long
def test_to_continue_after_the_end_begins_anew_beside_the_old_checkpoints(tmp_path: Path) -> None:
    """`start coordinator --continue`, as rendered files start it, when the job of this name is done."""
    trained(tmp_path)
    before = names(tmp_path / "ckpt")
    with Rig(tmp_path, 3, lease_s=1.0) as rig:
        rig.begin(program(), resume=True)
        summary = rig.finish()
        assert rig.orders.timelines == [], "nothing was gone on from"
    assert names(tmp_path / "ckpt.old-1") == before
    same(summary, wanted())


def test_to_continue_after_a_failure_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    stop = Stop(4)
    with Rig(tmp_path, 3) as rig:
        leader = rig.begin(program(stop))
        wait(stop.reached, "version 4")
        until("version 3 is saved", lambda: 3 in versions(rig))
        service = leader.service
        assert service is not None
        rig.run(service.job.fail("a server did not come back"))
        stop.released.set()
        until("the coordinator ends", leader.task.done)
    with Rig(tmp_path, 3, lease_s=1.0) as rig:
        rig.begin(program(), resume=True)
        summary = rig.finish()
        assert rig.orders.begun_with() == 3
    same(summary, wanted())
