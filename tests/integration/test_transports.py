"""One model over every transport: the same bits, also when a worker and a server are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.integration.harness import Place, place_fixture, read_summary, status_of, until
from tests.support.integration.roles import TRAIN, reference, same_result

SIZES = ("--servers", "2", "--workers", "2", "--slices-per-step", "4", "--replicas", "1")
SCRIPT = ("--wide", "--epochs", "3", "--optimizer", "adamw")


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    yield from place_fixture()


@pytest.fixture(scope="module")
def wanted(place: Place) -> dict[str, Any]:
    """The result of the script alone."""
    return reference(place, *SCRIPT)


@pytest.mark.parametrize(
    "transport",
    [pytest.param("shm", marks=pytest.mark.long), "bulk", pytest.param("grpc", marks=pytest.mark.long)],
)
def test_a_worker_and_a_server_are_killed(place: Place, wanted: dict[str, Any], transport: str) -> None:
    path = place.work / f"{transport}.json"
    flags = (*SIZES, "--set", f"cluster.transport={transport}", "--summary", path)
    job = place.launch("run", TRAIN, *flags, "--", *SCRIPT, "--pace", "0.05")
    job.wait_for(r"rank \d of 2 trains", count=2)
    until("the third step is done", lambda: status_of(job)["version"] >= 3, 20.0)
    processes = {p["name"]: p for p in status_of(job)["processes"]}
    assert processes["worker-0"]["transport"] == transport
    os.kill(processes["worker-1"]["pid"], signal.SIGKILL)
    os.kill(processes["server-1"]["pid"], signal.SIGKILL)
    done = job.wait().check()
    assert "worker-1 was killed by signal 9" in done.out
    assert "backups took over from a lost server once" in done.out
    same_result(read_summary(path), wanted)


def test_a_run_with_certificates(place: Place, wanted: dict[str, Any]) -> None:
    """The launcher shows a certificate, too, and so does a command that asks for the status."""
    path, certs = place.work / "tls.json", place.work / "certs"
    place.paramserver("certs", "init", certs).check()
    flags = (*SIZES, "--set", f"security.certs={certs}", "--set", "cluster.transport=bulk", "--summary", path)
    job = place.launch("run", TRAIN, *flags, "--", *SCRIPT, "--pace", "0.05")
    job.wait_for(r"rank \d of 2 trains", count=2)
    assert place.status()["security"] == "tls"
    done = job.wait().check()
    assert "everything promised is there" in done.out
    same_result(read_summary(path), wanted)
