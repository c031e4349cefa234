"""A ledger on which each slice counts in its own cells, and how a job with takeovers must have counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paramserver import errors
from paramserver.v1 import coordinator_pb2, types_pb2
from tests.support.cluster.harness import Applied
from tests.support.cluster.small_job import EPOCHS, SAMPLES, twin
from tests.support.failover.takeover import Fleet

# The ledger: slices of 2 samples, 24 an epoch.
CELLS, BATCH = 48, 2
PER_EPOCH = CELLS // BATCH


def calm(summary: Mapping[str, Any]) -> None:
    """It came out as if nothing had happened."""
    found = summary["weights_sha256"], summary["optimizer_sha256"], summary["buffers_sha256"]
    assert found == twin()
    assert summary["contributions_applied"] == 14 * EPOCHS
    assert summary["samples"] == SAMPLES * EPOCHS


def counted_once(log: list[Applied], epochs: int, slices_per_step: int = 1) -> None:
    """Both shards have applied the same names, none twice, and all slices of all epochs."""
    for shard in {applied.shard for applied in log}:
        names = [applied.contribution.name for applied in log if applied.shard == shard]
        assert len(names) == len(set(names)), "a name was applied twice"
        assert sum(name.slices for name in names) == PER_EPOCH * epochs
        samples = sum(applied.contribution.samples for applied in log if applied.shard == shard)
        assert samples == CELLS * epochs


def change_once(fleet: Fleet, mode: str) -> str:
    """Ask the first leader to change the mode; how that ended."""
    request = coordinator_pb2.ChangeConsistencyRequest(mode=mode_number(mode), wait_s=20.0)
    if mode == "async":
        request.staleness = 2
    try:
        fleet.ask("Coordinator.SetConsistency", request, "leader")
    except errors.UnavailableError as error:
        return str(error)
    return ""


def mode_number(mode: str) -> Any:
    return types_pb2.MODE_ASYNC if mode == "async" else types_pb2.MODE_SYNC
