"""Before a server becomes a member: does it see the place of the checkpoints that the coordinator sees?"""

from __future__ import annotations

import asyncio

import structlog

from paramserver import errors
from paramserver.checkpoint.place import Place
from paramserver.checkpoint.probe import Question
from paramserver.coordinator.leadership.cluster import Servers
from paramserver.coordinator.options import JobOptions
from paramserver.v1 import shard_pb2

log = structlog.get_logger("paramserver.coordinator")


async def probe_place(options: JobOptions, servers: Servers, address: str) -> None:
    """Have the server at ``address`` read there what this coordinator writes, and the other way round.

    Raises ConfigError that names the server and says why not; retryable errors if it does not answer.
    """
    kept = options.checkpoints
    if not kept.place or (kept.holding is not None and kept.holding.private):
        return
    place = Place(kept.place)
    question = Question(place)
    try:
        await asyncio.to_thread(question.__enter__)
        request = shard_pb2.ProbePlaceRequest(
            job=options.job, place=kept.place, question=question.name, answer=question.answer
        )
        await servers.ask(address, "Shard.ProbePlace", request, options.call_timeout_s)
        await asyncio.to_thread(question.check)
    except errors.CheckpointError as error:
        reason = (
            f"the server at {address} does not share the place of the checkpoints, {place}, with the coordinator: "
            f"{error}; it has to be one directory, or URL, that all of them can write to"
        )
        log.error("a server is refused", reason=reason)
        raise errors.ConfigError(reason) from error
    finally:
        await asyncio.to_thread(question.__exit__)
