"""The sum of a step's contributions and the update by it (AdamW): ours, beside ways that sum whole gradients first.

One thread; every contribution lies in memory of its own, and none of it in a cache. The floor reads each contribution
once, and takes the 24 bytes per weight that an update needs beside its gradient. Times are also given as the bytes per
weight that an in-place triad would have moved meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from benchmarks.apply import check
from benchmarks.calib import measure
from benchmarks.rows import Row, rows
from benchmarks.shards import STATE_BYTES, Shard, Triad, optimizer_of
from paramserver.core.versions.reduction import fold_order

ELEMENTS = 8_000_000
COUNTS = (2, 4, 8, 16)
OURS, PLAIN, TREE, FLOOR = "ours, tiles", "one by one", "pairwise tree", "memory floor"
OPTIMIZER = "AdamW"


def run(repetitions: int) -> list[Row]:
    """All cases in turn. Raises RuntimeError if the weights differ."""
    torch.set_num_threads(1)
    found: list[Row] = []
    for count in COUNTS:
        seconds = compare(count, ELEMENTS, repetitions)
        floor = median(seconds[FLOOR])
        least = floor_bytes(count)
        moved = ", ".join(f"{variant} {least * median(times) / floor:.0f}" for variant, times in seconds.items())
        case = f"{count} contributions, {OPTIMIZER}"
        print(f"{case}, bytes per parameter: {moved}", file=sys.stderr, flush=True)
        found += rows("agg", case, seconds, OURS)
    return found


def floor_bytes(count: int) -> int:
    """Bytes that a step of so many contributions must move for each weight."""
    return 4 * count + STATE_BYTES[OPTIMIZER]


def compare(count: int, elements: int, repetitions: int) -> dict[str, list[float]]:
    """Seconds of each step, by variant. Raises RuntimeError if the weights differ."""
    gradients = [torch.full((elements,), (number + 1) / 1024) for number in range(count)]
    shard, triad = Shard.of(OPTIMIZER, gradients), Triad(elements)
    weights = {variant: torch.ones(elements) for variant in (PLAIN, TREE)}
    works: dict[str, Callable[[], None]] = {
        OURS: shard.step,
        PLAIN: _one_by_one(weights[PLAIN], gradients),
        TREE: _pairwise(weights[TREE], gradients),
    }
    seconds = measure({**works, FLOOR: triad.step}, repetitions)
    seconds[FLOOR] = triad.bound(floor_bytes(count))[1:]
    check(shard.weights(), weights)
    return seconds


def _one_by_one(weights: Tensor, gradients: list[Tensor]) -> Callable[[], None]:
    """Each contribution is added to the sum of the earlier contributions."""
    total = torch.empty_like(weights)
    weights.grad = total
    optimizer = optimizer_of(OPTIMIZER, [weights], fused=True)

    def step() -> None:
        total.copy_(gradients[0])
        for gradient in gradients[1:]:
            total.add_(gradient)
        total.div_(len(gradients))
        optimizer.step()

    return step


def _pairwise(weights: Tensor, gradients: list[Tensor]) -> Callable[[], None]:
    """The same tree as ours, a whole gradient at a time."""
    count = len(gradients)
    leaves = {(number, number + 1): gradient for number, gradient in enumerate(gradients)}
    merges = fold_order(tuple(leaves), count)
    sums = {merge[2]: torch.empty_like(weights) for merge in merges}
    places = {**leaves, **sums}
    total = places[0, count]
    weights.grad = total
    optimizer = optimizer_of(OPTIMIZER, [weights], fused=True)

    def step() -> None:
        for left, right, result in merges:
            torch.add(places[left], places[right], out=places[result])
        total.div_(count)
        optimizer.step()

    return step
