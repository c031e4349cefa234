"""Which of the eight states is shown, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paramserver.core.job.life import Phase
from paramserver.core.job.status import (
    WELL,
    Departure,
    JobFacts,
    MemberFacts,
    State,
    Status,
    departed_status,
    job_status,
    member_status,
    more_of,
    result_of,
)

RUNNING = JobFacts(Phase.RUNNING, workers=2)
AWAY = "server-1 is lost; another one takes its place"


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (JobFacts(Phase.WAITING, "0/1 servers"), Status(State.WAITING, "0/1 servers")),
        (JobFacts(Phase.INITIALISING), Status(State.WAITING, "version 0 is on its way to the servers")),
        (
            JobFacts(Phase.WAITING, ranks=True),
            Status(State.TRAINING, "the servers work for the ranks of a DDP script"),
        ),
        (JobFacts(Phase.WAITING, "0/1 servers", ranks=True), Status(State.WAITING, "0/1 servers")),
        (JobFacts(Phase.WAITING), Status(State.WAITING, "no script has registered a model")),
        (RUNNING, Status(State.TRAINING)),
        (replace(RUNNING, idle="a step has 2 slices"), Status(State.TRAINING, "a step has 2 slices")),
        (replace(RUNNING, workers=0), Status(State.IDLE, "there are no workers; the servers keep the model")),
        (
            replace(RUNNING, workers=0, finished=True),
            Status(State.TRAINING, "the workers are through; the result is gathered"),
        ),
        (replace(RUNNING, away=[AWAY]), Status(State.DEGRADED, AWAY)),
        (replace(RUNNING, missed=["worker-1 is gone: x"]), Status(State.DEGRADED, "worker-1 is gone: x")),
        (replace(RUNNING, unprotected=["a", "b"], missed=["c"]), Status(State.DEGRADED, "a; b; c")),
        (replace(RUNNING, workers=0, missed=["a", "b"]), Status(State.DEGRADED, "a; b")),
        (replace(RUNNING, troubles=["the disk is full"]), Status(State.DEGRADED, "the disk is full")),
        (replace(RUNNING, broken=["no checkpoint"]), Status(State.DEGRADED, "no checkpoint")),
        (
            replace(RUNNING, stalled=["worker-0"]),
            Status(State.DEGRADED, "worker-0 hands in nothing; its slices go to others"),
        ),
        (
            JobFacts(Phase.RECOVERING, "server-1 has begun anew: going back to a checkpoint", workers=2),
            Status(State.DEGRADED, "server-1 has begun anew: going back to a checkpoint"),
        ),
        (replace(RUNNING, away=[AWAY], stuck="nobody comes"), Status(State.STUCK, "nobody comes")),
        (JobFacts(Phase.WAITING, "0/1 servers", troubles=["x"]), Status(State.DEGRADED, "x")),
        (JobFacts(Phase.FAILED, "boom", troubles=["x"]), Status(State.FAILED, "boom")),
        (JobFacts(Phase.STOPPED, "enough", stuck="x"), Status(State.STOPPED, "enough")),
        (JobFacts(Phase.DONE, "done", missed=["x"]), Status(State.DONE, "done")),
        (JobFacts(Phase.DONE, "done", broken=["no checkpoint"]), Status(State.FAILED, "no checkpoint")),
    ],
)
def test_where_a_job_stands(facts: JobFacts, expected: Status) -> None:
    assert job_status(facts) == expected


def test_a_worker_that_is_gone_when_others_are_through_is_missed_no_more() -> None:
    assert job_status(replace(RUNNING, missed=["x"], finished=True)).state is State.TRAINING


def test_a_server_whose_shards_others_hold_lets_nobody_wait() -> None:
    assert member_status(replace(MEMBER, job=replace(RUNNING, unprotected=[AWAY]))) == Status(State.TRAINING)


def test_only_training_and_done_are_well() -> None:
    """What `status --check` says."""
    assert {state for state in State if state in WELL} == {State.TRAINING, State.DONE}
    assert {str(state) for state in State} == {
        *("waiting", "training", "idle", "degraded", "stuck", "failed", "stopped", "done")
    }


MEMBER = MemberFacts(RUNNING)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (MEMBER, Status(State.TRAINING)),
        (replace(MEMBER, waiting_for="worker-1"), Status(State.TRAINING, "waits for worker-1")),
        (replace(MEMBER, ready=False, waiting_for="servers"), Status(State.WAITING, "servers")),
        (replace(MEMBER, silent=True), Status(State.DEGRADED, "not heard of just now")),
        (replace(MEMBER, silent_s=3.4, waiting_for="x"), Status(State.DEGRADED, "not heard of for 3 s")),
        (
            replace(MEMBER, stalled=True),
            Status(State.STUCK, "it lives, but its script hands in nothing; its slices go to others"),
        ),
        (replace(MEMBER, draining=True), Status(State.TRAINING, "it was asked to leave")),
        (replace(MEMBER, idle="a step has 2 slices"), Status(State.IDLE, "a step has 2 slices")),
        (replace(MEMBER, job=replace(RUNNING, workers=0)), Status(State.IDLE)),
        (replace(MEMBER, job=replace(RUNNING, away=[AWAY])), Status(State.WAITING, AWAY)),
        (replace(MEMBER, job=replace(RUNNING, away=[AWAY]), at_work=True), Status(State.TRAINING)),
        (replace(MEMBER, job=JobFacts(Phase.RECOVERING, "back", workers=1)), Status(State.WAITING, "back")),
        (replace(MEMBER, job=JobFacts(Phase.STOPPED, "enough", workers=1)), Status(State.STOPPED)),
    ],
)
def test_where_a_member_stands(facts: MemberFacts, expected: Status) -> None:
    assert member_status(facts) == expected


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Departure(lost="it has ended"), Status(State.FAILED, "it has ended")),
        (Departure(failure="ValueError: x"), Status(State.FAILED, "its script failed: ValueError: x")),
        (Departure(finished=True, epochs_planned=3), Status(State.DONE)),
        (Departure(epochs_planned=3), Status(State.STOPPED, "it left before its last epoch")),
        (Departure(epochs_planned=3, told="it was asked to leave"), Status(State.STOPPED, "it was asked to leave")),
        (Departure(), Status(State.DONE)),
    ],
)
def test_where_somebody_stands_who_is_gone(how: Departure, expected: Status) -> None:
    assert departed_status(how) == expected


def test_more_processes_are_started_where_the_others_were_started() -> None:
    by_hand = "run: paramserver start worker --join a:8790"
    assert more_of("worker", 5, ["docker start 3f2a"], by_hand) == (
        "in containers of Compose, run: docker-compose up -d --no-recreate --scale worker=5"
    )
    assert more_of("worker", 5, ["systemctl restart paramserver-worker"], by_hand) == by_hand
    assert more_of("server", 3, [], by_hand) == by_hand


def test_the_sentence_of_the_last_lines() -> None:
    assert result_of(["done: sync, 9 steps in 1.0 s", "everything promised is there"]) == "sync, 9 steps in 1.0 s"
    assert result_of(["ended: sync", "promise broken: the disk is full"]) == "the disk is full"
    assert result_of(["worker-0 failed with exit code 1; the run ends"]).startswith("worker-0 failed")
    assert result_of([]) == ""
