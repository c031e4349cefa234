"""Another number of servers while a job trains: the same bits, every slice once, done or undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.programs import LedgerProgram, Program, adamw, dataset, network
from tests.support.cluster.small_job import SLICES, program
from tests.support.failover.held import Held
from tests.support.failover.kills import exact
from tests.support.failover.ledger import BATCH, CELLS
from tests.support.failover.resizing import resize
from tests.support.failover.rollback import Rig, same, twin

SMALL = {"training__chunk_bytes": 256}


@pytest.mark.parametrize("transport", ["grpc", "shm"])
@pytest.mark.parametrize(
    ("first", "then", "replicas"), [(2, (4,), 0), (4, (2,), 0), (2, (3, 2), 1), (1, (3,), 0)], ids=str
)
def test_the_same_bits(first: int, then: tuple[int, ...], replicas: int, transport: str, tmp_path: Path) -> None:
    wanted = twin("resized", program(), 256, slices_per_step=SLICES)
    held = Held()
    options: dict[str, Any] = {"cluster__replicas": replicas, "cluster__transport": transport, **SMALL}
    with Rig(tmp_path, 0, servers=first, **options) as rig:
        rig.begin(program(held))
        resize(rig, held, then)
        summary = rig.finish()
        assert rig.rollbacks == 0
    same(summary, wanted)
