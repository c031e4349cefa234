"""The processes that serve metrics about themselves, as Prometheus discovers them over HTTP (`http_sd_configs`)."""

from __future__ import annotations

from urllib.parse import urlsplit

from paramserver.web.models import Status, Target, Targets


def targets_of(status: Status, role: str = "") -> Targets:
    """The members that serve metrics. ``role``: only those in this role; empty: all."""
    found = []
    for process in status.processes:
        if process.gone or not process.metrics_url or role not in ("", process.role):
            continue
        url = urlsplit(process.metrics_url)
        labels = {"__scheme__": url.scheme, "__metrics_path__": url.path, "process": process.name}
        found.append(Target(targets=[url.netloc], labels=labels))
    return Targets(found)
