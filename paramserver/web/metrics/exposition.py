"""Metrics in the text format of Prometheus. This module needs the extra `dashboard`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from paramserver.web.metrics.table import PREFIX, Metric, Samples

CONTENT_TYPE = CONTENT_TYPE_LATEST


class _Once:
    """A collector for one scrape."""

    def __init__(self, metrics: Sequence[Metric], samples: Samples) -> None:
        self._metrics, self._samples = metrics, samples

    def collect(self) -> Iterator[Family]:
        """All metrics that have values."""
        for metric in self._metrics:
            if not (values := self._samples[metric.name]):
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(PREFIX + metric.name, metric.help, labels=metric.labels)
            for labels, value in values:
                family.add_metric(labels, value)
            yield family


def exposition(metrics: Sequence[Metric], samples: Samples) -> bytes:
    """The text for one scrape: these metrics, and the usual ones of a process (`process_cpu_seconds_total`, …)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(metrics, samples))
    ProcessCollector(registry=registry)
    return generate_latest(registry)
