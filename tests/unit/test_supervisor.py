"""What the launcher does when a process ends: made-up processes, a made-up coordinator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, cast

import pytest

from paramserver import errors
from paramserver.launcher.poll import Poll
from paramserver.launcher.seats import ChildFailedError
from paramserver.launcher.spawn import Spawner
from paramserver.launcher.supervisor import Supervisor
from paramserver.machine.valkey import EmbeddedStore
from paramserver.processes.process import Child
from paramserver.processes.restarts import Restarts
from paramserver.v1 import coordinator_pb2, types_pb2
from tests.support.unit.processes import Process

RUNNING = types_pb2.JOB_STATE_RUNNING


class World:
    """One server, two workers, their coordinator; ``said`` is what people were told."""

    def __init__(self, most: int = 3, hang_s: float = 1e9, durable: bool = True) -> None:
        self.started: list[Process] = []
        self.said: list[str] = []
        self.status = coordinator_pb2.StatusResponse(term=1)
        self.status.view.state = RUNNING
        # The main worker has come to the end of its script.
        self.status.view.main = 1
        self.answered_at = time.monotonic()
        self.silent = False
        # The version of the servers.
        self.version = 0
        # Servers that are no members.
        self.absent: set[int] = set()
        # Pids of workers that have ended, which the coordinator still takes for members.
        self.unnoticed: list[int] = []
        # How the first coordinators end before they listen.
        self.stillborn: list[int] = []
        self.supervisor = Supervisor(
            cast(Spawner, self), EmbeddedStore(), Restarts(most), self.said.append, hang_s, durable
        )

    # As Spawner does.

    async def coordinator(self) -> Child:
        if self.stillborn:
            raise ChildFailedError("the coordinator could not start", self.stillborn.pop(0))
        return self._start("coordinator", ())

    async def coordinator_again(self) -> Child:
        self.silent, self.answered_at = False, time.monotonic()
        return self._start("coordinator", ())

    async def server(self, index: int, replaces: Sequence[int] = ()) -> Child:
        return self._start(f"server-{index}", replaces)

    async def worker(self, index: int, replaces: Sequence[int] = ()) -> Child:
        return self._start(f"worker-{index}", replaces)

    def _start(self, name: str, replaces: Sequence[int]) -> Child:
        process = Process(name, replaces)
        self.started.append(process)
        return cast(Child, process)

    # As Poll does.

    async def ask(self, model: bool = False) -> coordinator_pb2.StatusResponse | None:
        if self.silent:
            return None
        del self.status.processes[:]
        for process in self.started:
            if process.name.startswith("server") and process.running and process.pid not in self.absent:
                self.status.processes.add(role="server", pid=process.pid, version=self.version)
        del self.status.view.workers[:]
        for pid in self.unnoticed:
            self.status.processes.add(role="worker", pid=pid, member=pid)
            self.status.view.workers.add(member=pid)
        self.answered_at = time.monotonic()
        self.supervisor.hear(self.status)
        return self.status

    def of(self, name: str) -> list[Process]:
        return [process for process in self.started if process.name == name]

    def run(self, story: Callable[[World], Awaitable[Any]]) -> int:
        """Let it happen; the exit code of the run."""

        async def go() -> int:
            supervisor = self.supervisor
            await supervisor.start_coordinator()
            await supervisor.start_server(0)
            for index in range(2):
                await supervisor.start_worker(index)
            watching = asyncio.create_task(supervisor.watch(cast(Poll, self)))
            telling = asyncio.create_task(cast(Any, story(self)))
            async with asyncio.timeout(10.0):
                await asyncio.wait({watching, telling}, return_when=asyncio.FIRST_EXCEPTION)
                await telling
                return await watching

        return asyncio.run(go())


async def until(ready: Callable[[], object]) -> None:
    while not ready():
        await asyncio.sleep(0.01)


async def all_well(world: World) -> None:
    world.status.finished = True
    for process in world.started:
        if process.name.startswith("worker") and process.running:
            process.end(0)


def test_all_end_well() -> None:
    world = World()
    assert world.run(all_well) == 0
    assert world.said == []
    assert world.supervisor.restarts.total == {}


async def asked_again(world: World) -> None:
    """The coordinator is asked twice more: the run is not over."""
    for _ in range(2):
        asked = world.answered_at
        await until(lambda asked=asked: world.answered_at > asked)  # type: ignore[misc]


def test_the_run_is_not_over_while_the_last_version_is_made_safe() -> None:
    async def story(world: World) -> None:
        world.status.closing = True
        await all_well(world)
        await asked_again(world)
        world.status.closing = False

    assert World().run(story) == 0


def test_the_run_is_not_over_while_the_end_of_a_worker_has_not_been_noticed() -> None:
    async def story(world: World) -> None:
        world.unnoticed = [world.of("worker-0")[0].pid]
        await all_well(world)
        await asked_again(world)
        world.unnoticed = []

    assert World().run(story) == 0


@pytest.mark.parametrize("lost", [True, False])
def test_work_that_nobody_can_do_again_is_not_begun_again(lost: bool) -> None:
    """The job went back after the scripts had ended; lost, if its slices are only numbers."""

    async def story(world: World) -> None:
        world.status.closing = True
        for index in range(2):
            world.of(f"worker-{index}")[0].end(0)
        await asked_again(world)
        world.status.view.timeline = 1
        if lost:
            world.status.broken_promises["undone"] = "lost"
        world.status.closing = False
        if not lost:
            await until(lambda: len(world.of("worker-0")) == 2)
            await all_well(world)

    world = World()
    assert world.run(story) == 0
    assert len(world.of("worker-0")) == (1 if lost else 2)


def test_a_killed_worker_is_replaced_by_one_with_its_rank() -> None:
    async def story(world: World) -> None:
        first = world.of("worker-1")[0]
        first.end(-9)
        await until(lambda: len(world.of("worker-1")) == 2)
        assert world.of("worker-1")[1].replaces == [first.pid]
        await all_well(world)

    world = World()
    assert world.run(story) == 0
    assert world.said == [
        "worker-1 was killed by signal 9; its slices go to the others",
        "worker-1 is started again (1 of at most 3 times in a row)",
    ]
    assert world.supervisor.restarts.total == {"worker-1": 1}


def test_scripts_that_go_on_when_the_job_is_done_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramserver.processes.silence._FIRST_S", 0.05)

    async def story(world: World) -> None:
        world.unnoticed = [world.of("worker-1")[0].pid]
        world.status.finished = True
        await world.ask()
        world.of("worker-1")[0].end(0)
        await until(lambda: world.said)
        world.unnoticed = []
        world.of("worker-0")[0].end(0)

    world = World()
    assert world.run(story) == 0
    (said,) = world.said
    assert said.startswith("the job is done, and the run has waited 0 s for worker-0 to end: the script goes on")


def test_a_run_whose_scripts_are_all_killed_says_why_it_ends() -> None:
    async def story(world: World) -> None:
        world.status.finished = True
        await world.ask()
        for index in range(2):
            world.of(f"worker-{index}")[0].end(-9)

    world = World()
    assert world.run(story) == 137
    assert world.said == [
        "worker-0 was killed by signal 9, when the job had nothing left for it to do",
        "worker-1 was killed by signal 9, when the job had nothing left for it to do",
        "no script has come to its end; the run ends",
    ]


def test_a_worker_that_dies_when_nothing_is_left_is_not_replaced() -> None:
    async def story(world: World) -> None:
        world.status.finished = True
        world.of("worker-0")[0].end(0)
        world.of("worker-1")[0].end(-9)

    world = World()
    assert world.run(story) == 0
    assert len(world.of("worker-1")) == 1


async def the_main_worker_is_killed_last(world: World) -> None:
    world.status.view.main = 0
    world.status.finished = True
    world.of("worker-1")[0].end(0)
    world.of("worker-0")[0].end(-9)
    if world.supervisor.restarts.most:
        await until(lambda: len(world.of("worker-0")) == 2)
        world.status.view.main = 1
        world.of("worker-0")[1].end(0)


def test_the_main_worker_is_replaced_if_it_dies_after_training() -> None:
    """Nobody else is there that could do what the main worker was to do at the end of its script."""
    world = World()
    assert world.run(the_main_worker_is_killed_last) == 0
    assert world.said == [
        "worker-0 was killed by signal 9, when the job had nothing left for it to do",
        "the main worker was killed before its script had come to its end (worker-0)",
        "worker-0 is started again (1 of at most 3 times in a row)",
    ]


def test_without_replacement_a_main_worker_that_dies_after_training_fails_the_run() -> None:
    world = World(most=0)
    assert world.run(the_main_worker_is_killed_last) == 137
    assert len(world.of("worker-0")) == 1


@pytest.mark.parametrize("code", [143, -15])
def test_a_worker_that_was_told_to_leave_is_not_replaced(code: int) -> None:
    async def story(world: World) -> None:
        world.of("worker-0")[0].end(code)
        await until(lambda: world.said)
        await all_well(world)

    world = World()
    assert world.run(story) == 0
    assert world.said == ["worker-0 was told to leave; its slices go to the others"]


def test_all_workers_were_told_to_leave() -> None:
    async def story(world: World) -> None:
        for index in range(2):
            world.of(f"worker-{index}")[0].end(143)

    assert World().run(story) == 143


def test_a_script_that_fails_ends_the_run() -> None:
    async def story(world: World) -> None:
        world.of("worker-1")[0].end(7)

    world = World()
    assert world.run(story) == 7
    assert world.said == ["worker-1 failed with exit code 7; the run ends"]


def test_the_coordinators_reason_comes_before_an_exit_code() -> None:
    async def story(world: World) -> None:
        world.status.view.state, world.status.view.reason = types_pb2.JOB_STATE_FAILED, "the cat"
        world.of("worker-1")[0].end(1)

    with pytest.raises(errors.JobFailedError, match=r"^the job has failed: the cat$"):
        World().run(story)


@pytest.mark.parametrize("code", [-9, 1])
def test_a_server_is_started_again(code: int) -> None:
    async def story(world: World) -> None:
        first = world.of("server-0")[0]
        first.end(code)
        await until(lambda: len(world.of("server-0")) == 2)
        assert world.of("server-0")[1].replaces == [first.pid]
        await all_well(world)

    world = World()
    assert world.run(story) == 0
    how = "signal 9" if code < 0 else f"exit code {code}"
    assert world.said == [
        f"server-0 ended unexpectedly ({how})",
        "server-0 is started again (1 of at most 3 times in a row)",
    ]


@pytest.mark.parametrize("code", [0, errors.RestartError.exit_code])
def test_a_server_that_was_asked_to_leave_is_started_again(code: int) -> None:
    """As often as that is asked, since it is no failure."""

    def started(world: World, times: int) -> bool:
        return len(world.of("server-0")) == times

    async def story(world: World) -> None:
        for count in range(1, 6):
            world.of("server-0")[-1].end(code)
            await until(partial(started, world, count + 1))
        await all_well(world)

    world = World()
    assert world.run(story) == 0
    assert world.said == ["server-0 has left, and is started again"] * 5


@pytest.mark.parametrize("code", [2, 4])
def test_a_mistake_would_only_be_made_again(code: int) -> None:
    async def story(world: World) -> None:
        world.of("server-0")[0].end(code)

    with pytest.raises(ChildFailedError, match=rf"^server-0 ended with exit code {code}; it says why above$") as caught:
        World().run(story)
    assert caught.value.exit_code == code


def test_too_often() -> None:
    async def story(world: World) -> None:
        for count in range(1, 4):
            await until(lambda count=count: len(world.of("server-0")) == count)  # type: ignore[misc]
            world.of("server-0")[-1].end(-11)

    with pytest.raises(ChildFailedError) as caught:
        World(most=2).run(story)
    assert str(caught.value) == (
        "server-0 has ended 3 times in a row, the last time with signal 11, and the job got no further in between; "
        "cluster.max_restarts is 2"
    )
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("name", ["server-0", "coordinator"])
def test_never_again(name: str) -> None:
    async def story(world: World) -> None:
        world.of(name)[0].end(-9)

    with pytest.raises(ChildFailedError, match=rf"^{name} ended unexpectedly \(signal 9\); the run cannot go on$"):
        World(most=0).run(story)


def test_without_replacement_the_last_killed_worker_ends_the_run() -> None:
    async def story(world: World) -> None:
        for index in range(2):
            world.of(f"worker-{index}")[0].end(-9)

    assert World(most=0).run(story) == 137


def test_a_coordinator_that_hangs_is_killed_and_started_again() -> None:
    async def story(world: World) -> None:
        await world.ask()
        world.silent = True
        await until(lambda: len(world.of("coordinator")) == 2)
        await all_well(world)

    world = World(hang_s=0.3)
    assert world.run(story) == 0
    assert world.said[0].startswith("coordinator has not answered for ")
    assert world.said[1:] == [
        "coordinator ended unexpectedly (signal 9)",
        "coordinator is started again (1 of at most 3 times in a row)",
    ]


def test_a_coordinator_that_is_killed_before_it_listens_is_started_again() -> None:
    world = World()
    world.stillborn = [-9, -9]
    assert world.run(all_well) == 0
    assert world.said == ["coordinator ended unexpectedly (signal 9) and is started again"] * 2


@pytest.mark.parametrize(("codes", "most"), [([3], 3), ([-9], 0), ([-9, -9, -9], 2)])
def test_a_coordinator_that_cannot_start_ends_the_run(codes: list[int], most: int) -> None:
    world = World(most=most)
    world.stillborn = list(codes)
    with pytest.raises(ChildFailedError) as caught:
        world.run(all_well)
    assert caught.value.exit_code == max(1, codes[-1])


def test_nothing_is_left_of_a_coordinator_with_its_store_in_memory() -> None:
    async def story(world: World) -> None:
        world.of("coordinator")[0].end(-9)

    with pytest.raises(ChildFailedError, match=r"and cluster\.store = memory with it; the run cannot go on$"):
        World(durable=False).run(story)


def test_workers_come_back_if_the_job_goes_back_after_them() -> None:
    async def story(world: World) -> None:
        world.status.finished = True
        await world.ask()
        world.of("server-0")[0].end(-9)  # and with it what the workers have done
        world.silent = True
        for index in range(2):
            world.of(f"worker-{index}")[0].end(0)
        await until(lambda: len(world.of("server-0")) == 2)
        world.status.finished, world.status.view.timeline = False, 1
        world.silent = False
        await until(lambda: len(world.of("worker-1")) == 2)
        await all_well(world)

    world = World()
    assert world.run(story) == 0
    assert "the job has gone back after the workers had ended; they are started again" in world.said
    assert world.supervisor.restarts.total == {"server-0": 1, "worker-0": 1, "worker-1": 1}


def test_workers_that_stopped_early_stay_away() -> None:
    async def story(world: World) -> None:
        await world.ask()
        for index in range(2):
            world.of(f"worker-{index}")[0].end(0)

    world = World()
    assert world.run(story) == 0
    assert len(world.of("worker-0")) == 1


# ---- more and fewer workers


def test_as_many_workers_as_wished_for() -> None:
    async def story(world: World) -> None:
        world.status.wanted_workers = 4
        await world.ask()
        await until(lambda: world.of("worker-3"))
        world.status.wanted_workers = 1
        await world.ask()
        await until(lambda: not any(world.of(f"worker-{rank}")[0].running for rank in (1, 2, 3)))
        assert world.of("worker-0")[0].running
        world.status.wanted_workers = 2
        await world.ask()
        await until(lambda: len(world.of("worker-1")) == 2)
        await all_well(world)

    world = World()
    assert world.run(story) == 0
    assert world.said == [
        "4 workers are wished for, 2 are there",
        "1 workers are wished for, 4 are there",
        "worker-1 was told to leave; its slices go to the others",
        "worker-2 was told to leave; its slices go to the others",
        "worker-3 was told to leave; its slices go to the others",
        "2 workers are wished for, 1 are there",
    ]


def test_as_many_servers_as_wished_for() -> None:
    async def story(world: World) -> None:
        world.status.wanted_servers = 3
        await world.ask()
        await until(lambda: world.of("server-2"))
        world.status.wanted_servers = 2
        await world.ask()
        await until(lambda: not world.of("server-2")[0].running)
        assert world.of("server-1")[0].running
        world.of("server-1")[0].end(-9)
        await until(lambda: len(world.of("server-1")) == 2)
        await all_well(world)

    world = World()
    assert world.run(story) == 0
    assert world.said[:2] == ["3 servers are wished for, 1 are there", "2 servers are wished for, 3 are there"]
    assert len(world.of("server-2")) == 1


def test_a_server_that_leaves_before_the_launcher_knows_that_it_may_is_not_started_again() -> None:
    async def story(world: World) -> None:
        world.status.wanted_servers = 2
        await world.ask()
        await until(lambda: world.of("server-1"))
        world.status.wanted_servers = 1
        world.of("server-1")[0].end(0)
        await until(lambda: "1 servers are wished for, 2 are there" in world.said)
        await all_well(world)

    world = World()
    assert world.run(story) == 0
    assert len(world.of("server-1")) == 1
    assert world.supervisor.restarts.total == {}


def test_who_waits_to_be_started_again_is_not_if_nobody_wishes_for_it() -> None:
    async def story(world: World) -> None:
        for count in (1, 2):
            await until(lambda count=count: len(world.of("worker-1")) == count)  # type: ignore[misc]
            world.of("worker-1")[-1].end(-9)
        await until(lambda: world.said[-1].startswith("worker-1 is started again in 0.5 s"))
        world.status.wanted_workers = 1
        await world.ask()
        await until(lambda: world.said[-1] == "1 workers are wished for, 2 are there")
        await all_well(world)

    world = World()
    assert world.run(story) == 0
    assert len(world.of("worker-1")) == 2


def test_a_server_that_runs_but_is_no_member_is_killed_and_started_again() -> None:
    async def story(world: World) -> None:
        first = world.of("server-0")[0]
        for _ in range(20):  # the supervisor has seen it
            await world.ask()
            await asyncio.sleep(0.02)
        world.absent = {first.pid}
        while len(world.of("server-0")) == 1:
            await world.ask()
            await asyncio.sleep(0.02)
        await all_well(world)

    world = World(hang_s=0.4)
    assert world.run(story) == 0
    assert world.said == [
        "server-0 runs, but the coordinator has given it up for lost; it is killed",
        "server-0 ended unexpectedly (signal 9)",
        "server-0 is started again (1 of at most 3 times in a row)",
    ]


def test_a_server_that_has_not_come_yet_has_time() -> None:
    async def story(world: World) -> None:
        world.absent = {process.pid for process in world.of("server-0")}
        for _ in range(20):
            await world.ask()
            await asyncio.sleep(0.02)
        world.absent = set()
        await all_well(world)

    world = World(hang_s=0.2)
    assert world.run(story) == 0
    assert world.said == []


async def ends_again_and_again(world: World, name: str, code: int, times: int) -> None:
    """The process ends so often, and is started again each time."""
    for _ in range(times):
        count = len(world.of(name))
        world.of(name)[-1].end(code)
        await until(lambda: len(world.of(name)) > count)  # noqa: B023


@pytest.mark.parametrize("code", [1, 2])
def test_a_server_whose_shards_others_hold_never_ends_the_run(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Not its exit code, and not the number of attempts."""
    monkeypatch.setattr("paramserver.processes.restarts._SECOND_S", 0.01)

    async def story(world: World) -> None:
        world.status.view.shards.add()
        world.status.view.shard_count = 1
        await ends_again_and_again(world, "server-0", code, 5)
        await all_well(world)

    world = World()
    assert world.run(story) == 0
    assert world.said[-1].endswith("(5 times in a row; the job goes on without it)")


