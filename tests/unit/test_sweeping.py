"""When the files of a checkpoint that was given up are removed. Servers and their files are the test's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from paramserver.checkpoint import catalog
from paramserver.checkpoint.place import Place
from paramserver.coordinator.history import sweeping
from paramserver.coordinator.history.sweeping import Sweep
from paramserver.coordinator.options import JobOptions
from paramserver.coordinator.tasks import Tasks
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.v1 import shard_pb2

NAME = "step-00000000-t0"
WRITING = shard_pb2.StatsResponse(copies=[shard_pb2.CopyStatus(version=0)])
QUIET = shard_pb2.StatsResponse()


class Job:
    """A job whose servers answer, in order, what ``answers`` holds, and write a file before each answer."""

    def __init__(self, place: Path, answers: list[shard_pb2.StatsResponse]) -> None:
        self.options = JobOptions("test", 1, 1, Consistency(Mode.SYNC))
        self.timeline, self.term = 0, 1
        self.shards = self
        # Closed while answers are held back.
        self.open = asyncio.Event()
        self.open.set()
        self.answers = answers
        self._folder = place / NAME

    async def stats(self) -> list[shard_pb2.StatsResponse]:
        answer = self.answers.pop(0)
        self._folder.mkdir(exist_ok=True)
        (self._folder / "model-00001-of-00001.safetensors.tmp").touch()
        await self.open.wait()
        return [answer]

    async def ask(self, *_: Any) -> list[Any]:
        raise NotImplementedError

    def infos(self) -> list[Any]:
        raise NotImplementedError


def sweep_of(job: Job, place: Path) -> Sweep:
    return Sweep(job, Tasks(), Place(str(place)), None, lambda version: version == 0, asyncio.Lock())


def folders(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_files_stay_while_a_server_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "_LOOK_S", 0.0)

    async def story() -> None:
        job = Job(tmp_path, [WRITING, WRITING, QUIET])
        await sweep_of(job, tmp_path).finish(0)
        assert job.answers == [], "the sweep has ended while a server was writing"
        assert folders(tmp_path) == []

    asyncio.run(story())


def test_a_sweep_in_the_background_does_not_stand_for_another_one(tmp_path: Path) -> None:
    """A job whose first checkpoint fails ends when the files are gone.

    The background sweep has looked, and a server begins to write after that.
    """

    async def story() -> None:
        job = Job(tmp_path, [QUIET, QUIET])
        job.open.clear()
        sweep = sweep_of(job, tmp_path)
        sweep.begin(0)
        sweep.begin(0)
        ends = asyncio.create_task(sweep.finish(0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(job.answers) == 1, "the background sweep has asked the servers"
        assert not ends.done()
        job.open.set()
        await ends
        assert job.answers == [], "the caller's sweep did not look"
        assert folders(tmp_path) == []

    asyncio.run(story())


def test_a_version_that_was_not_given_up_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        removed: list[str] = []
        monkeypatch.setattr(catalog, "discard", lambda place, name: removed.append(name))
        await sweep_of(Job(tmp_path, []), tmp_path).finish(3)
        assert removed == []

    asyncio.run(story())
