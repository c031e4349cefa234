"""The coordinator's record in the store: the numbers that must never be used twice, and the state of the job.

Only the newest state is written, in the background: a store that is slow or away for a while does not stop the job. If
the store comes back empty, or with an older state, the record is written again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress

import structlog
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from paramserver import errors
from paramserver.store.base import ConflictError, Store
from paramserver.transport.security.fields import MAX_CLAIM
from paramserver.v1 import coordinator_pb2, types_pb2

log = structlog.get_logger("paramserver.coordinator")

_STATE = "state"
_MODEL = "model"
_BACK_OFF_S = (0.2, 0.5, 1.0)
_CLOSE_S = 2.0
_LOOK_S = 0.01


class Journal:
    """The job's record in the store. The store refuses writes of a lower ``term``; 0: there is no other coordinator."""

    def __init__(self, store: Store, name: str, term: int = 0) -> None:
        # Whether closing the journal closes the store.
        self.owns_store = True
        self.store_name = name
        self.term = term
        # Called with the reason for which the store does not take the record, and with "" when it does again.
        self.told: Callable[[str], None] = lambda error: None
        # The record that an earlier coordinator of this job has left.
        self.found: coordinator_pb2.JobRecord | None = None
        # Set when the store knows a higher term.
        self.fenced = asyncio.Event()
        self._store = store
        self._revisions: dict[str, int] = {}
        self._wanted: dict[str, bytes] = {}
        self._written: dict[str, bytes] = {}
        # The model that is to be in the store.
        self._model: types_pb2.ModelSpec | None = None
        # The newest record, and its content without the edition.
        self.record_now = coordinator_pb2.JobRecord()
        self._content = b""
        self._wake = asyncio.Event()
        # Set by each write that the store has taken.
        self._saved = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._closing = False

    @classmethod
    async def open(cls, store: Store, name: str, term: int = 0) -> Journal:
        """Read the record of an earlier run of this job; its generation is never used again. Raises StoreError."""
        journal = cls(store, name, term)
        await store.ping()
        entry = await store.load(_STATE)
        if entry is not None:
            journal._revisions[_STATE] = entry.revision
            journal.found = parse_record(entry.value)
        journal._writer = asyncio.create_task(journal._write())
        return journal

    @property
    def generation(self) -> int:
        """The newest generation that an earlier coordinator has used."""
        return self.found.view.generation if self.found is not None else 0

    @property
    def operations(self) -> int:
        """Store operations so far."""
        return self._store.operations

    async def model(self) -> types_pb2.ModelSpec | None:
        """The model that an earlier coordinator of this job wrote down. Raises StoreError."""
        entry = await self._store.load(_MODEL)
        if entry is not None:
            self._revisions[_MODEL] = entry.revision
        if self._model is not None:  # servers have said which it is
            self._want(_MODEL, self._model.SerializeToString())
            return self._model
        if entry is None:
            return None
        self._wanted[_MODEL] = self._written[_MODEL] = entry.value
        try:
            self._model = types_pb2.ModelSpec.FromString(entry.value)
            return self._model
        except DecodeError as error:
            raise errors.StoreError(
                "the store holds a model that paramserver did not write: use another job name"
            ) from error

    def adopt(self, record: coordinator_pb2.JobRecord, model: types_pb2.ModelSpec) -> None:
        """Go on from the record that servers have kept: it is newer than the record in the store."""
        self.found, self._model = record, model

    def record(self, record: coordinator_pb2.JobRecord, model: types_pb2.ModelSpec | None) -> bool:
        """Write this record soon if it differs from the last one; True if it does. ``model`` None: no longer needed."""
        content = record.SerializeToString(deterministic=True)
        changed = content != self._content
        if changed:
            record.edition = self.record_now.edition + 1
            self.record_now, self._content = record, content
            self._want(_STATE, record.SerializeToString(deterministic=True))
        if model is not None and model is not self._model:
            self._model = model
            self._want(_MODEL, model.SerializeToString())
        return changed

    def _want(self, key: str, value: bytes) -> None:
        if self._wanted.get(key) != value:
            self._wanted[key] = value
            self._wake.set()

    async def verify(self) -> None:
        """Write again all that the store has lost since it was written. Raises StoreError."""
        if self._pending():
            return
        for key, revision in list(self._revisions.items()):
            entry = await self._store.load(key)
            found = entry.revision if entry is not None else 0
            if found != revision and not self._pending():
                log.warning("the store has lost what was written; it is written again", key=key)
                self._revisions[key] = found
                self._written.pop(key, None)
                self._wake.set()

    def _pending(self) -> list[str]:
        return [key for key, value in self._wanted.items() if self._written.get(key) != value]

    async def _write(self) -> None:
        failures = 0
        while True:
            await self._wake.wait()
            self._wake.clear()
            for key in sorted(self._pending()):  # the model before the state that speaks of it
                value = self._wanted[key]
                try:
                    stored = await asyncio.to_thread(_json, value) if key == _STATE else value
                    self._revisions[key] = await self._store.save(key, stored, self._revisions.get(key, 0), self.term)
                    self._written[key] = value
                    self._saved.set()
                    if failures:
                        self.told("")
                    failures = 0
                except errors.FencedError as error:
                    log.warning("the store is another coordinator's now", error=str(error))
                    self.fenced.set()
                    return
                except errors.StoreError as error:
                    await self._wait_and_look(key, error, failures)
                    failures += 1
                    self._wake.set()
            if self._closing and not self._pending():
                return

    async def _wait_and_look(self, key: str, error: errors.StoreError, failures: int) -> None:
        """After a write that failed: wait a little, and read the revision of the entry."""
        pause = _BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)] * random.uniform(0.7, 1.3)
        if not isinstance(error, ConflictError):
            if failures == 0:
                log.warning("the store does not take the job's state", error=str(error))
            self.told(str(error))
            await asyncio.sleep(pause)
        try:
            entry = await self._store.load(key)
        except errors.StoreError:
            return
        self._revisions[key] = entry.revision if entry is not None else 0

    @property
    def behind(self) -> bool:
        """Whether the store lacks the last record."""
        return bool(self._pending())

    async def settled(self) -> None:
        """Wait until the store has the last record; 2 s at most, since the store may be away."""
        deadline = time.monotonic() + _CLOSE_S
        while self._pending() and not self.fenced.is_set() and time.monotonic() < deadline:
            self._saved.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._saved.wait()

    async def forget_model(self) -> None:
        """Delete the model from the store: the job has ended, and no coordinator will take it over."""
        await self.settled()  # the record, which says that the job has ended, comes first
        self._wanted.pop(_MODEL, None)
        self._written.pop(_MODEL, None)
        self._revisions.pop(_MODEL, None)
        said = f"no answer within {_CLOSE_S:g} s"
        try:
            async with asyncio.timeout(_CLOSE_S):
                while True:
                    try:
                        await self._store.delete(_MODEL, self.term)
                        return
                    except errors.StoreError as error:
                        said = str(error)
                    await asyncio.sleep(_BACK_OFF_S[0])
        except errors.FencedError as error:
            log.debug("the job is another coordinator's now", error=str(error))
        except TimeoutError:
            log.warning("the store keeps the model of this job, which nobody needs any more", error=said)

    async def close(self) -> None:
        """Write all that is pending (for 2 s at most), and close the store."""
        self._closing = True
        self._wake.set()
        if self._writer is not None:
            await asyncio.wait([self._writer], timeout=_CLOSE_S)
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        if self.owns_store:
            await self._store.close()


