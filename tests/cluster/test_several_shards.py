"""A server may be the primary of several shards: same bits, same counts, whatever dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramserver.coordinator.job import Job
from paramserver.core.job.holders import Holders
from tests.support.cluster.harness import Cluster, recorded, train, wait
from tests.support.cluster.programs import LedgerProgram, Program, adamw, dataset, network
from tests.support.cluster.small_job import SLICES, program
from tests.support.cluster.small_job import twin as calm_twin
from tests.support.failover.held import Held
from tests.support.failover.ledger import BATCH, CELLS, PER_EPOCH, calm, counted_once
from tests.support.failover.moments import EVERY, MOMENTS, fresh
from tests.support.failover.rollback import Rig, same, twin
from tests.support.failover.takeover import Fleet

# By shard, the server that is its primary; two servers.
PLACES = [(0, 1, 0), *(pytest.param(more, marks=pytest.mark.long) for more in ((1, 0), (1, 0, 0, 1, 1)))]
SMALL = {"training__chunk_bytes": 256}


def placed(monkeypatch: pytest.MonkeyPatch, *primaries: int) -> None:
    """All jobs place their shards like this from now on."""
    monkeypatch.setattr(Job, "holders", property(lambda job: Holders(primaries)))


@pytest.mark.parametrize("primaries", PLACES, ids=str)
@pytest.mark.parametrize("transport", ["grpc", "shm"])
def test_the_same_bits(primaries: tuple[int, ...], transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(program(), settings=SMALL, slices_per_step=SLICES).digests
    placed(monkeypatch, *primaries)
    with Cluster(3, 2, slices_per_step=SLICES, transport=transport) as cluster:
        outcome = cluster.train(program(), SMALL)
        held = [sorted(server.service.shards) for server in cluster.job.servers]
        status = cluster.status()
    assert outcome.digests == expected
    assert held == [[shard for shard, server in enumerate(primaries) if server == index] for index in (0, 1)]
    assert status.shards == len(primaries)


def test_a_norm_over_shards_of_one_server_and_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Program(dataset(107), 8, 2, lambda: network(norm=True), adamw, each=lambda ctx, _: ctx.clip_grad_norm(0.3))
    expected = train(script, settings=SMALL, slices_per_step=SLICES).digests
    placed(monkeypatch, 0, 1, 0)
    assert train(script, 2, 2, settings=SMALL, slices_per_step=SLICES).digests == expected


def test_asynchronous_slices_count_once_in_each_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    placed(monkeypatch, 0, 1, 0)
    epochs = 2
    with recorded() as log:
        outcome = train(LedgerProgram(CELLS, BATCH, epochs), 3, 2, {"training__chunk_bytes": 64}, mode="async")
    counted_once(log, epochs)
    assert len({applied.shard for applied in log}) == 3
    assert outcome.summary["contributions_applied"] == PER_EPOCH * epochs


def test_another_coordinator_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    calm_twin()  # made before shards are placed differently
    placed(monkeypatch, 0, 1, 0)
    held = Held()
    with Fleet() as fleet:
        leader = fleet.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        fleet.kill(leader)
        fleet.took_over()
        held.released.set()
        summary = fleet.finish()
    assert [term for term, _ in fleet.reigns] == [1, 2]
    calm(summary)


@pytest.mark.parametrize(
    "when",
    [
        "half applied (C05)",
        *(pytest.param(more, marks=pytest.mark.long) for more in ("both at once (C03)", "a checkpoint is written")),
    ],
)
def test_a_server_with_several_shards_dies(when: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All shards go back to the checkpoint, which has one part for each."""
    expected = twin("faults", program(), slices_per_step=SLICES)
    placed(monkeypatch, 1, 0, 1)
    with Rig(tmp_path, EVERY, fresh(MOMENTS[when])) as rig:
        rig.begin(program())
        summary = rig.finish()
        assert rig.rollbacks >= 1
        parts = {file.name for file in rig.checkpoints.rglob("model-*-of-00003.safetensors")}
    same(summary, expected)
    assert len(parts) == 3
