"""A model on an imagined device: its copies go on beside everything else, and nobody is too early."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cluster.harness import Cluster, train
from tests.support.cluster.programs import Program, adamw, dataset, network
from tests.support.contract.movers import LateMover

DATA = dataset(48)
CASES: dict[str, dict[str, Any]] = {
    "sync": {"workers": 2},
    "several slices": {"workers": 2, "servers": 2, "slices_per_step": 4},
}


@pytest.mark.parametrize("transport", ["grpc", "shm"])
@pytest.mark.parametrize("case", CASES)
def test_same_bits(case: str, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Program(DATA, 4, model=network, optimizer=adamw)
    settings = {"training.chunk_bytes": 832}
    wanted = train(script, settings=settings, **CASES[case]).digests
    movers: list[LateMover] = []

    def imagined(_: object) -> LateMover:
        movers.append(LateMover())
        return movers[-1]

    monkeypatch.setattr("paramserver.worker.memory.places.mover_for", imagined)
    with Cluster(transport=transport, **CASES[case]) as cluster:
        assert cluster.train(script, settings).digests == wanted
    assert len(movers) == 2
    for mover in movers:
        assert mover.mistakes == []
        assert mover.fetched > 0
        assert mover.brought > 1
        # Nobody asks for another version after the last one.
        assert mover.waited >= mover.fetched + mover.brought - 1
