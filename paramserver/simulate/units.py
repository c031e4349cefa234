"""Quantities as people write them: 25M parameters, 2GiB, 0.2s, 10Gb/s."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from paramserver.errors import ConfigError

_COUNTS = {"": 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}
_DECIMAL = {"": 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
# Bytes; a B alone is a billion parameters.
_SIZES = {f"{prefix}B": size for prefix, size in {**_DECIMAL, **_BINARY}.items() if prefix}
# Bytes per second; a small b is a bit.
_BITS = {f"{prefix}{unit}": size / 8 for prefix, size in _DECIMAL.items() for unit in ("b/s", "bit/s", "bps")}
_RATES = _BITS | {f"{prefix}B/s": size for prefix, size in {**_DECIMAL, **_BINARY}.items()}
# Of a parameter (float32).
_BYTES = 4
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z/]*)\s*")


def parameters(flag: str, text: str) -> int:
    """A number of float32 parameters such as 25M, or the bytes of all of them such as 2GiB. Raises ConfigError."""
    units = _COUNTS | {name: size / _BYTES for name, size in _SIZES.items()}
    must = "a number of parameters such as 60k, 25M or 1.3B, or their size such as 100MB or 2GiB"
    return int(_read(flag, text, units, must, lambda value: value >= 1 and value == int(value)))


def count(flag: str, text: str) -> int:
    """A number of things, 0 or more, such as 60k. Raises ConfigError."""
    must = "a number of 0 or more such as 512 or 60k"
    return int(_read(flag, text, _COUNTS, must, lambda value: value >= 0 and value == int(value)))


def seconds(flag: str, text: str) -> float:
    """A time, such as 0.2s or 150ms. Raises ConfigError."""
    return _read(flag, text, _SECONDS, "a time above 0 such as 0.2s or 150ms")


def bandwidth(flag: str, text: str) -> float:
    """Bytes per second, from bits (10Gb/s) or bytes (1.2GB/s) per second. Raises ConfigError."""
    return _read(flag, text, _RATES, "a bandwidth such as 10Gb/s (bits) or 1.2GB/s (bytes)")


def _read(
    flag: str, text: str, units: dict[str, float], must: str, fits: Callable[[float], bool] = lambda value: value > 0
) -> float:
    found = _QUANTITY.fullmatch(text)
    value = float(found[1]) * units[found[2]] if found is not None and found[2] in units else math.nan
    if not (math.isfinite(value) and fits(value)):
        raise ConfigError(f'{flag} is "{text}", but must be {must}')
    return value


def short(value: float) -> str:
    """Three figures and a prefix, such as 25 M."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g}"


def milliseconds(seconds_: float) -> str:
    """Three figures, or all before the point, such as 12.5 ms."""
    value = 1000 * seconds_
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"
