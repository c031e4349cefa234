"""The end of a job that ran alone: digests, summary and weights file, if they are asked for."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramserver.alone.job import InProcessJob
from paramserver.config import Settings, shown
from paramserver.errors import JobFailedError, UnavailableError
from paramserver.membership.joining import versions
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
        return summarise(status, await job.coordinator.job.shards.stats(), result), result

    return job.background.run(go())


def finish_alone(context: Context, job: InProcessJob) -> None:
    """Write the files that the settings of [run] name. Raises JobFailedError if a promise is broken."""
    run = context.settings.run
    if (run.summary or run.save or run.report) and job.coordinator.job.registry.ready:
        summary, result = gather(job)
        if run.save:
            result.save(Path(run.save))
        if run.summary:
            write_summary(Path(run.summary), summary)
        if run.report:
            _write_report(Path(run.report), context.settings, job, summary)
    if broken := broken_sentences(job.coordinator.job.promises.broken):
        raise JobFailedError("; ".join(broken))


def _write_report(path: Path, settings: Settings, job: InProcessJob, summary: dict[str, Any]) -> None:
    from paramserver.report.data import Report
    from paramserver.report.keeper import Keeper
    from paramserver.report.outcome import finished
    from paramserver.report.secrets import secrets_of, without
    from paramserver.report.writing import write_report

    keeper, origins = Keeper(), settings.origins()

    async def ask() -> None:
        status = await job.coordinator.status(keeper.request(whole=True))
        for key, value in settings.values().items():
            status.history.settings.add(key=key, value=str(shown(key, value)), origin=origins[key])
        status.history.versions.update(versions())
        status.history.host = socket.gethostname()
        keeper.hear(status)
        with suppress(UnavailableError):  # the script has no data set
            keeper.hear_ledger(await job.coordinator.ledger(coordinator_pb2.AccountsRequest()))

    job.background.run(ask())
    how = finished(summary, 1 if summary["broken_promises"] else 0)
    found = keeper.report(Report(job=summary["job"], made_at_s=time.time(), outcome=how, summary=summary))
    write_report(path, without(found, secrets_of(settings)))
