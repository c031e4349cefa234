"""Jobs on Ray, as far as they need no Ray: what is decided, and what an actor does with its process."""

from __future__ import annotations

import sys

import pytest

import paramserver.ray as psr
from paramserver import errors
from paramserver.processes.environment import JOB_FAILED_CODE
from paramserver.ray.actor import actor_options, to_restart
from paramserver.ray.job import no_room


@pytest.mark.parametrize(
    ("role", "code", "again"),
    [
        ("worker", -9, True),
        ("worker", 1, False),
        ("worker", 0, False),
        ("server", -9, True),
        ("server", 1, True),
        ("server", 75, True),
        ("server", 0, False),
        ("server", 2, False),
        ("server", 4, False),
        ("server", JOB_FAILED_CODE, False),
        ("coordinator", -9, True),
        ("coordinator", 1, False),
    ],
)
def test_ray_starts_again_what_has_crashed(role: str, code: int, again: bool) -> None:
    """A script that fails, a refused configuration and a job that has failed would fail again."""
    assert to_restart(role, code) is again


def test_resources_have_the_names_of_ray() -> None:
    assert actor_options({"CPU": 2, "GPU": 0.5, "memory": 1e9, "big": 1}) == {
        "num_cpus": 2,
        "num_gpus": 0.5,
        "memory": 1e9,
        "resources": {"big": 1},
    }
    assert actor_options({}) == {"num_cpus": 0, "resources": {}}


def test_the_sentence_about_room_names_the_processes_and_the_resources() -> None:
    total, free = {"CPU": 4.0, "GPU": 1.0, "node:a": 1.0}, {"CPU": 0.5}
    assert no_room(["server-1", "worker-3"], 180.0, total, free) == (
        "Ray has found no place for server-1, worker-3 within 180 s: the cluster has 4 CPU (0.5 free), 1 GPU (0 free); "
        "add nodes, ask for fewer or smaller processes (servers, workers, resources_per_worker), or wait longer "
        "(timeout_s)"
    )


def test_without_ray_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(errors.ConfigError, match=r"Ray is not installed: pip install 'paramserver\[ray\]'"):
        psr.run("train.py")


def test_the_digest_is_that_of_the_weights() -> None:
    assert psr.Result({"weights_sha256": "5eed"}).digest == "5eed"
