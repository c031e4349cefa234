"""Settings that are the same on all members: the coordinator's, which newcomers take over."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import cast

from paramserver import errors
from paramserver.config import Settings
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.membership.joining import persist
from paramserver.transport.base import Channel
from paramserver.v1 import coordinator_pb2

SHARED = (
    "cluster.job",
    "cluster.lease_s",
    "cluster.max_idle_s",
    "cluster.when_done",
    "consistency.mode",
    "consistency.staleness",
    "training.seed",
    "training.slices_per_step",
    "training.lr_scaling",
    "training.lr_base_slices",
    "training.lr_warmup_steps",
    "training.chunk_bytes",
    "training.sync_batchnorm",
    "training.nonfinite",
    "training.audit",
    "training.pull_precision",
    "training.push_compression",
    "training.topk_ratio",
    "training.residual_flush_every",
    "training.threads_per_worker",
    "training.threads_per_server",
    "checkpoint.best_metric",
)
# Compared when a member joins, since they may have changed while the job runs.
_CHANGING = ("consistency.mode", "consistency.staleness")
# "auto" is the coordinator's to decide: it knows how the job began.
_RATES = ("training.lr_scaling", "training.lr_base_slices")
_CALL_S = 10.0


def shared(settings: Settings) -> dict[str, str]:
    """The coordinator's settings, which it tells to newcomers."""
    # Workers need not know how often checkpoints are taken.
    values = {**settings.values(), "training.residual_flush_every": settings.flush_every}
    values |= zip(_RATES, settings.lr_rule, strict=True)
    return {key: str(values[key]) for key in SHARED}


async def fetch(channel: Channel, settings: Settings, server: bool = False) -> Mapping[str, str]:
    """Ask a coordinator for its settings; waits up to ``cluster.join_timeout_s`` for one. Raises UnavailableError.

    ``server``: the caller will join as a server, for which a coordinator that takes a job over may be waiting.
    """
    request = coordinator_pb2.SettingsRequest(newcomer=secrets.randbits(63) | 1 if server else 0)
    reply = await persist(
        lambda: channel.call("Coordinator.Settings", request, timeout=_CALL_S),
        channel,
        settings.cluster.join_timeout_s,
        settings.log.interval_s,
    )
    return cast(coordinator_pb2.SettingsResponse, reply).settings


def adopted(settings: Settings, theirs: Mapping[str, str]) -> dict[str, str]:
    """The settings to take over, which are not set here. Raises ConfigError where both sides have other values."""
    values, origins = settings.values(), settings.origins()
    taken: dict[str, str] = {}
    differing = []
    for key in SHARED:
        if key not in theirs:
            continue
        if origins[key] == "default" or (key in _RATES and settings.training.lr_scaling == "auto"):
            taken[key] = theirs[key]
        elif key not in _CHANGING and str(values[key]) != theirs[key]:
            differing.append(f"{key} is {values[key]} here ({origins[key]}), the job has {theirs[key]}")
    if differing:
        raise errors.ConfigError("; ".join(differing) + ": use one setting, or leave it to the coordinator")
    return taken


def consistency_of(mode: str, staleness: int | str) -> Consistency:
    """The setting as the core knows it; staleness only counts in asynchronous mode."""
    if mode == "sync":
        return Consistency(Mode.SYNC)
    return Consistency(Mode.ASYNC, None if staleness == "unbounded" else int(staleness))
