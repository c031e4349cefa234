from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.compose.harness import BUILD_S, IMAGE, Cluster, compose_command, run, run_here


@pytest.fixture(scope="session")
def image() -> str:
    """The image, built as `docker-compose build` does it."""
    print(f"\n{run(*compose_command(), 'version').out.splitlines()[0]}, Python {platform.python_version()} here")
    print(Cluster().compose("build", deadline_s=BUILD_S).out.splitlines()[-1])
    return IMAGE


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """The summary of a script's local run in synchronous mode; each script runs once."""
    known: dict[str, dict[str, Any]] = {}

    def summary(script: str) -> dict[str, Any]:
        if script not in known:
            known[script] = run_here(script, tmp_path_factory.mktemp("local"))
        return known[script]

    return summary
