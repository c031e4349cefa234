"""The result of a job, gathered from its servers: weights file and summary."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from paramserver import errors
from paramserver.config import Run
from paramserver.results.collect import Result, collect
from paramserver.results.summary import summarise, write_summary
from paramserver.results.verdict import look_at_checkpoint
from paramserver.transport.base import Channel
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2

_CALL_S = 30.0
_LOOK_S = 0.5


class MovedError(errors.UnavailableError):
    """Shards have moved to other servers while the result was gathered: gather it again, with another status."""


async def gather(
    status: coordinator_pb2.StatusResponse,
    connect: Callable[[str], Channel],
    look: Callable[[], Awaitable[types_pb2.View]],
    run: Run,
    restarts: Mapping[str, int] | None = None,
    checkpoints: str = "",
) -> dict[str, Any]:
    """The summary; also writes the files that ``run`` asks for. ``status`` holds the model and all servers.

    ``look`` gives the present view of the job, which says where the shards are. ``restarts``: how often processes were
    started again, by name. ``checkpoints``: the user's directory, whose last checkpoint is looked at now; empty if
    there is none.

    Raises MovedError, UnavailableError if a server is gone, UserError if a file cannot be written.
    """
    gathering = asyncio.ensure_future(_gathered(status, connect))
    try:
        while not (await asyncio.wait([gathering], timeout=_LOOK_S))[0]:
            view = status.view
            with suppress(errors.UnavailableError):  # another coordinator may come
                view = await look()
            if (view.timeline, view.placement) != (status.view.timeline, status.view.placement):
                raise MovedError("shards have moved to other servers while the result was gathered")
    finally:
        gathering.cancel()
        await asyncio.wait([gathering], timeout=_CALL_S)
    result, stats = gathering.result()
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


async def _gathered(
    status: coordinator_pb2.StatusResponse, connect: Callable[[str], Channel]
) -> tuple[Result, list[shard_pb2.StatsResponse]]:
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
    if any(one.backup or not one.active for one in stats):  # this server no longer has the counters of the shard
        raise MovedError("a shard has moved to another server while the result was gathered")
    return result, stats
