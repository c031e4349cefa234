"""When the memory of a contribution may be used again."""

from __future__ import annotations

import torch

from paramserver.core.layout.plan import TensorSpec, make_layout
from paramserver.worker.flat import PartialSumPool

LAYOUT = make_layout([TensorSpec("w", (4,), "float32"), TensorSpec("b", (2,), "float32")])


def test_what_was_given_back_is_used_again_and_zero_where_nothing_is_written() -> None:
    pool = PartialSumPool(LAYOUT, torch.device("cpu"))
    partial = pool.take()
    for index in (0, 1):
        partial.space.view(index).fill_(3.0)
        partial.used.add(index)
    partial.settle()
    assert [float(partial.space.view(index).sum()) for index in (0, 1)] == [12.0, 6.0]
    pool.give(partial)
    again = pool.take()
    assert again.space is partial.space
    again.space.view(1).fill_(5.0)
    again.used.add(1)
    again.settle()
    assert [float(again.space.view(index).sum()) for index in (0, 1)] == [0.0, 10.0]
    assert pool.take().space is not partial.space


def test_what_was_merged_into_a_node_is_zero_again_later() -> None:
    pool = PartialSumPool(LAYOUT, torch.device("cpu"))
    left, right = pool.take(), pool.take()
    for partial, index in ((left, 0), (right, 1)):
        partial.space.view(index).fill_(1.0)
        partial.used.add(index)
        partial.settle()
    left.absorb(right)
    pool.give(right)
    pool.give(left)
    again = pool.take()
    assert again.space is left.space
    again.settle()
    assert not any(flat.any() for flat in again.space.segments())


def test_what_is_lent_comes_back_when_its_step_is_done_and_its_push_over() -> None:
    pool = PartialSumPool(LAYOUT, torch.device("cpu"))
    over: list[bool] = []
    partial = pool.take()
    pool.lend(partial, 5, lambda: bool(over))
    pool.installed(5)
    assert pool.take().space is not partial.space
    pool.installed(6)
    assert pool.take().space is not partial.space
    over.append(True)
    pool.installed(5)
    assert pool.take().space is not partial.space
    pool.installed(6)
    assert pool.take().space is partial.space
