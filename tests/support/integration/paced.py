"""Runs that would go on for hours, until a test ends them."""

from __future__ import annotations

from pathlib import Path

from tests.support.integration.harness import SCRIPTS, Place, Running

TRAIN = SCRIPTS / "train.py"
_PACED = ["--pace", "0.05", "--epochs", "100000"]
_TRAINS = r"worker-\d \| rank \d of \d trains"


def counts(servers: int, workers: int) -> list[str]:
    """Flags for so many servers and workers."""
    return ["--servers", str(servers), "--workers", str(workers)]


def training(place: Place, servers: int, workers: int, *flags: str | Path, script: tuple[str, ...] = ()) -> Running:
    """A run in which every worker has begun to train, and which would go on for hours."""
    running = place.launch("run", TRAIN, *counts(servers, workers), *flags, "--", *_PACED, *script)
    running.wait_for(_TRAINS, count=workers)
    return running
