"""A newcomer's settings: the coordinator's, unless somebody here has said otherwise; then both must agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramserver import errors
from paramserver.config import load_settings
from paramserver.membership.settings import SHARED, adopted, shared

THEIRS = shared(
    load_settings(
        None,
        {
            "cluster.job": "digits",
            "cluster.lease_s": 2.5,
            "consistency.mode": "async",
            "consistency.staleness": "unbounded",
            "training.seed": 7,
            "training.slices_per_step": 4,
            "training.nonfinite": "fail",
        },
        environ={},
    )
)


def test_what_nobody_has_set_is_taken_over() -> None:
    mine = load_settings(None, {}, environ={})
    taken = adopted(mine, THEIRS)
    assert taken == THEIRS
    settings = load_settings(None, taken, environ={})
    assert shared(settings) == THEIRS
    assert (settings.cluster.lease_s, settings.consistency.staleness, settings.training.seed) == (2.5, "unbounded", 7)


def test_what_is_one_machines_own_is_not_told() -> None:
    """Addresses, files, secrets, devices: nobody else's business."""
    for key in (
        "cluster.coordinator",
        "cluster.store",
        "training.device",
        "run.summary",
        "security.token",
        "log.level",
    ):
        assert key not in SHARED
        assert key not in THEIRS


def test_equal_settings_may_be_said_twice() -> None:
    mine = load_settings(None, {"training.seed": 7, "training.nonfinite": "fail"}, environ={})
    taken = adopted(mine, THEIRS)
    assert "training.seed" not in taken
    assert "training.nonfinite" not in taken
    assert taken["cluster.job"] == "digits"


def test_another_value_is_refused_with_its_origin(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[training]\nseed = 8\n")
    mine = load_settings(file, {"cluster.job": "letters"}, environ={"PARAMSERVER_TRAINING__SLICES_PER_STEP": "3"})
    with pytest.raises(errors.ConfigError) as caught:
        adopted(mine, THEIRS)
    text = str(caught.value)
    assert "cluster.job is letters here (flag), the job has digits" in text
    assert f"training.seed is 8 here (file {file}), the job has 7" in text
    assert "training.slices_per_step is 3 here (env PARAMSERVER_TRAINING__SLICES_PER_STEP), the job has 4" in text
    assert text.endswith("use one setting, or leave it to the coordinator")


@pytest.mark.parametrize(
    ("given", "rule", "base"),
    [
        ({}, "linear", 0),
        ({"consistency.mode": "async"}, "none", 1),
        ({"training.lr_scaling": "none"}, "none", 1),
        ({"training.lr_scaling": "sqrt", "training.lr_base_slices": 2}, "sqrt", 2),
    ],
)
def test_how_the_job_began_decides_about_learning_rates_after_a_change_of_mode(
    given: dict[str, object], rule: str, base: int
) -> None:
    """A worker that is started with the present mode, or with "auto", has the job's rule."""
    theirs = shared(load_settings(None, given, environ={}))
    assert (theirs["training.lr_scaling"], theirs["training.lr_base_slices"]) == (rule, str(base))
    mine = load_settings(None, {"consistency.mode": "async", "training.lr_scaling": "auto"}, environ={})
    taken = adopted(mine, theirs)
    assert (taken["training.lr_scaling"], taken["training.lr_base_slices"]) == (rule, str(base))


def test_mode_and_staleness_are_left_to_the_admission() -> None:
    """They may have changed while the job runs: who was started like the job is let in."""
    mine = load_settings(None, {"consistency.mode": "sync"}, environ={})
    taken = adopted(mine, THEIRS)
    assert "consistency.mode" not in taken
    assert taken["consistency.staleness"] == "unbounded"


def test_a_coordinator_that_says_less_leaves_the_defaults() -> None:
    """One of an earlier version does not know of all settings."""
    assert adopted(load_settings(None, {}, environ={}), {"cluster.job": "digits"}) == {"cluster.job": "digits"}


def test_a_coordinator_that_says_more_is_not_believed() -> None:
    """What it may not tell is not taken over."""
    mine = load_settings(None, {}, environ={})
    assert adopted(mine, {"cluster.store": "redis://elsewhere", "run.save": "/etc/x", "unknown.key": "1"}) == {}
