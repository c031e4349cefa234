"""Many more workers than cores: they take turns, and the job finishes."""

from __future__ import annotations

import os

import pytest

from tests.support.integration.harness import SCRIPTS, Place, read_summary

# `make test-scale` has 32; starting them is all that takes long.
WORKERS = int(os.environ.get("MANY_WORKERS", "12"))
SLICES, EPOCHS = 64, 2


@pytest.mark.timeout(300)
@pytest.mark.long
def test_many_workers() -> None:
    with Place() as place:
        path = place.work / "summary.json"
        # All have to be there before the first step.
        flags = ["--workers", str(WORKERS), "--servers", "2", "--set", "cluster.join_timeout_s=280"]
        done = place.launch("run", SCRIPTS / "tiny.py", *flags, "--summary", path).wait(290.0).check()
        summary = read_summary(path)
        print(f"{WORKERS} workers: {done.seconds:.1f} s, {summary['seconds']:.1f} s of them training")
        assert (summary["workers"], summary["servers"], summary["slices_per_step"]) == (WORKERS, 2, WORKERS)
        assert summary["steps"] == EPOCHS * -(-SLICES // WORKERS)
        assert summary["contributions_applied"] == EPOCHS * SLICES
        assert place.processes() == {}
        assert place.leftovers() == []