@pytest.mark.parametrize("code", [1, 2, 3])
def test_a_worker_that_cannot_come_back_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Another worker trains. At the end nobody waits for the next attempt."""
    monkeypatch.setattr("paramserver.processes.restarts._SECOND_S", 0.01)

    async def story(world: World) -> None:
        world.unnoticed = [world.of(f"worker-{index}")[0].pid for index in range(2)]
        await world.ask()
        await ends_again_and_again(world, "worker-1", -9, 1)
        await ends_again_and_again(world, "worker-1", code, 5)
        world.unnoticed = []
        world.of("worker-1")[-1].end(code)
        world.status.finished = True
        world.of("worker-0")[0].end(0)

    world = World()
    assert world.run(story) == 0
    assert f"worker-1 could not join again (exit code {code}); its slices go to the others" in world.said


def test_a_worker_that_cannot_come_back_is_tried_more_and_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the job gets on, which makes other failures be forgotten."""
    monkeypatch.setattr("paramserver.processes.restarts._SECOND_S", 0.01)

    async def story(world: World) -> None:
        world.unnoticed = [world.of(f"worker-{index}")[0].pid for index in range(2)]
        await world.ask()
        await ends_again_and_again(world, "worker-1", -9, 1)
        for version in range(1, 4):
            await ends_again_and_again(world, "worker-1", 2, 1)
            world.version = version
            await world.ask()
        world.unnoticed = []
        await all_well(world)

    world = World()
    assert world.run(story) == 0
    waits = [line for line in world.said if line.startswith("worker-1 is started again in ")]
    assert [line.partition(" in ")[2].partition(" s ")[0] for line in waits] == ["0.01", "0.01", "0.02"]


def test_a_worker_that_has_come_back_and_fails_ends_the_run() -> None:
    async def story(world: World) -> None:
        world.unnoticed = [world.of(f"worker-{index}")[0].pid for index in range(2)]
        await world.ask()
        world.of("worker-1")[0].end(-9)
        await until(lambda: len(world.of("worker-1")) == 2)
        world.unnoticed.append(world.of("worker-1")[1].pid)
        await world.ask()
        world.of("worker-1")[1].end(7)

    assert World().run(story) == 7


def test_a_server_that_nobody_can_replace_is_tried_again_before_its_exit_code_counts() -> None:
    """Its certificate may be renewed just now."""

    async def story(world: World) -> None:
        await ends_again_and_again(world, "server-0", -9, 1)
        await ends_again_and_again(world, "server-0", 2, 2)
        world.of("server-0")[-1].end(2)

    with pytest.raises(ChildFailedError, match="has ended 4 times in a row, the last time with exit code 2"):
        World().run(story)
