"""Logged values as text for people."""

from __future__ import annotations


def value_text(value: float) -> str:
    """A value with four digits after the point; a small one with four digits that count.

    >>> value_text(0.4321), value_text(12.0), value_text(0.00001), value_text(-0.0123456)
    ('0.4321', '12.0000', '1e-05', '-0.01235')
    """
    return f"{value:.4g}" if 0 < abs(value) < 0.1 else f"{value:.4f}"
