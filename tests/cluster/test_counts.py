"""What a step takes, counted: calls, operations on the store, encoded versions, copies. Any increase is a failure."""

from __future__ import annotations

import pytest

from benchmarks.counting import Counts, count
from paramserver.core.work.speed import Speed


@pytest.fixture(autouse=True)
def _equally_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a worker may wait so long for another one that it offers its help, which are calls, too."""
    monkeypatch.setattr(Speed, "patience_s", lambda _: 30.0)
    monkeypatch.setattr(Speed, "asks", lambda *_, **__: False)


def check(counts: Counts) -> None:
    assert {method: counts.per_worker_step(method) for method in counts.calls} == {"Shard.Push": 1, "Shard.Pull": 1}
    assert counts.of_the_coordinator() == 0
    assert counts.store_operations == 0


def test_a_step_is_one_push_and_one_pull_of_each_worker_on_each_server() -> None:
    """The coordinator and the store have no part in it."""
    check(count(workers=2, servers=2))


def test_a_version_is_encoded_once_for_any_number_of_workers() -> None:
    frames = {}
    for workers in (1, 3):
        counts = count(workers, servers=1)
        check(counts)
        frames[workers] = counts.encoded_per_version
    assert frames == {1: 1, 3: 1}


def test_weights_are_copied_once_and_gradients_not_on_their_own() -> None:
    """By torch out of the answer to a pull; gradients are multiplied into the contribution. Frames are a copy more.

    Of each version 256 KiB are kept aside, to notice what scripts write to weights; torch counts a clone as two copies.
    """
    counts = count(workers=1, servers=1)
    assert 1.0 <= counts.pushed_per_byte < 1.01
    aside = 2 * (256 << 10) / counts.model_bytes
    assert 1.0 <= counts.copied_per_byte < 1.01 + aside
