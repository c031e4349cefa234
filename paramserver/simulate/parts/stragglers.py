"""The time of a worker for a slice, as a multiple of the usual time. Seeded: the same words give the same numbers.

    normal:0.05        normally distributed, with this coefficient of variation
    lognormal:0.25     lognormal, with this sigma
    exp:0.3            0.7 + an exponential time of mean 0.3; exp:1 is all exponential
    pareto:2.5         Pareto with this exponent, above 1
    rare:0.02x5        2 % of the slices take 5 times as long
    slow:1x2           one worker (the worker of the highest rank) always takes twice as long
    bursts:3x20        now and then 3 times as long for 20 slices; bursts:3x20@0.004 has the probability with which a
                       burst begins at a slice, which is 0.004 if it is left out

The first four have a mean of 1, so the compute time remains the mean time of a slice.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

from paramserver.errors import ConfigError

_BURST_BEGINS = 0.004
_FORMS = "normal:CV, lognormal:SIGMA, exp:PART, pareto:A, rare:PxTIMES, slow:NxTIMES or bursts:TIMESxSLICES"

Factors = Iterator[float]


@dataclass(frozen=True, slots=True)
class Straggler:
    """One of the forms above. ``factors`` makes an endless row of one worker's multiples."""

    text: str
    factors: Callable[[int, int, random.Random], Factors]


def parse(text: str) -> Straggler:
    """Read one of the forms above. Raises ConfigError for other texts."""
    name, _, rest = text.partition(":")
    make = _MAKERS.get(name)
    try:
        if make is None:
            raise ValueError
        return Straggler(text, make(rest))
    except ValueError:
        raise ConfigError(f'--straggler "{text}" is not understood; it must be {_FORMS}') from None


def draws(stragglers: Sequence[Straggler], worker: int, workers: int, seed: int) -> Factors:
    """One worker's multiples, slice by slice, without end: the product over all stragglers."""
    rows = [
        one.factors(worker, workers, random.Random(f"{seed}/{worker}/{number}"))
        for number, one in enumerate(stragglers)
    ]
    return map(math.prod, zip(*rows, strict=True)) if rows else repeat(1.0)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def _pair(text: str) -> tuple[float, float]:
    first, _, second = text.partition("x")
    return _positive(first), _positive(second)


Made = Callable[[int, int, random.Random], Factors]


def _normal(text: str) -> Made:
    cv = _positive(text)
    return lambda worker, workers, chance: (max(0.0, chance.gauss(1.0, cv)) for _ in repeat(None))


def _lognormal(text: str) -> Made:
    sigma = _positive(text)
    return lambda worker, workers, chance: (chance.lognormvariate(-sigma * sigma / 2, sigma) for _ in repeat(None))


def _exponential(text: str) -> Made:
    part = _positive(text)
    if part > 1:
        raise ValueError
    return lambda worker, workers, chance: (1.0 - part + chance.expovariate(1.0 / part) for _ in repeat(None))


def _pareto(text: str) -> Made:
    a = _positive(text)
    if a <= 1:
        raise ValueError
    return lambda worker, workers, chance: ((a - 1) / a * chance.paretovariate(a) for _ in repeat(None))


def _rare(text: str) -> Made:
    often, times = _pair(text)
    if often > 1:
        raise ValueError
    return lambda worker, workers, chance: (times if chance.random() < often else 1.0 for _ in repeat(None))


def _slow(text: str) -> Made:
    count, times = _pair(text)
    if count != int(count):
        raise ValueError
    return lambda worker, workers, chance: repeat(times if worker >= workers - count else 1.0)


def _bursts(text: str) -> Made:
    body, _, probability = text.partition("@")
    times, length = _pair(body)
    begins = _positive(probability) if probability else _BURST_BEGINS
    if begins > 1 or length != int(length):
        raise ValueError

    def factors(worker: int, workers: int, chance: random.Random) -> Factors:
        while True:
            if chance.random() < begins:
                yield from repeat(times, int(length))
            else:
                yield 1.0

    return factors


_MAKERS: dict[str, Callable[[str], Made]] = {
    "normal": _normal,
    "lognormal": _lognormal,
    "exp": _exponential,
    "pareto": _pareto,
    "rare": _rare,
    "slow": _slow,
    "bursts": _bursts,
}
