"""A coordinator has the values that scripts log written down."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import structlog

from paramserver.config import Settings
from paramserver.coordinator.history.manifests import TRACKED_AS
from paramserver.coordinator.job import Job
from paramserver.membership.settings import shared
from paramserver.records.opening import open_records
from paramserver.records.trackers import RunFacts
from paramserver.records.writing import Writing

log = structlog.get_logger("paramserver.coordinator")


async def keep_records(job: Job, settings: Settings, resumed: bool) -> Writing | None:
    """Have logged values written where the settings say, going on with what an earlier coordinator has written.

    ``resumed``: the job goes on from a checkpoint, and trackers go on with the run of the first job. A file that misses
    values is a broken promise.
    """
    run, loop = settings.run, asyncio.get_running_loop()
    if not (run.records or run.trackers):
        return None

    def missed(sentence: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the job with it
            loop.call_soon_threadsafe(job.promises.broken.setdefault, "records", sentence)

    if run.records and job.registry.ready and not Path(run.records).exists():  # an earlier coordinator has made it
        missed(f"the file {run.records} does not have all logged values: it was deleted while the job wrote to it")
    try:
        tracked = (job.options.checkpoints.run or {}).get(TRACKED_AS, f"{job.options.job} {job.beginning:x}")
        name, key = tracked.split(" ")
        facts = RunFacts(name, key, shared(settings))
        writing, earlier = await asyncio.to_thread(
            open_records, run, job.options.job, job.beginning, resumed, facts, missed
        )
    except Exception as error:  # of a tracker, or of a file that cannot be read now: no reason to end a job
        log.warning("what is logged is not written from now on", reason=str(error))
        job.promises.broken.setdefault(
            "records", f"what ctx.log was given since a coordinator was started again is not in {run.records}: {error}"
        )
        return None
    if earlier is not None:
        job.records.go_on(earlier.history, earlier.steps if earlier.ours else ())
    job.records.sink = writing
    return writing
