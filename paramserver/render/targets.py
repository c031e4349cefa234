"""The targets of ``paramserver render``: for each, a function from `Request` to files. ``TARGETS`` start a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paramserver.render import compose, jobset, k8s, monitoring, systemd
from paramserver.render.request import Files, Request

TARGETS: Mapping[str, Callable[[Request], Files]] = {
    "systemd": systemd.render,
    "compose": compose.render,
    "k8s": k8s.render,
    "jobset": jobset.render,
}
# Targets that watch a job, and start none.
WATCHING: Mapping[str, Callable[[Request], Files]] = {"monitoring": monitoring.render}
