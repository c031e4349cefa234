"""One network for all tests here, and one run on the local cluster to compare with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.integration.harness import DIGITS, Place, read_summary
from tests.support.machines.cluster import EPOCHS, MACHINES, SEED, SLICES_PER_STEP, Site
from tests.support.machines.network import Network

# Megabits per second on every cable, for all tests; by default there is no limit.
_ENV_RATE = "MACHINES_MEGABITS"


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    with Network(MACHINES) as network:
        if rate := os.environ.get(_ENV_RATE):
            network.limit(float(rate))
        yield network


@pytest.fixture(scope="session")
def site(network: Network) -> Iterator[Site]:
    with Place() as place:
        yield Site.open(network, place)


@pytest.fixture(scope="session")
def local_run(network: Network) -> dict[str, Any]:
    """The summary of the same job on the local cluster."""
    with Place() as place:
        network.takes_along(place.root)
        path = place.work / "summary.json"
        counts = ["--servers", "2", "--workers", "3", "--slices-per-step", str(SLICES_PER_STEP), "--seed", str(SEED)]
        place.paramserver("run", DIGITS, *counts, "--summary", path, "--", "--epochs", str(EPOCHS)).check()
        return read_summary(path)
