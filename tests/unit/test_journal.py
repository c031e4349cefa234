"""The journal says whether the store takes the record of the job."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf import json_format

from paramserver import errors
from paramserver.coordinator.leadership import journal as module
from paramserver.coordinator.leadership.journal import Journal
from paramserver.coordinator.leadership.leader import Leadership
from paramserver.coordinator.promises import Promises
from paramserver.store.memory import MemoryStore
from paramserver.transport.security.fields import MAX_CLAIM, MAX_COUNT, MAX_TAKEN_OVER, taken_over
from paramserver.v1 import coordinator_pb2


class Full(MemoryStore):
    """Takes nothing until there is room."""

    room = False

    async def save(self, key: str, value: bytes, expected: int, term: int = 0) -> int:
        if not self.room:
            raise errors.StoreError("the store is full")
        return await super().save(key, value, expected, term)


async def _fills_up(promises: Promises) -> list[dict[str, str]]:
    """The troubles while the store is full, and when it has room again."""
    store = Full()
    journal = await Journal.open(store, "full")
    journal.told = promises.store_takes
    journal.record(coordinator_pb2.JobRecord(expected_servers=2), None)
    async with asyncio.timeout(10.0):
        while not promises.troubles:
            await asyncio.sleep(0.001)
        found = [dict(promises.troubles)]
        store.room = True
        while journal.behind or promises.troubles:
            await asyncio.sleep(0.001)
    await journal.close()
    return [*found, promises.troubles]


def test_a_store_that_does_not_take_the_record_is_a_trouble_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BACK_OFF_S", (0.01,))
    during, after = asyncio.run(_fills_up(Promises()))
    assert during == {
        "store": "the job's state is not in the store, so no other coordinator could take the job over now: "
        "the store is full"
    }
    assert after == {}


@pytest.mark.parametrize("field", ["term", "generation", "timeline", "placement"])
def test_a_record_to_which_no_job_can_have_counted_is_refused_in_one_sentence(field: str) -> None:
    record = coordinator_pb2.JobRecord()
    setattr(record.view, field, MAX_CLAIM)
    text = json_format.MessageToJson(record).encode()
    assert getattr(module.parse_record(text).view, field) == MAX_CLAIM
    setattr(record.view, field, 2**62)
    with pytest.raises(errors.StoreError, match=f"the number {2**62}, to which no job can have counted: choose"):
        module.parse_record(json_format.MessageToJson(record).encode())


def test_a_store_that_a_wrong_term_was_written_into_is_refused_in_one_sentence() -> None:
    """The lease is given back: the remedy works at once."""

    async def lead() -> None:
        store = MemoryStore()
        leadership = Leadership(store, "here", 60.0)
        try:
            with pytest.raises(errors.ConfigError, match=f"says that {2**62 + 1} coordinators have led this job"):
                await leadership.acquire(2**62)
        finally:
            await leadership.resign()
        assert await store.leader() is None

    asyncio.run(lead())


def test_only_terms_that_leave_room_are_taken_over_from_servers() -> None:
    """From there a coordinator counts on, and others have to believe its numbers."""
    assert taken_over(MAX_TAKEN_OVER) == MAX_TAKEN_OVER
    assert taken_over(MAX_TAKEN_OVER + 1) == 0
    assert MAX_TAKEN_OVER < MAX_CLAIM < MAX_COUNT
