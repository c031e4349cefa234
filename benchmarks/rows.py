"""Results of a benchmark: one row per case and variant, as a table for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median


@dataclass(frozen=True, slots=True)
class Row:
    """One variant of one case.

    ``median_s``: seconds for a unit of work, the median of the repetitions; ``spread``: largest minus smallest, divided
    by the median; ``ratio``: its time over that of our variant; above 1 ours is faster.
    """

    benchmark: str
    case: str
    variant: str
    median_s: float
    spread: float
    ratio: float


def rows(benchmark: str, case: str, seconds: Mapping[str, Sequence[float]], ours: str) -> list[Row]:
    """One row per variant. ``seconds``: by variant, of each repetition; ``ours``: the variant that is ours.

    Raises ValueError if a variant has no repetition.
    """
    for variant, times in seconds.items():
        if not times:
            raise ValueError(f"{variant} was never measured")
    reference = median(seconds[ours])
    return [
        Row(benchmark, case, variant, middle, (max(times) - min(times)) / middle, middle / reference)
        for variant, times in seconds.items()
        for middle in [median(times)]
    ]


def table(found: Iterable[Row]) -> str:
    """The rows for people to read."""
    all_rows = list(found)
    wide = max((len(row.case) for row in all_rows), default=0) + 2
    lines = [f"{'benchmark':<14}{'case':<{wide}}{'variant':<24}{'median':>12}{'spread':>8}{'ratio':>7}"]
    for row in all_rows:
        what = f"{row.benchmark:<14}{row.case:<{wide}}{row.variant:<24}"
        lines.append(f"{what}{row.median_s * 1000:>9.1f} ms{row.spread:>8.0%}{row.ratio:>7.2f}")
    return "\n".join(lines)


def write(path: Path, found: Iterable[Row]) -> None:
    """A JSON list of objects."""
    path.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")
