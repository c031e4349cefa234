"""The result of a job, gathered from its servers: weights file and summary."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from paramserver.config import Run
from paramserver.results.collect import collect
from paramserver.results.summary import summarise, write_summary
from paramserver.results.verdict import look_at_checkpoint
from paramserver.transport.base import Channel
from paramserver.v1 import coordinator_pb2, shard_pb2

_CALL_S = 30.0


async def gather(
    status: coordinator_pb2.StatusResponse,
    connect: Callable[[str], Channel],
    run: Run,
    restarts: Mapping[str, int] | None = None,
    checkpoints: str = "",
) -> dict[str, Any]:
    """The summary; also writes the files that ``run`` asks for. ``status`` holds the model and all servers.

    ``restarts``: how often processes were started again, by name. ``checkpoints``: the user's directory, whose
    last checkpoint is looked at now; empty if there is none.

    Raises UnavailableError if a server is gone, UserError if a file cannot be written.
    """
    channels = [connect(shard.address) for shard in sorted(status.view.shards, key=lambda shard: shard.index)]
    try:
        result = await collect(channels, status.model, status.job, status.view.timeline)
        request = shard_pb2.StatsRequest(job=status.job)
        stats = [
            cast(shard_pb2.StatsResponse, await channel.call("Shard.Stats", request, timeout=_CALL_S))
            for channel in channels
        ]
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))
    summary = summarise(status, stats, result, restarts)
    if not checkpoints:
        summary["checkpoint"] = ""
    elif "checkpoint" not in status.broken_promises:
        problem = await asyncio.to_thread(look_at_checkpoint, checkpoints, summary["checkpoint"], result.version)
        summary["broken_promises"] += [problem] if problem else []
    if run.save:
        await asyncio.to_thread(result.save, Path(run.save))
    if run.summary:
        write_summary(Path(run.summary), summary)
    return summary
