"""How busy the processors of this machine are, by all processes together."""

from __future__ import annotations

from pathlib import Path


class Busy:
    """Since it was made."""

    def __init__(self) -> None:
        self._before = _ticks()

    def shares(self) -> tuple[float, float]:
        """Of all processors: the share that was used, and the share that the host of this machine took away."""
        used, stolen, total = (now - then for now, then in zip(_ticks(), self._before, strict=True))
        return used / max(1, total), stolen / max(1, total)


def _ticks() -> tuple[int, int, int]:
    return parse(Path("/proc/stat").read_text())


def parse(text: str) -> tuple[int, int, int]:
    """Of /proc/stat: (used, stolen, all) ticks of all processors."""
    numbers = [int(word) for word in text.splitlines()[0].split()[1:9]]
    idle = numbers[3] + numbers[4]
    return sum(numbers) - idle - numbers[7], numbers[7], sum(numbers)
