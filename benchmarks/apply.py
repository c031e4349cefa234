"""An update of a shard by one gradient that lies ready: our chunks, beside torch.optim on one flat tensor and on many.

One thread. Ours makes the next version beside the present version, all others change their weights in place. The floor
is the time of the least traffic (SGD 12, with momentum 20, AdamW 28 bytes for each weight) at the speed of an in-place
triad. A share of the floor above 1 means that other work slowed the triad more than the update.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from benchmarks.calib import measure
from benchmarks.rows import Row, rows
from benchmarks.shards import STATE_BYTES, Shard, Triad, optimizer_of

SIZES = (1_000_000, 10_000_000, 100_000_000)
TENSORS = 160
# Above this number of parameters, variants with several passes through memory are left out.
_MOST_UNFUSED = 10_000_000
OURS, FLAT, MANY, FOREACH, LOOP, FLOOR = (
    "ours, chunks",
    "flat, fused",
    f"{TENSORS} tensors, fused",
    f"{TENSORS} tensors, foreach",
    f"{TENSORS} tensors, loop",
    "memory floor",
)
_GRADIENT_BYTES = 4


def run(repetitions: int) -> list[Row]:
    """All cases in turn. Raises RuntimeError if the weights differ."""
    torch.set_num_threads(1)
    found: list[Row] = []
    for elements in SIZES:
        for name in STATE_BYTES:
            seconds = compare(name, elements, repetitions, elements <= _MOST_UNFUSED)
            case = f"{name}, {elements / 1e6:g} M parameters"
            share = median(seconds[FLOOR]) / median(seconds[OURS])
            print(f"{case}: {share:.2f} of the memory floor", file=sys.stderr, flush=True)
            found += rows("apply", case, seconds, OURS)
    return found


def compare(name: str, elements: int, repetitions: int, unfused: bool) -> dict[str, list[float]]:
    """Seconds of each step by variant. ``unfused``: also variants without fused kernels. Raises RuntimeError."""
    gradient = torch.full((elements,), 1 / 1024)
    shard, triad = Shard.of(name, [gradient]), Triad(elements)
    flat, flat_step = _trained(name, [gradient], fused=True)
    works: dict[str, Callable[[], None]] = {OURS: shard.step, FLAT: flat_step}
    parts = list(torch.tensor_split(gradient, TENSORS))
    others = {MANY: {"fused": True}}
    if unfused:
        others |= {FOREACH: {"foreach": True}, LOOP: {"foreach": False}}
    made: dict[str, list[Tensor]] = {FLAT: flat}
    for variant, how in others.items():
        made[variant], works[variant] = _trained(name, parts, **how)
    seconds = measure({**works, FLOOR: triad.step}, repetitions)
    seconds[FLOOR] = triad.bound(STATE_BYTES[name] + _GRADIENT_BYTES)[1:]
    check(shard.weights(), {variant: torch.cat([t.detach() for t in tensors]) for variant, tensors in made.items()})
    return seconds


def check(ours: Tensor, others: dict[str, Tensor]) -> None:
    """Raises RuntimeError if other weights are not ours."""
    for variant, weights in others.items():
        if not torch.allclose(ours, weights, rtol=1e-6, atol=1e-6):
            raise RuntimeError(f"{variant}: the weights differ by {(ours - weights).abs().max():.2g}")


def _trained(name: str, gradients: list[Tensor], **how: bool) -> tuple[list[Tensor], Callable[[], None]]:
    """Weights, and the optimizer that updates them in place."""
    weights = [torch.ones_like(gradient).requires_grad_() for gradient in gradients]
    for tensor, gradient in zip(weights, gradients, strict=True):
        tensor.grad = gradient
    optimizer = optimizer_of(name, weights, **how)

    def step() -> None:
        optimizer.step()

    return list(weights), step
