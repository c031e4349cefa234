"""The journal says whether the store takes the record of the job."""

from __future__ import annotations

import asyncio

import pytest

from paramserver import errors
from paramserver.coordinator.leadership import journal as module
from paramserver.coordinator.leadership.journal import Journal
from paramserver.coordinator.promises import Promises
from paramserver.store.memory import MemoryStore
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
