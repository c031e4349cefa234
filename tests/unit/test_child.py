"""The program of the launcher's children: what it tells the users of a script that fails."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paramserver.roles.child import asks_for_ranks


@pytest.mark.parametrize(
    ("call", "asks"),
    [
        (lambda: dist.init_process_group("gloo"), True),
        (lambda: dist.init_process_group("paramserver"), True),
        (dist.get_rank, True),
        (lambda: DistributedDataParallel(torch.nn.Linear(2, 2)), True),
        (lambda: int(os.environ["LOCAL_RANK"]), True),
        (lambda: os.environ["RANKS_OF_MINE"], False),
        (lambda: int("x"), False),
        (lambda: dict[str, int]()["rank"], False),
    ],
)
def test_a_script_that_was_not_told_its_rank(
    call: Callable[[], object], asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises((AssertionError, KeyError, RuntimeError, ValueError)) as caught:
        call()
    assert asks_for_ranks(caught.value) is asks


def test_the_answer_of_torch_to_an_unknown_backend() -> None:
    assert asks_for_ranks(AssertionError("Unknown backend type paramserver"))
