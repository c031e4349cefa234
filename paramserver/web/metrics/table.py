"""The words of the tables of metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PREFIX = "paramserver_"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``name``: without the prefix; that of a counter is shown with ``_total`` at its end."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """The name as Prometheus stores it."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")


# Values of each metric, by its name without the prefix: (values of its labels, number).
Samples = dict[str, list[tuple[tuple[str, ...], float]]]
# (name without the prefix, values of the labels, number).
Sample = tuple[str, tuple[str, ...], float]


def gathered(metrics: Sequence[Metric], found: Iterable[Sample]) -> Samples:
    """The samples by metric; every metric has a list."""
    samples: Samples = {metric.name: [] for metric in metrics}
    for name, labels, value in found:
        samples[name].append((labels, float(value)))
    return samples
