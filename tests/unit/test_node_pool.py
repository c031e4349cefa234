"""When the memory of a contribution may be used again."""

from __future__ import annotations

import torch

from paramserver.core.plan import TensorSpec, make_layout
from paramserver.worker.flat import NodePool

LAYOUT = make_layout([TensorSpec("w", (4,), "float32")])


def test_what_was_given_back_is_used_again_and_zero() -> None:
    pool = NodePool(LAYOUT, torch.device("cpu"))
    node = pool.take()
    node.space.view(0).fill_(3.0)
    pool.give(node)
    again = pool.take()
    assert again.space is node.space
    assert not again.space.view(0).any()
    assert pool.take().space is not node.space


def test_what_is_lent_comes_back_when_its_step_is_done_and_its_push_over() -> None:
    pool = NodePool(LAYOUT, torch.device("cpu"))
    over: list[bool] = []
    node = pool.take()
    pool.lend(node, 5, lambda: bool(over))
    pool.installed(5)
    assert pool.take().space is not node.space
    pool.installed(6)
    assert pool.take().space is not node.space
    over.append(True)
    pool.installed(5)
    assert pool.take().space is not node.space
    pool.installed(6)
    assert pool.take().space is node.space
