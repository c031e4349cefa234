"""Several models in one job: what plain torch does with them, and the same bits with any number of processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.cluster.adversaries import EPOCHS, Adversaries, data_of, with_plain_torch
from tests.support.cluster.harness import Outcome, train

SLICES = 2


def states_agree(found: dict[str, Any], model: Any, optimizer: Any) -> None:
    """The state of one model, as `ctx.state_dict` gives it, is that of plain torch within rounding."""
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found["model"][name], value, rtol=1e-5, atol=1e-6)
    state = optimizer.state_dict()
    assert found["optimizer"]["state"].keys() == state["state"].keys()
    for number, one in state["state"].items():
        for key, value in one.items():
            torch.testing.assert_close(found["optimizer"]["state"][number][key], value, rtol=1e-4, atol=1e-6)
    rates = [[group["lr"] for group in one["param_groups"]] for one in (found["optimizer"], state)]
    assert rates[0] == rates[1]


def run(workers: int, servers: int, script: Adversaries, **settings: object) -> Outcome:
    """A whole job of this script."""
    return train(script, workers, servers, **{"slices_per_step": SLICES, **settings})


@pytest.mark.parametrize("turns", [1, 3])
def test_two_models_that_step_in_turn_are_those_of_plain_torch(turns: int) -> None:
    script = Adversaries(turns=turns, norm=False)
    run(2, 2, script)
    forger, critic, of_forger, of_critic = with_plain_torch(script.samples, turns, SLICES)
    for state in script.states:
        states_agree(state["forger"], forger, of_forger)
        states_agree(state["critic"], critic, of_critic)
