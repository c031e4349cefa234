"""Numbers in messages that say how long or how much: checked before anything is done with them."""

from __future__ import annotations

from paramserver.errors import ProtocolError


def seconds(name: str, value: float, most: float) -> float:
    """The value, if it is a time from 0 to ``most`` seconds; raises ProtocolError, for NaN too."""
    if not 0 <= value <= most:
        raise ProtocolError(f"{name} must be between 0 and {most:g} seconds, not {value:g}")
    return value
