"""Synchronous training gives the same bytes on any number of workers and servers, alone, and every time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster.harness import Cluster, alone, train
from tests.support.cluster.programs import Optimizer, Program, Schedule, adamw, cosine, dataset, network, sgd

SHAPES = [(1, 1), (2, 1), (2, 2), (3, 2), (4, 3), (6, 2)]
SLICES = 4
KEYS = ("weights_sha256", "optimizer_sha256", "buffers_sha256")

OPTIMIZERS: list[tuple[Optimizer, Schedule | None]] = [(sgd, None), (adamw, cosine)]


# 203 samples in batches of 8 are 26 slices, the last one of 3 samples, and 7 steps, the last one of 2 slices.
def program(
    optimizer: Optimizer, schedule: Schedule | None, samples: int = 203, epochs: int = 2, norm: bool = True
) -> Program:
    return Program(dataset(samples), 8, epochs, lambda: network(norm), optimizer, schedule)


@pytest.mark.parametrize(("optimizer", "schedule"), OPTIMIZERS, ids=["sgd", "adamw-cosine"])
def test_the_bytes_do_not_depend_on_the_shape_of_the_cluster(
    optimizer: Optimizer, schedule: Schedule | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = program(optimizer, schedule)
    twin = alone(script, tmp_path, monkeypatch, training__slices_per_step=SLICES)
    expected = tuple(twin[key] for key in KEYS)
    assert twin["steps"] == 14
    assert len(set(expected)) == 3
    for workers, servers in [*SHAPES, SHAPES[-1]]:
        outcome = train(script, workers, servers, slices_per_step=SLICES)
        assert outcome.digests == expected, f"{workers} workers, {servers} servers"
        assert outcome.summary["steps"] == 14
        assert outcome.summary["contributions_applied"] == 52
        assert outcome.summary["samples"] >= 406


@pytest.mark.parametrize("samples", [1, 7, 8, 9, 31, 33, 65])
def test_data_sets_that_do_not_divide(samples: int) -> None:
    script = program(adamw, cosine, samples, epochs=3, norm=False)  # BatchNorm takes no single sample
    digests = {train(script, workers, servers, slices_per_step=SLICES).digests for workers, servers in SHAPES[::2]}
    assert len(digests) == 1


def test_small_chunks_on_many_servers_change_no_bit() -> None:
    """Tensors are cut across servers; some servers have nothing at all."""
    script = program(sgd, None)
    whole = train(script, slices_per_step=SLICES)
    for chunk_bytes, servers in ((64, 3), (256, 2), (0, 9)):
        settings = {"training__chunk_bytes": chunk_bytes}
        cut = train(script, 2, servers, settings=settings, slices_per_step=SLICES)
        assert cut.digests == whole.digests, f"chunks of {chunk_bytes} bytes on {servers} servers"


def test_servers_beside_workers_change_no_bit() -> None:
    """One server of its own with more chunks than each of the three beside workers."""
    script = program(adamw, cosine)
    whole = train(script, slices_per_step=SLICES)
    settings = {"training__chunk_bytes": 64}
    with Cluster(3, 4, slices_per_step=SLICES, placement="split", beside_workers=3) as cluster:
        outcome = cluster.train(script, settings)
        loads = [shard.shard_bytes for shard in cluster.stats()]
    assert outcome.digests == whole.digests
    assert loads[0] > max(loads[1:]) > 0


def test_other_seeds_and_other_slices_give_other_bytes() -> None:
    """The digests would be equal for no good reason if they did not depend on what matters."""
    script = program(sgd, None)
    digests = {
        train(script, slices_per_step=SLICES).digests,
        train(script, slices_per_step=SLICES, seed=1).digests,
        train(script, slices_per_step=2).digests,
        train(program(sgd, None, epochs=1), slices_per_step=SLICES).digests,
        train(program(adamw, None), slices_per_step=SLICES).digests,
    }
    assert len(digests) == 5


def test_the_default_number_of_slices_is_that_of_the_workers() -> None:
    script = program(sgd, None)
    assert train(script, workers=3).digests == train(script, workers=2, slices_per_step=3).digests
