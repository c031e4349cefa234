"""What the coordinator writes down in the store: the numbers that must never be used twice, and where the job stands.

Written in the background, the newest state only; a store that is slow or away for a while does not stop the job.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import structlog

from paramserver import errors
from paramserver.store.base import Store
from paramserver.v1 import types_pb2

if TYPE_CHECKING:
    from paramserver.coordinator.service import CoordinatorService

log = structlog.get_logger("paramserver.coordinator")

_KEY = "state"
_BACK_OFF_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Journal:
    """The job's record in the store. Open it with :meth:`open`, which fails at once if the store cannot be used."""

    def __init__(self, store: Store, name: str) -> None:
        self.store_name = name
        self.generation = 0
        self._store = store
        self._revision = 0
        self._pending: bytes | None = None
        self._wake = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._closing = False

    @classmethod
    async def open(cls, store: Store, name: str) -> Journal:
        """Read what an earlier run of this job left; its generation is never used again. Raises StoreError."""
        journal = cls(store, name)
        await store.ping()
        entry = await store.load(_KEY)
        if entry is not None:
            journal._revision = entry.revision
            journal.generation = _generation(entry.value)
        journal._writer = asyncio.create_task(journal._write())
        return journal

    @property
    def operations(self) -> int:
        """Store operations so far."""
        return self._store.operations

    def record(self, job: CoordinatorService) -> None:
        """Write the present state soon."""
        state = {
            "generation": job.members.generation,
            "timeline": job.timeline,
            "state": types_pb2.JobState.Name(job.state).removeprefix("JOB_STATE_").lower(),
            "reason": job.reason,
            "mode": job.consistency.mode.value,
            "staleness": job.consistency.staleness,
            "revision": job.consistency.revision,
            "seed": job.options.seed,
            "slices_per_step": job.slices_per_step,
            "layout": job.registry.digest,
        }
        text = json.dumps(state, sort_keys=True).encode()
        if text != self._pending:
            self._pending = text
            self._wake.set()

    async def _write(self) -> None:
        failures = 0
        written: bytes | None = None
        while True:
            await self._wake.wait()
            self._wake.clear()
            value = self._pending
            if value is not None and value != written:
                try:
                    self._revision = await self._store.save(_KEY, value, self._revision)
                    written, failures = value, 0
                except errors.StoreError as error:
                    pause = _BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)]
                    failures += 1
                    log.warning("the store does not take the job's state", error=str(error), retry_s=pause)
                    if self._closing:
                        return
                    await self._resync()
                    await asyncio.sleep(pause)
                    self._wake.set()
            if self._closing and self._pending == written:
                return

    async def _resync(self) -> None:
        try:
            entry = await self._store.load(_KEY)
        except errors.StoreError:
            return
        self._revision = entry.revision if entry is not None else 0

    async def close(self) -> None:
        """Write what is pending (waiting 2 s at most) and close the store."""
        self._closing = True
        self._wake.set()
        if self._writer is not None:
            await asyncio.wait([self._writer], timeout=2.0)
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        await self._store.close()


def _generation(value: bytes) -> int:
    try:
        generation = json.loads(value)["generation"]
    except (ValueError, KeyError, TypeError) as error:
        raise errors.StoreError(
            "the store holds a record of this job that paramserver did not write: use another job name"
        ) from error
    if not isinstance(generation, int) or generation < 0:
        raise errors.StoreError("the store holds a generation that is no number: use another job name")
    return generation
