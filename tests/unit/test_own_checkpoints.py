"""The checkpoints that `run` makes although nobody has asked for them, and what it says about the loss of a server."""

from __future__ import annotations

import pytest

from paramserver.config import load_settings
from paramserver.resume.checkpointing import checkpoint_options, cost_of_a_loss, own_pace


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({}, {"every_s": 5.0, "keep": 1}),
        ({"cluster.servers": 2}, {"every_s": 5.0, "keep": 1}),
        ({"cluster.servers": 2, "cluster.replicas": 1}, {"every_s": 0.0, "keep": 1}),
        ({"checkpoint.every_s": 60.0}, {}),
        ({"checkpoint.every": 9}, {"every_s": 5.0}),
        ({"checkpoint.keep": 2}, {"every_s": 5.0}),
        ({"checkpoint.every_s": 0.0, "checkpoint.keep": 2}, {}),
    ],
)
def test_how_often_a_run_saves_for_itself(given: dict[str, object], changes: dict[str, object]) -> None:
    """Settings of the user always win."""
    assert own_pace(load_settings(None, given)) == changes


@pytest.mark.parametrize(
    ("given", "private", "since"),
    [
        ({}, True, "the last checkpoint are done again; there is one every 300 s, more seldom if that takes long"),
        ({}, False, "the last checkpoint are done again; there is one every 300 s, sooner in the first 50 minutes"),
        ({"checkpoint.every_s": 60.0}, False, "the last checkpoint are done again; there is one every 60 s"),
        ({"checkpoint.every_s": 9.0}, True, "the last checkpoint are done again; there is one every 9 s"),
        ({"checkpoint.every": 7}, False, "the last checkpoint are done again; there is one every 7 steps"),
        ({"checkpoint.every_s": 0.0}, True, "the start are done again"),
    ],
)
def test_the_first_lines_say_what_a_killed_server_costs(given: dict[str, object], private: bool, since: str) -> None:
    said = f"if a server is killed, the steps since {since}"
    assert cost_of_a_loss(load_settings(None, {"cluster.servers": 1, **given}), private) == said
    two = load_settings(None, {"cluster.servers": 2, **given})
    assert cost_of_a_loss(two, private) == f"{said} (with --replicas 1 none are)"
    replicated = load_settings(None, {"cluster.servers": 2, "cluster.replicas": 1, **given})
    assert cost_of_a_loss(replicated, private) == ""


@pytest.mark.parametrize(
    ("given", "rising"),
    [({}, True), ({"checkpoint.every_s": 300.0}, False), ({"cluster.servers": 2, "cluster.replicas": 1}, False)],
)
def test_a_young_job_whose_user_says_nothing_saves_sooner(given: dict[str, object], rising: bool) -> None:
    options = checkpoint_options(load_settings(None, {"checkpoint.dir": "ckpt", **given}))
    assert (options.every_s, options.rising) == (300.0, rising)
