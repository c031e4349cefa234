"""The end of a job that ran alone: digests, summary and weights file, if they are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramserver.alone.job import InProcessJob
from paramserver.errors import JobFailedError
from paramserver.results.collect import Result, collect
from paramserver.results.summary import summarise, write_summary
from paramserver.results.verdict import broken_sentences
from paramserver.v1 import coordinator_pb2

if TYPE_CHECKING:
    from paramserver.worker.context import Context


def gather(job: InProcessJob) -> tuple[dict[str, Any], Result]:
    """The summary and the final state of a job in this process."""

    async def go() -> tuple[dict[str, Any], Result]:
        status = await job.coordinator.status(coordinator_pb2.StatusRequest(model=True))
        channels = [job.network.connect(shard.address) for shard in status.view.shards]
        try:
            result = await collect(channels, status.model, status.job, status.view.timeline)
        finally:
            for channel in channels:
                await channel.close()
        return summarise(status, await job.coordinator.job.shard_stats(), result), result

    return job.background.run(go())


def finish_alone(context: Context, job: InProcessJob) -> None:
    """Write what ``run.summary`` and ``run.save`` ask for. Raises JobFailedError if a promise is broken."""
    run = context.settings.run
    if (run.summary or run.save) and job.coordinator.job.registry.ready:
        summary, result = gather(job)
        if run.save:
            result.save(Path(run.save))
        if run.summary:
            write_summary(Path(run.summary), summary)
    if broken := broken_sentences(job.coordinator.job.promises.broken):
        raise JobFailedError("; ".join(broken))
