"""Reports that cannot be written, and reports of jobs whose coordinator goes: kept, refused, or another code than 0."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramserver.report.data import Report
from paramserver.report.files import read_files
from tests.support.integration.harness import SCRIPTS, Running, complaint, until
from tests.support.integration.roles import TRAIN, Cluster, cluster_fixture, kill

PACED = ("--epochs", "6", "--pace", "0.1")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    yield from cluster_fixture()


def begun(cluster: Cluster, *flags: str | Path, script: tuple[str, ...] = PACED) -> tuple[Running, Running, Running]:
    """A coordinator, a server and a worker."""
    return cluster.coordinator("--workers", "1", *flags), cluster.server(), cluster.worker(*script)


def steps(cluster: Cluster) -> int:
    return int(cluster.status()["version"])


def the(report: Report, kind: str) -> list[str]:
    return [event.subject for event in report.events if event.kind == kind]


def test_a_full_disk_takes_no_output(cluster: Cluster) -> None:
    done = cluster.place.start("sh", "-c", f"{sys.executable} -m paramserver config show > /dev/full").wait()
    assert complaint(done, 2) == "the output cannot be written: No space left on device"


@pytest.mark.long
def test_a_coordinator_without_room_for_its_report_says_the_digests_and_fails(cluster: Cluster) -> None:
    directory = cluster.place.work / "reports"
    coordinator, server, worker = begun(cluster, "--report", directory / "r.html")
    until("steps", lambda: steps(cluster) > 3, 60.0)
    shutil.rmtree(directory)
    directory.write_text("no directory any more")
    worker.wait().check()
    done = coordinator.wait()
    assert "run.report cannot be written" in complaint(done, 2)
    assert "weights sha256" in done.out
    assert "everything promised" not in done.out
    assert server.wait().code != 0


@pytest.mark.long
def test_reports_of_a_stopped_job(cluster: Cluster) -> None:
    """A job on several machines: while it runs, and when it was stopped."""
    work = cluster.place.work
    everybody = begun(cluster, "--report", work / "end.json", script=("--epochs", "500", "--pace", "0.1"))
    until("steps", lambda: steps(cluster) > 3, 60.0)
    cluster.place.paramserver("report", "--job", cluster.job, "-o", work / "now.json").check()
    now = read_files([work / "now.json"])
    assert (now.outcome.kind, now.job) == ("running", cluster.job)
    assert now.ledger is not None
    cluster.place.paramserver("stop", "--job", cluster.job).check()
    assert f"report {work / 'end.json'}" in everybody[0].wait().check().out
    for one in everybody[1:]:
        one.wait().check()
    end = read_files([work / "end.json"])
    assert (end.outcome.kind, end.outcome.exit_code) == ("stopped", 0)
    assert end.summary["weights_sha256"]
    assert [curve.name for curve in end.curves] == ["loss"]


@pytest.mark.long
def test_a_job_that_is_stopped_before_it_trains_has_a_report_too(cluster: Cluster) -> None:
    path = cluster.place.work / "r.md"
    coordinator, server = cluster.coordinator("--workers", "1", "--report", path), cluster.server()
    cluster.until_status("the server has joined", lambda status: "server-0" in str(status["processes"]))
    waiting = cluster.place.paramserver("report", "--job", cluster.job).check().out
    assert "Ledger: nothing was counted." in waiting
    cluster.place.paramserver("stop", "--job", cluster.job).check()
    done = coordinator.wait().check()
    assert "ended without training" in done.out
    assert "The script ended without training." in path.read_text()
    server.wait()


def test_a_script_without_a_data_set_has_a_report_without_a_ledger(cluster: Cluster) -> None:
    path = cluster.place.work / "r.json"
    environ = {"PARAMSERVER_RUN__REPORT": str(path)}
    cluster.place.python(SCRIPTS / "own_batches.py", "3", environ=environ).check()
    report = read_files([path])
    assert (report.outcome.kind, report.ledger) == ("done", None)
    assert [sentence.split(":")[0] for sentence in report.missing] == ["Ledger"]


@pytest.mark.long
def test_the_next_coordinator_writes_the_report(cluster: Cluster) -> None:
    path = cluster.place.work / "r.json"
    flags = ("--workers", "1", "--report", path)
    first = cluster.coordinator(*flags)
    cluster.coordinator(*flags)
    server, worker = cluster.server(), cluster.worker(*PACED)
    until("steps", lambda: steps(cluster) > 3, 60.0)
    kill(first)
    for one in (worker, server, cluster.coordinators[1]):
        one.wait().check()
    report = read_files([path])
    assert report.outcome.kind == "done"
    assert the(report, "taken over")
    assert set(the(report, "joined")) >= {"server-0", "worker-0"}, "events survive"
    assert report.ledger is not None
    assert [(epoch.once, epoch.twice, epoch.never) for epoch in report.ledger.epochs] == [(230, 0, 0)] * 6


@pytest.mark.long
def test_a_run_keeps_what_its_killed_coordinator_has_told(cluster: Cluster) -> None:
    place, path = cluster.place, cluster.place.work / "r.json"
    run = place.launch("run", TRAIN, "--workers", "1", "--report", path, "--", "--epochs", "8", "--pace", "0.1")
    run.wait_for(r"· version [1-9]")
    facts = place.status()
    os.kill(next(one["pid"] for one in facts["processes"] if one["name"] == "coordinator"), signal.SIGKILL)
    done = run.wait().check()
    report = read_files([path])
    assert the(report, "taken over")
    (loss,) = [curve for curve in report.curves if curve.name == "loss"]
    assert loss.points[0].step <= 3
    assert len(loss.points) > 100
    assert report.summary["weights_sha256"] == re.findall(r"weights sha256 (\w+)", done.out)[0]


@pytest.mark.long
def test_metrics_for_other_machines_are_refused_by_a_run(cluster: Cluster) -> None:
    done = cluster.place.paramserver("run", TRAIN, "--metrics", "192.0.2.1:0")
    assert "say 127.0.0.1:0" in complaint(done, 2)
    assert done.out == ""
