"""Numbers, times and counts for people."""

from __future__ import annotations

import math
import time


def number(value: object) -> str:
    """A number with four digits that count; whole numbers in full; anything else as it is.

    >>> number(1234567), number(0.123456), number(12345.6), number("NaN")
    ('1,234,567', '0.1235', '12,346', 'NaN')
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def seconds(value: float) -> str:
    """A time that has passed.

    >>> seconds(0.0421), seconds(42.0), seconds(3725.0)
    ('0.042 s', '42 s', '1 h 2 min')
    """
    if value < 120:
        return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"
    minutes = int(value // 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {int(value % 60)} s"


def size(value: float) -> str:
    """Bytes.

    >>> size(2_500_000)
    '2.5 MB'
    """
    units = ("B", "kB", "MB", "GB", "TB")
    at = 0
    while value >= 1000 and at < len(units) - 1:
        value, at = value / 1000, at + 1
    return f"{value:.1f} {units[at]}" if at else f"{value:.0f} B"


def moment(at_s: float) -> str:
    """A time in seconds since 1970, such as "2026-11-23 13:05:12 UTC"."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_s))


def count(many: int, thing: str, things: str = "") -> str:
    """A number of things.

    >>> count(1, "step"), count(2, "loss", "losses")
    ('1 step', '2 losses')
    """
    return f"{many:,} {thing}" if many == 1 else f"{many:,} {things or thing + 's'}"


def times(many: int) -> str:
    """How often: "once", "3 times"."""
    return "once" if many == 1 else f"{many} times"
