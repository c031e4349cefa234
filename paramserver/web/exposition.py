"""Metrics in the text format of Prometheus. This module needs the extra `dashboard`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from paramserver.web.metrics import METRICS, PREFIX, samples
from paramserver.web.models import Event, Status

CONTENT_TYPE = CONTENT_TYPE_LATEST


class _Once:
    """A collector for one scrape."""

    def __init__(self, status: Status, events: Iterable[Event]) -> None:
        self._found = samples(status, events)

    def collect(self) -> Iterator[Metric]:
        """All metrics that have values."""
        for metric in METRICS:
            if not (values := self._found[metric.name]):
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(PREFIX + metric.name, metric.help, labels=metric.labels)
            for labels, value in values:
                family.add_metric(labels, value)
            yield family


def exposition(status: Status, events: Iterable[Event]) -> bytes:
    """The text for one scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(status, events))
    return generate_latest(registry)
