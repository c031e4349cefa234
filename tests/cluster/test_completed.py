"""A checkpoint that is complete stays as it is: a coordinator that takes the job over does not have it saved again."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramserver.checkpoint import catalog
from paramserver.checkpoint.place import Place
from paramserver.coordinator.leadership import takeover as taking
from tests.support.cluster.small_job import SLICES, program
from tests.support.cluster.taps import Trap
from tests.support.failover.moments import LAST
from tests.support.failover.rollback import Rig, Strike, same, twin

NAME = f"step-{LAST + 1:08d}-t0"
FILES = {f"{kind}-{number:05d}-of-00002.safetensors" for kind in ("model", "optimizer") for number in (1, 2)}
RELEASE = f"call Shard.Release {LAST + 1}"


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever died with the leader is given up soon."""
    monkeypatch.setattr(taking, "_FIND_S", 1.0)


def stays(rig: Rig) -> None:
    """The checkpoint of the last version is that of the first coordinator, and there are no other files of it."""
    summary = rig.finish()
    assert [term for term, _ in rig.reigns] == [1, 2]
    assert summary["broken_promises"] == []
    assert summary["checkpoint"] == NAME
    manifest = catalog.load_manifest(Place(str(rig.checkpoints)), NAME)
    assert manifest.term == 1, "another coordinator has completed it once more"
    assert {info.name for info in manifest.files} == FILES
    found = {path.name for path in (rig.checkpoints / NAME).iterdir()}
    assert found == {*FILES, "MANIFEST.json", "model.safetensors.index.json"}
    same(summary, twin("faults", program(), slices_per_step=SLICES))


def test_the_leader_dies_before_it_writes_that_down(tmp_path: Path) -> None:
    with Rig(tmp_path, LAST + 1, [Strike("ckpt.pointer", "leader", LAST + 1)]) as rig:
        rig.begin(program())
        stays(rig)


@pytest.mark.parametrize("when", ["between", "after"])
def test_the_leader_dies_when_servers_have_let_go_of_their_copies(when: str, tmp_path: Path) -> None:
    """One server, or both: a server that was asked for a copy of that version would write other files."""
    trap = Trap(RELEASE, 1 if when == "after" else 0, when)
    with Rig(tmp_path, LAST + 1, places=("leader", "standby"), trap=trap) as rig:
        rig.begin(program())
        stays(rig)
        assert trap.fired.is_set(), trap.seen
