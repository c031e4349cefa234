"""The compiled kernels, as far as they give torch's bits on this machine.

Which operations torch's compiler fused into one is its own affair, and not the same on every processor. So each kind of
formula is compared with torch's before its first use, and left to torch where a bit differs: a server with compiled
kernels and one without make the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product

import structlog
import torch
from torch import Tensor

from paramserver.core.layout.hypers import Hypers
from paramserver.kernels.library import COPY, PLACES, ROWS, Formula, Kind, Library, Recipe, load
from paramserver.server.arithmetic.fused import kernel_of
from paramserver.tensors.private import FUSED

log = structlog.get_logger("paramserver.server")


@cache
def kernels() -> Compiled | None:
    """The compiled kernels; None if there are none."""
    found = _examined()
    if isinstance(found, Compiled):
        return found
    log.info("updates without compiled kernels, which takes up to twice as long", why=found)
    return None


def report() -> str:
    """In words, for reports: which formulas are compiled, or why none is."""
    found = _examined()
    return (
        found if isinstance(found, str) else f"compiled: {', '.join(sorted(kind.name.lower() for kind in found.kinds))}"
    )


class Compiled:
    """``kinds``: the formulas of ``library`` that give torch's bits."""

    def __init__(self, library: Library, kinds: frozenset[Kind]) -> None:
        self.library, self.kinds = library, kinds

    def can(self, formula: Formula, rows: Sequence[Tensor], recipe: Recipe) -> bool:
        """Whether it can sum these, and this can become of it."""
        return (
            formula.kind in self.kinds
            and len(rows) <= ROWS
            and max((place for *_, place in recipe), default=0) - len(rows) < PLACES
            and all(row.dtype is torch.float32 and row.is_contiguous() for row in rows)
        )


@cache
def _examined() -> Compiled | str:
    library = load()
    if isinstance(library, str):
        return library
    kinds = frozenset(kind for kind, same in _CHECKS.items() if same(library))
    return Compiled(library, kinds) if kinds else "compiled, but torch rounds otherwise on this processor"


# ---- the comparison

# Neither a multiple of a vector nor of a block.
_ELEMENTS = 16 * 37
_SETTINGS: dict[str, list[Hypers]] = {
    "sgd": [
        {"lr": 0.1, "weight_decay": decay, "momentum": m, "dampening": d, "nesterov": nesterov, "maximize": maximize}
        for decay, m, d, nesterov, maximize in product(
            (0.0, 0.01), (0.0, 0.9), (0.0, 0.1), (False, True), (False, True)
        )
        if not nesterov or (m and not d)
    ],
    "adam": [
        {
            **{"lr": 0.01, "betas": (beta, 0.999), "eps": 1e-8, "weight_decay": decay, "amsgrad": False},
            **{"maximize": maximize, "decoupled_weight_decay": decoupled},
        }
        for beta, decay, maximize, decoupled in product((0.9, 0.3), (0.0, 0.01), (False, True), (False, True))
    ],
}


def _drawn(generator: torch.Generator, elements: int = _ELEMENTS) -> Tensor:
    """Numbers of many sizes."""
    return torch.randn(elements, generator=generator) * torch.randn(elements, generator=generator).exp2()


def _same_sums(library: Library) -> bool:
    generator = torch.Generator().manual_seed(1)
    rows = [_drawn(generator, _ELEMENTS + 5) for _ in range(3)]
    total = (rows[0] + rows[1]) + rows[2]
    for divisor in (1.0, 4.0, 7.0):
        out = torch.empty_like(total)
        library.step(rows, 0, ((0, 1, 3), (3, 2, 3)), divisor, COPY, None, out)
        if not torch.equal(out, total / divisor):
            return False
    return True


def _same_additions(library: Library) -> bool:
    generator = torch.Generator().manual_seed(2)
    gradient, weights = (_drawn(generator, _ELEMENTS + 5) for _ in range(2))
    for factor in (1.0, -0.1):
        out = torch.empty_like(weights)
        library.step([gradient], 0, (), 1.0, Formula(Kind.ADD, (factor,)), weights, out)
        if not torch.equal(out, torch.add(weights, gradient, alpha=factor)):
            return False
    return True


def _same_steps(library: Library, optimizer: str) -> bool:
    return optimizer in FUSED and all(_same(library, optimizer, hypers) for hypers in _SETTINGS[optimizer])


def _same(library: Library, optimizer: str, hypers: Hypers) -> bool:
    kernel = kernel_of(optimizer, hypers)
    assert kernel.formula is not None
    generator = torch.Generator().manual_seed(3)
    theirs = _drawn(generator)
    ours, count = theirs.clone(), torch.zeros(())
    their_state, our_state = ([torch.zeros(_ELEMENTS) for _ in kernel.arrays] for _ in range(2))
    for number in range(3):
        gradient, out = _drawn(generator), torch.empty_like(ours)
        if kernel.counts:
            count += 1
        formula = kernel.formula(count.item(), not number)
        library.step([gradient], 0, (), 1.0, formula, ours, out, our_state)
        kernel.apply(theirs, gradient, their_state, count, not number)
        ours = out
    return all(torch.equal(mine, other) for mine, other in zip([ours, *our_state], [theirs, *their_state], strict=True))


_CHECKS: dict[Kind, Callable[[Library], bool]] = {
    Kind.COPY: _same_sums,
    Kind.ADD: _same_additions,
    Kind.SGD: partial(_same_steps, optimizer="sgd"),
    Kind.ADAM: partial(_same_steps, optimizer="adam"),
}
