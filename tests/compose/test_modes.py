"""A change of mode: asynchronous mode from the shell's environment, and commands to a job that trains."""

from __future__ import annotations

import json

import pytest

from tests.support.compose.harness import Cluster, until

pytestmark = pytest.mark.timeout(1800)


def test_asynchronous_from_the_environment(image: str) -> None:
    variables = {"PARAMSERVER_CONSISTENCY__MODE": "async", "PARAMSERVER_CONSISTENCY__STALENESS": "4"}
    with Cluster(SCRIPT="workers/digits.py --epochs 10", COMPOSE_PROFILES="state", **variables) as cluster:
        cluster.up()
        summary = cluster.result()
        logs = cluster.one("coordinator").logs()
        until("the monitor has seen the end", lambda: '"state": "done"' in cluster.one("monitor").logs())
        states = [json.loads(line) for line in cluster.one("monitor").logs().splitlines() if line.startswith("{")]
    print("\n" + "\n".join(line for line in logs.splitlines() if line.startswith(("done", "weights"))))
    assert (summary["mode"], summary["staleness"]) == ("async", 4)
    assert {state["mode"] for state in states[-2:]} == {"async"}
    # Every slice of every epoch is one update: 1,347 samples are 43 slices of 32.
    assert summary["steps"] == summary["contributions_applied"] == 10 * 43
    assert 0 < summary["max_clock_spread"] <= 5
    assert summary["metrics"]["test_accuracy"] > 0.9


def test_commands_to_a_running_job(image: str) -> None:
    with Cluster(SCRIPT="workers/digits.py --epochs 2000") as cluster:
        cluster.up()
        cluster.wait_for_version(5)

        cluster.admin("set", "consistency.mode=async", "--staleness", "2")
        until("the job has changed its mode", lambda: cluster.status().get("mode") == "async")
        assert cluster.status()["staleness"] == 2

        names = {one["name"] for one in cluster.workers()}
        assert len(names) == 2
        leaving = sorted(names)[-1]
        cluster.admin("drain", leaving)
        until("the worker has left", lambda: {one["name"] for one in cluster.workers()} == names - {leaving})
        ended = until(
            "its container has ended", lambda: [one for one in cluster.containers("worker") if not one.running]
        )
        # It is not started again: it was asked to leave.
        assert [(one.exit_code, one.restarts) for one in ended] == [(0, 0)]

        cluster.admin("stop", "--reason", "enough")
        assert cluster.result("stopped")["mode"] == "async"
        until("no worker runs", lambda: not any(one.running for one in cluster.containers("worker")))
        assert [one.exit_code for one in cluster.containers("worker")] == [0, 0]
