"""Which of the eight states is shown, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paramserver.core.job.standing import (
    WELL,
    Departure,
    JobFacts,
    MemberFacts,
    Phase,
    Standing,
    State,
    departed_standing,
    job_standing,
    member_standing,
)

RUNNING = JobFacts(Phase.RUNNING, workers=2)
AWAY = "server-1 is lost; another one takes its place"


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (JobFacts(Phase.WAITING, "0/1 servers"), Standing(State.WAITING, "0/1 servers")),
        (JobFacts(Phase.INITIALISING), Standing(State.WAITING, "version 0 is on its way to the servers")),
        (RUNNING, Standing(State.TRAINING)),
        (replace(RUNNING, idle="a step has 2 slices"), Standing(State.TRAINING, "a step has 2 slices")),
        (replace(RUNNING, workers=0), Standing(State.IDLE, "there are no workers; the servers keep the model")),
        (
            replace(RUNNING, workers=0, finished=True),
            Standing(State.TRAINING, "the workers are through; the result is gathered"),
        ),
        (replace(RUNNING, away=[AWAY]), Standing(State.DEGRADED, AWAY)),
        (replace(RUNNING, missed=["worker-1 is gone: x"]), Standing(State.DEGRADED, "worker-1 is gone: x")),
        (replace(RUNNING, workers=0, missed=["a", "b"]), Standing(State.DEGRADED, "a; b")),
        (replace(RUNNING, troubles=["the disk is full"]), Standing(State.DEGRADED, "the disk is full")),
        (replace(RUNNING, broken=["no checkpoint"]), Standing(State.DEGRADED, "no checkpoint")),
        (
            replace(RUNNING, stalled=["worker-0"]),
            Standing(State.DEGRADED, "worker-0 hands in nothing; its slices go to others"),
        ),
        (
            JobFacts(Phase.RECOVERING, "server-1 has begun anew: going back to a checkpoint", workers=2),
            Standing(State.DEGRADED, "server-1 has begun anew: going back to a checkpoint"),
        ),
        (replace(RUNNING, away=[AWAY], stuck="nobody comes"), Standing(State.STUCK, "nobody comes")),
        (JobFacts(Phase.WAITING, "0/1 servers", troubles=["x"]), Standing(State.DEGRADED, "x")),
        (JobFacts(Phase.FAILED, "boom", troubles=["x"]), Standing(State.FAILED, "boom")),
        (JobFacts(Phase.STOPPED, "enough", stuck="x"), Standing(State.STOPPED, "enough")),
        (JobFacts(Phase.DONE, "done", missed=["x"]), Standing(State.DONE, "done")),
        (JobFacts(Phase.DONE, "done", broken=["no checkpoint"]), Standing(State.FAILED, "no checkpoint")),
    ],
)
def test_where_a_job_stands(facts: JobFacts, expected: Standing) -> None:
    assert job_standing(facts) == expected


def test_a_worker_that_is_gone_when_others_are_through_is_missed_no_more() -> None:
    assert job_standing(replace(RUNNING, missed=["x"], finished=True)).state is State.TRAINING


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
        (MEMBER, Standing(State.TRAINING)),
        (replace(MEMBER, waiting_for="worker-1"), Standing(State.TRAINING, "waits for worker-1")),
        (replace(MEMBER, ready=False, waiting_for="servers"), Standing(State.WAITING, "servers")),
        (replace(MEMBER, silent=True), Standing(State.DEGRADED, "not heard of just now")),
        (
            replace(MEMBER, stalled=True),
            Standing(State.STUCK, "it lives, but its script hands in nothing; its slices go to others"),
        ),
        (replace(MEMBER, draining=True), Standing(State.TRAINING, "it was asked to leave")),
        (replace(MEMBER, idle="a step has 2 slices"), Standing(State.IDLE, "a step has 2 slices")),
        (replace(MEMBER, job=replace(RUNNING, workers=0)), Standing(State.IDLE)),
        (replace(MEMBER, job=replace(RUNNING, away=[AWAY])), Standing(State.WAITING, AWAY)),
        (replace(MEMBER, job=replace(RUNNING, away=[AWAY]), at_work=True), Standing(State.TRAINING)),
        (replace(MEMBER, job=JobFacts(Phase.RECOVERING, "back", workers=1)), Standing(State.WAITING, "back")),
        (replace(MEMBER, job=JobFacts(Phase.STOPPED, "enough", workers=1)), Standing(State.STOPPED)),
    ],
)
def test_where_a_member_stands(facts: MemberFacts, expected: Standing) -> None:
    assert member_standing(facts) == expected


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Departure(lost="it has ended"), Standing(State.FAILED, "it has ended")),
        (Departure(failure="ValueError: x"), Standing(State.FAILED, "its script failed: ValueError: x")),
        (Departure(finished=True, epochs_planned=3), Standing(State.DONE)),
        (Departure(epochs_planned=3), Standing(State.STOPPED, "it left before its last epoch")),
        (Departure(epochs_planned=3, told="it was asked to leave"), Standing(State.STOPPED, "it was asked to leave")),
        (Departure(), Standing(State.DONE)),
    ],
)
def test_where_somebody_stands_who_is_gone(how: Departure, expected: Standing) -> None:
    assert departed_standing(how) == expected
