"""A client from outside that calls `init` before the job has begun is one of the workers that the job waits for."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from paramserver import errors
from paramserver.v1 import types_pb2
from tests.support.cluster.harness import Cluster, at_once, until

ZEROS = {"w": np.zeros(3, np.float32)}
ONES = {"w": np.ones(3, np.float32)}
MODES = pytest.mark.parametrize("mode", ["sync", "async"])


@MODES
def test_it_begins_a_job_alone(mode: str) -> None:
    with Cluster(1, 2, mode) as cluster:
        client = cluster.reader()
        assert client.init(ZEROS)["w"].tolist() == [0.0] * 3
        assert [worker.name for worker in cluster.status().view.workers] == ["worker-0"]
        assert client.push(ONES) == 1
        assert client.pull()["w"].tolist() == [1.0] * 3
        client.close()
        until("the job has come to rest", lambda: not cluster.job.coordinator.job.ending.closing)
        assert dict(cluster.status().broken_promises) == {}


def test_two_begin_a_job_of_two() -> None:
    with Cluster(2) as cluster:
        first, second = cluster.reader(), cluster.reader()
        at_once(cluster, lambda: first.init(ZEROS), lambda: second.init(ZEROS))
        at_once(cluster, lambda: first.push(ONES), lambda: second.push(ONES))
        assert first.pull()["w"].tolist() == [2.0] * 3
        first.close()
        second.close()


def test_who_comes_to_a_running_job_only_looks_until_it_pushes() -> None:
    with Cluster(1) as cluster:
        first, second = cluster.reader(), cluster.reader()
        first.init(ZEROS)
        second.init(ZEROS)
        assert len(cluster.status().view.workers) == 1
        first.push(ONES)  # waits for nobody
        assert second.pull()["w"].tolist() == [1.0] * 3
        pushing = threading.Thread(target=lambda: second.push(ONES), daemon=True)
        pushing.start()
        until("it counts as a worker", lambda: len(cluster.status().view.workers) == 2)
        first.close()  # a step has one slice, which was the first one's until now
        pushing.join(20.0)
        assert second.pull()["w"].tolist() == [2.0] * 3
        second.close()


def test_who_pulls_before_there_is_a_model_counts_as_nobody() -> None:
    with Cluster(1) as cluster:
        client = cluster.reader()
        with pytest.raises(errors.UserError):
            client.pull()
        status = cluster.status()
        assert list(status.view.workers) == []
        assert status.view.state == types_pb2.JOB_STATE_WAITING
        client.close()


def test_a_job_whose_workers_are_started_for_it_does_not_count_it() -> None:
    """Its own workers have their places."""
    with Cluster(1, launched=True) as cluster:
        client, seen = cluster.reader(), threading.Event()

        def look() -> None:
            client.init(ZEROS)
            seen.set()

        threading.Thread(target=look, daemon=True).start()
        until("the model is there", lambda: cluster.status().view.shards)
        own = cluster.client(0)
        own.init(ZEROS)
        assert own.rank == 0
        assert seen.wait(20.0)
        assert len(cluster.status().view.workers) == 1
        own.close()
        client.close()