def _json(record: bytes) -> bytes:
    """A record as the store has it. A long record takes a second, so this is done in a thread."""
    message = coordinator_pb2.JobRecord.FromString(record)
    return json_format.MessageToJson(message, indent=None, preserving_proto_field_name=True).encode()


async def recorded(store: Store) -> coordinator_pb2.JobRecord | None:
    """The job's record; None: there is none. Raises StoreError."""
    entry = await store.load(_STATE)
    return parse_record(entry.value) if entry is not None else None


async def recorded_term(store: Store) -> int:
    """The term of the coordinator that has written the job's record; 0: there is no record. Raises StoreError."""
    record = await recorded(store)
    return record.view.term if record is not None else 0


def parse_record(value: bytes) -> coordinator_pb2.JobRecord:
    """The record that an entry of the store holds. Raises StoreError if paramserver has not written the entry."""
    try:
        record = json_format.Parse(value, coordinator_pb2.JobRecord(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise errors.StoreError(
            "the store holds a record of this job that paramserver did not write: use another job name"
        ) from error
    highest = max(record.view.term, record.view.generation, record.view.timeline, record.view.placement)
    if highest > MAX_CLAIM:
        raise errors.StoreError(
            f"the store holds a record of this job with the number {highest}, to which no job can have counted: choose "
            "another name with --job, or delete the keys of this job in the store"
        )
    return record
