"""Looks for a job to go on with: in the store, and at the servers if the store has lost it."""

from __future__ import annotations

import asyncio
import time

import structlog

from paramserver import errors
from paramserver.config import Settings
from paramserver.coordinator.endpoint import Endpoint, Knock
from paramserver.coordinator.leadership.cluster import Connect
from paramserver.coordinator.leadership.finding import find
from paramserver.coordinator.leadership.journal import Journal, recorded
from paramserver.coordinator.leadership.takeover import begun, unfinished
from paramserver.coordinator.service import CoordinatorService
from paramserver.store.base import Store, TransientStoreError
from paramserver.transport.security.fields import taken_over
from paramserver.v1 import coordinator_pb2
from paramserver.wire.bounds import MAX_MEMBERS

log = structlog.get_logger("paramserver.coordinator")

_SAY_S = 5.0
_LOOK_S = 0.2
_RETRY_S = 0.5
_ATTEMPTS = 5
# Servers that have lost their coordinator look for another one about once a second.
_KNOCK_S = 3.0
_SHOWN = 8


class Resuming:
    """The records of an earlier coordinator's job that this process finds. ``where`` names the store."""

    def __init__(self, endpoint: Endpoint, settings: Settings, connect: Connect, where: str) -> None:
        # The highest term that any process has heard of; the store may have forgotten it.
        self.floor = 0
        # Servers hold shards of a job that had not begun, and so cannot go on.
        self.forgets = False
        # Addresses of servers whose shards belong to another job.
        self._others: set[str] = set()
        self._endpoint, self._connect, self._where = endpoint, connect, where
        self._job, self._patience_s = endpoint.job, settings.cluster.join_timeout_s
        self._find_s = 2 * settings.cluster.lease_s
        self._has_checkpoints = bool(settings.checkpoint.place)

    async def wait(self, store: Store) -> None:
        """Return when there is a job to go on with. Raises ConfigError if it has ended, or nobody knows of one."""
        started = said = time.monotonic()
        while True:
            try:
                record, leader = await recorded(store), await store.leader()
            except TransientStoreError:
                return  # the bid for the lease waits for the store
            if leader is not None or unfinished(record) or self._holders():
                return
            if record is not None:
                raise errors.ConfigError(
                    f"there is nothing to resume: job {self._job!r} has ended ({record.view.reason}); leave --resume "
                    "out to begin another one"
                )
            now = time.monotonic()
            if now - started >= self._patience_s:
                checkpoint = "go on from its newest checkpoint with --continue, or " if self._has_checkpoints else ""
                raise errors.ConfigError(
                    f"there is nothing to resume: the store ({self._where}) knows no job {self._job!r}, and no server "
                    f"that holds a part of it has come within {self._patience_s:g} s (cluster.join_timeout_s); "
                    f"{checkpoint}leave --resume out to begin the job"
                )
            if now - said >= _SAY_S:
                said = now
                log.info(f"the store knows no job {self._job!r}; waiting for servers that hold a part of it")
            self._endpoint.doing = f"waits for servers that hold a part of job {self._job!r}, to go on with it"
            await asyncio.sleep(_LOOK_S)

    async def newest(self, journal: Journal) -> coordinator_pb2.JobRecord | None:
        """The record to go on from: of the store, or of the servers if they know a newer one.

        Raises UnavailableError if servers hold shards of the job, but do not answer.
        """
        for attempt in range(_ATTEMPTS):
            holders = self._holders()
            found = await find(self._connect, self._job, [knock.address for knock in holders], journal.found)
            self.floor = max([self.floor, taken_over(found.term), *(taken_over(knock.term) for knock in holders)])
            if found.newer_than(journal.found):
                log.warning(
                    "the store has lost the job, or an older state of it; it goes on from what the servers know",
                    timeline=found.record.view.timeline,
                    generation=found.record.view.generation,
                )
                journal.adopt(found.record, found.model)
                return journal.found
            silent = [k.address for k in holders if k.address not in found.answered and not _of_ended(journal.found, k)]
            if not silent or begun(journal.found):
                break
            if attempt == _ATTEMPTS - 1:
                raise errors.UnavailableError(
                    f"{', '.join(silent[:_SHOWN])} hold shards of job {self._job!r}, but cannot be reached from here: "
                    "check the network, then start this coordinator again"
                )
            await asyncio.sleep(_RETRY_S)
        if len(self._others) > MAX_MEMBERS:
            self._others.clear()
        self._others |= {knock.address for knock in holders} - found.ours
        self.forgets = any(knock.address in found.ours for knock in holders) and not begun(journal.found)
        return journal.found

    async def anybody(self, unused: bool) -> bool:
        """Whether servers that hold shards of the job come; waits for them as long as they may take.

        ``unused``: no job has had the place of the checkpoints before. Then this is most likely the job's first start,
        and the wait is only for servers that look for a coordinator already.
        """
        deadline = time.monotonic() + (min(_KNOCK_S, self._find_s) if unused else self._find_s)
        while not self._holders() and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
        return bool(self._holders())

    async def watch(self, service: CoordinatorService) -> None:
        """Until a new job has begun: end this leadership if a server comes that holds a shard of an earlier job."""
        while service.job.registry.model is None and not (service.job.forgets or service.job.over.done()):
            if self._holders():
                service.job.end("found")
            await asyncio.sleep(_LOOK_S)

    def _holders(self) -> list[Knock]:
        return [knock for knock in self._endpoint.holders() if knock.address not in self._others]

    def refuse(self) -> errors.ConfigError:
        """The refusal of a coordinator that was told neither to go on with the job nor to forget it."""
        where = ", ".join(sorted(knock.address for knock in self._holders())) or "some servers"
        return errors.ConfigError(
            f"job {self._job!r} has not ended: {where} hold shards of it, but the store ({self._where}) knows nothing "
            "of it; go on with it with --resume, forget it with --fresh, or choose another name with --job"
        )


def _of_ended(record: coordinator_pb2.JobRecord | None, knock: Knock) -> bool:
    """Whether a server holds a shard of the job of this record, which has ended: the server has not heard of it."""
    if record is None or unfinished(record):
        return False
    return knock.holds == record.layout and knock.term <= record.view.term
