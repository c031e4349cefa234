"""Some slices are computed by two workers, and what both bring is compared."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from paramserver import errors
from paramserver.config import load_settings
from paramserver.results.verdict import exit_code
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, Died, Outcome, train
from tests.support.cluster.programs import Program, adamw, cosine, dataset, network, plain

SAMPLES, BATCH, SLICES, EPOCHS = 48, 4, 4, 2
STEPS = EPOCHS * SAMPLES // (BATCH * SLICES)
ALL = {"training.audit": 1.0}


def program() -> Program:
    return Program(dataset(SAMPLES), BATCH, EPOCHS, lambda: network(norm=True), adamw, cosine)


@pytest.mark.parametrize("workers", [2, 3])
def test_equal_workers_bring_equal_contributions_and_the_bits_stay(workers: int) -> None:
    outcome = train(program(), workers, 2, ALL, slices_per_step=SLICES)
    assert outcome.digests == train(program(), slices_per_step=SLICES).digests
    audit = outcome.summary["audit"]
    # Whoever is through leaves, so the slices of the last step may lack their second worker.
    assert audit["differ"] == 0
    assert (STEPS - 1) * SLICES // 2 <= audit["compared"] <= STEPS * SLICES
    assert exit_code(outcome.summary) == 0
    assert outcome.summary["contributions_applied"] == STEPS * SLICES


def test_nothing_is_computed_twice_where_there_are_no_audits() -> None:
    with Cluster(2, 1, slices_per_step=SLICES) as cluster:
        outcome = cluster.train(program())
        contexts = [worker.context for worker in cluster.workers]
        assert sum(ctx.engine.progress.slices for ctx in contexts if ctx is not None) <= STEPS * SLICES + STEPS
    assert outcome.summary["audit"] == {"compared": 0, "differ": 0}


class Counts(nn.Module):
    """Its second layer depends on how often this process has called it: a number that does not travel."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.inner(x) * (1 + self.calls / 1000)


def trains(wrong: int | None = None) -> Any:
    """``wrong``: only the worker of this rank counts."""

    def script(ctx: Context) -> None:
        mine: Any = Counts() if wrong in (None, ctx.rank) else nn.Sequential()
        if not isinstance(mine, Counts):
            mine.add_module("inner", network())
        loader: Any = DataLoader(dataset(SAMPLES), batch_size=BATCH)
        mine, optimizer, loader = ctx.prepare(mine, plain(mine.parameters(), 0.1), loader)
        for _ in ctx.epochs(EPOCHS):
            for x, y in loader:
                F.cross_entropy(mine(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()

    return script


def said(outcome: Outcome) -> str:
    assert exit_code(outcome.summary) == 1
    (sentence,) = outcome.summary["broken_promises"]
    return str(sentence)


def test_a_model_that_counts_its_calls_is_found() -> None:
    outcome = train(trains(), 2, 1, ALL, slices_per_step=SLICES)
    assert outcome.summary["audit"]["differ"] > 0
    sentence = said(outcome)
    for part in ("worker-0", "worker-1", "for slice", "'inner."):
        assert part in sentence


def test_the_worker_that_is_not_like_the_others_is_named() -> None:
    outcome = train(trains(wrong=1), 3, 1, ALL, slices_per_step=6)
    assert "worker-1 differs from all workers that it was compared with" in said(outcome)


def test_an_auditor_that_dies_is_not_waited_for() -> None:
    killed = threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if ctx.rank == 1 and slices == 3:  # it has two slices of each step
            killed.set()
            raise Died

    dies = Program(dataset(SAMPLES), BATCH, EPOCHS, lambda: network(norm=True), adamw, cosine, each=each)
    with Cluster(2, 2, slices_per_step=SLICES, lease_s=0.6, grace_s=0.3) as cluster:
        for _ in range(2):
            cluster.start(dies, settings=ALL)
        cluster.join([cluster.workers[0]])
        outcome = cluster.outcome()
    assert killed.is_set()
    assert outcome.digests == train(program(), slices_per_step=SLICES).digests
    assert outcome.summary["audit"]["differ"] == 0


def test_asynchronous_jobs_have_no_audits() -> None:
    with pytest.raises(errors.ConfigError, match=r"training.audit is 0.01 and consistency.mode is async"):
        load_settings(None, {"training.audit": 0.01, "consistency.mode": "async"}, environ={})
