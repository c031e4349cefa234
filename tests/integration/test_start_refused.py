"""Roles started one by one with flags that make no sense, or with settings other than those of the job."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from paramserver.cli.main import main
from tests.support.integration.harness import complaint
from tests.support.integration.roles import Cluster, cluster_fixture


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    yield from cluster_fixture()


def test_settings_come_from_the_coordinator_and_others_are_refused(cluster: Cluster) -> None:
    coordinator = cluster.coordinator(
        "--workers", "1", "--mode", "async", "--staleness", "2", "--set", "training.seed=5"
    )
    refused = {
        "training.seed is 6 here": "training.seed=6",
        "consistency.mode = sync": "consistency.mode=sync",
        "cluster.job is another here": "cluster.job=another",
    }
    workers = {text: cluster.worker("--epochs", "1", flags=("--set", one)) for text, one in refused.items()}
    for text, worker in workers.items():
        assert text in complaint(worker.wait(), 2)
    cluster.workers.clear()
    cluster.server()
    cluster.worker("--epochs", "1")
    cluster.ended()
    assert "async, staleness 2" in coordinator.out


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (["server"], "say --join HOST:PORT"),
        (["worker", "--", "x.py"], "say --join HOST:PORT"),
        (["worker", "--join", "127.0.0.1:1", "--", "x.py"], "does not exist"),
        (["coordinator", "--resume", "--fresh"], "contradict each other"),
        (["coordinator", "--servers", "2", "--replicas", "2"], "set cluster.servers to 3 or more, or cluster.replicas"),
        (["coordinator", "--servers", "2", "--replicas", "some"], 'must be an integer from 0 to 8, or "auto"'),
        (["server", "--join", "nowhere"], "cluster.coordinator"),
        (["coordinator", "--set", "cluster.coordinator=192.0.2.1:8790"], "no address of this machine"),
        (["coordinator", "--store", "memory", "--listen", "0.0.0.0:0"], "certs init"),
    ],
)
def test_bad_flags(
    tokens: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["start", *tokens]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("paramserver: error: ")
    assert says in err
    assert err.count("\n") == 1


def test_between_machines_somebody_has_to_say_where_checkpoints_lie(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A job without checkpoints is possible, but not by mistake. A directory that is missing is another mistake."""
    monkeypatch.chdir(tmp_path)
    start = ["start", "coordinator", "--store", "memory", "--insecure", "--listen"]
    assert main([*start, "0.0.0.0:0"]) == 2
    said = capsys.readouterr().err
    assert "checkpoint.dir is empty" in said
    assert "--checkpoint-dir none" in said
    for listen in ("0.0.0.0:0", "127.0.0.1:0"):
        assert main([*start, listen, "--checkpoint-dir", "nowhere/run"]) == 2
        assert "there is no directory nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["127.0.0.1:0"], ["0.0.0.0:0", "--insecure", "--checkpoint-dir", "none"]])
def test_without_checkpoints(flags: list[str], cluster: Cluster) -> None:
    """On one machine as before, and between machines if it is said."""
    place = cluster.place
    running = place.launch("start", "coordinator", "--store", "memory", "--job", "alone", "--listen", *flags)
    running.wait_for("coordinator of job alone at")
    running.send(signal.SIGTERM)
    assert running.wait().code == 143
    assert not (place.work / "none").exists()
