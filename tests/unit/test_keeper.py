"""What one `paramserver start` command does when one of its processes ends: both are made up, and the coordinator."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from paramserver import errors
from paramserver.config import load_settings
from paramserver.launcher.keeper import Keeper, Part, keep, server_parts, worker_parts
from paramserver.launcher.seats import ChildFailedError, Seats
from paramserver.processes.environment import JOB_FAILED_CODE
from paramserver.processes.process import Child
from paramserver.processes.restarts import Restarts
from paramserver.v1 import coordinator_pb2, types_pb2
from tests.support.unit.processes import Process

SERVER, WORKER = Part("server", ("server",)), Part("worker", ("worker", "--", "train.py"))
KILLED = 137


class World:
    """One command. ``silent``: no coordinator answers. ``deaf``: its processes do not hear signals."""

    def __init__(self, *parts: Part, most: int = 3, restart: bool = True, deaf: bool = False) -> None:
        self.started: list[Process] = []
        self.said: list[str] = []
        self.status = coordinator_pb2.StatusResponse(term=1)
        self.status.view.state = types_pb2.JOB_STATE_RUNNING
        self.silent = False
        self.asked: Callable[[], None] = lambda: None
        self._deaf = deaf
        self.keeper = Keeper(parts, Seats(Restarts(most), self.said.append, 0.3), restart)

    async def start(self, part: Part, replaces: Sequence[int]) -> Child:
        process = Process(part.name, replaces, self._deaf)
        self.started.append(process)
        return cast(Child, process)

    async def ask(self) -> coordinator_pb2.StatusResponse | None:
        self.asked()
        if self.silent:
            return None
        self.keeper.hear(self.status)
        return self.status

    def of(self, part: Part) -> list[Process]:
        return [process for process in self.started if process.name == part.name]

    async def next(self, part: Part, number: int) -> Process:
        """The process of this number in the seat, when it has been started."""
        while len(self.of(part)) < number:
            await asyncio.sleep(0.01)
        return self.of(part)[number - 1]

    def run(self, story: Callable[[World], Awaitable[Any]]) -> int:
        """Let it happen; the exit code of the command."""

        async def go() -> int:
            running = asyncio.create_task(self.keeper.run(self.start, self.ask))
            telling = asyncio.create_task(cast(Any, story(self)))
            async with asyncio.timeout(10.0):
                await asyncio.wait({running, telling}, return_when=asyncio.FIRST_EXCEPTION)
                await telling
                return await running

        return asyncio.run(go())


def ends(*codes: int, part: Part = SERVER) -> Callable[[World], Awaitable[Any]]:
    """One process after the other of this part ends with these codes."""

    async def story(world: World) -> None:
        for number, code in enumerate(codes, 1):
            (await world.next(part, number)).end(code)

    return story


@pytest.mark.parametrize("part", [SERVER, WORKER], ids=["server", "worker"])
def test_a_killed_process_is_started_again_and_says_whom_it_replaces(part: Part) -> None:
    world = World(part)
    assert world.run(ends(-9, -11, 0, part=part)) == 0
    first, second, third = world.started
    assert (first.replaces, second.replaces) == ([], [first.pid])
    assert third.replaces == [first.pid, second.pid], "the second one may have died before it had joined"
    assert world.said == [
        f"{part.name} ended unexpectedly (signal 9)",
        f"{part.name} is started again (1 of at most 3 times in a row)",
        f"{part.name} ended unexpectedly (signal 11)",
        f"{part.name} is started again in 0.5 s (2 of at most 3 times in a row)",
    ]


@pytest.mark.parametrize("code", [0, 2, 4, 130, 143])
def test_the_end_of_a_job_a_mistake_and_a_request_to_end_are_final(code: int) -> None:
    for part in (SERVER, WORKER):
        world = World(part)
        assert world.run(ends(code, part=part)) == code
        assert len(world.started) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_asks_a_process_to_end_is_final(number: int) -> None:
    world = World(WORKER)
    assert world.run(ends(-number, part=WORKER)) == 128 + number
    assert len(world.started) == 1


def test_a_script_that_fails_is_not_started_again_and_a_server_that_crashes_is() -> None:
    assert World(WORKER).run(ends(7, part=WORKER)) == 7
    world = World(SERVER)
    assert world.run(ends(1, 3, 0)) == 0
    assert len(world.started) == 3


def test_without_restart_the_first_end_is_final() -> None:
    world = World(SERVER, restart=False)
    assert world.run(ends(-9)) == KILLED
    assert len(world.started) == 1


def test_too_often() -> None:
    world = World(SERVER, most=1)
    with pytest.raises(ChildFailedError) as caught:
        world.run(ends(-9, -9))
    assert str(caught.value) == (
        "server has ended 2 times in a row, the last time with signal 9, and the job got no further in between; "
        "cluster.max_restarts is 1"
    )
    assert caught.value.exit_code == KILLED


def test_ten_kills_while_the_job_gets_on() -> None:
    world = World(SERVER, most=1)
    server = world.status.processes.add(role="server")

    def further() -> None:
        server.version += 1

    world.asked = further
    assert world.run(ends(*[-9] * 10, 0)) == 0
    assert len(world.started) == 11


@pytest.mark.parametrize("state", [types_pb2.JOB_STATE_DONE, types_pb2.JOB_STATE_STOPPED, types_pb2.JOB_STATE_FAILED])
def test_nothing_is_started_for_a_job_that_is_over(state: types_pb2.JobState) -> None:
    for part in (SERVER, WORKER):
        world = World(part)
        world.status.view.state = state
        assert world.run(ends(-9, part=part)) == KILLED
        assert len(world.started) == 1


def test_a_worker_that_dies_when_nothing_is_left_is_not_replaced_but_a_server_is() -> None:
    for part, count in ((WORKER, 1), (SERVER, 2)):
        world = World(part)
        world.status.finished = True
        world.run(ends(*[-9, 0][:count], part=part))
        assert len(world.started) == count


@pytest.mark.parametrize("silent", [True, False])
def test_a_server_that_says_that_the_job_has_failed_is_believed_if_no_coordinator_answers(silent: bool) -> None:
    """With a coordinator that says otherwise, the server held the shard of an earlier run."""
    world = World(SERVER)
    world.silent = silent
    assert world.run(ends(*[JOB_FAILED_CODE, 0][: 1 if silent else 2])) == (1 if silent else 0)


def test_the_exit_code_of_a_failed_job_is_1() -> None:
    assert World(SERVER, restart=False).run(ends(JOB_FAILED_CODE)) == 1


# ---- told to end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_all_processes_and_their_exit_code_comes_out(number: signal.Signals) -> None:
    async def story(world: World) -> None:
        await world.next(SERVER, 1)
        world.keeper.on_signal(number)

    world = World(WORKER, SERVER)
    assert world.run(story) == 128 + number
    assert [process.told for process in world.started] == [[number], [number]]


def test_a_second_signal_kills_what_does_not_end() -> None:
    async def story(world: World) -> None:
        process = await world.next(SERVER, 1)
        world.keeper.on_signal(signal.SIGTERM)
        assert process.running
        world.keeper.on_signal(signal.SIGTERM)

    assert World(SERVER, deaf=True).run(story) == KILLED


def test_nothing_is_started_after_a_signal() -> None:
    async def while_it_waits_for_its_start(world: World) -> None:
        (await world.next(SERVER, 1)).end(-9)
        (await world.next(SERVER, 2)).end(-9)
        while world.said[-1:] != ["server is started again in 0.5 s (2 of at most 3 times in a row)"]:
            await asyncio.sleep(0.01)
        world.keeper.on_signal(signal.SIGINT)

    world = World(SERVER)
    assert world.run(while_it_waits_for_its_start) == 130
    assert len(world.started) == 2

    async def while_the_coordinator_is_asked(world: World) -> None:
        world.asked = lambda: world.keeper.on_signal(signal.SIGTERM)
        (await world.next(SERVER, 1)).end(-9)

    world = World(SERVER)
    assert world.run(while_the_coordinator_is_asked) == KILLED
    assert len(world.started) == 1


# ---- several processes


def test_servers_of_one_command_end_together_and_are_started_again_apart() -> None:
    settings = load_settings(None, {"cluster.servers_per_host": 3})
    parts = server_parts(settings)
    assert [part.name for part in parts] == ["server 1 of 3", "server 2 of 3", "server 3 of 3"]

    alone = World(*parts, restart=False)
    assert alone.run(ends(-9, part=parts[1])) == KILLED
    assert [process.told for process in alone.started] == [[signal.SIGTERM], [], [signal.SIGTERM]]

    async def story(world: World) -> None:
        (await world.next(parts[1], 1)).end(-9)
        await world.next(parts[1], 2)
        for process in world.started:
            if process.running:
                process.end(0)

    world = World(*parts)
    assert world.run(story) == 0
    assert len(world.started) == 4


def test_a_script_that_fails_leaves_its_server_to_the_others() -> None:
    async def story(world: World) -> None:
        server = await world.next(SERVER, 1)
        world.of(WORKER)[0].end(7)
        await asyncio.sleep(0.05)
        assert server.told == []
        server.end(0)

    assert World(WORKER, SERVER).run(story) == 7


def test_a_worker_that_is_told_to_end_takes_its_server_along() -> None:
    world = World(WORKER, SERVER)
    assert world.run(ends(143, part=WORKER)) == 143
    assert world.of(SERVER)[0].told == [signal.SIGTERM]


def test_only_the_first_server_takes_the_port_that_is_configured() -> None:
    wanted = {"cluster.servers_per_host": 2, "cluster.listen": "0.0.0.0:7000", "web.metrics": "127.0.0.1:8781"}
    settings = load_settings(None, wanted)
    listen, metrics = "PARAMSERVER_CLUSTER__LISTEN", "PARAMSERVER_WEB__METRICS"
    assert [part.environ.get(metrics) for part in server_parts(settings)] == [None, "127.0.0.1:0"]
    assert [part.environ.get(listen) for part in server_parts(settings)] == [None, "0.0.0.0:0"]
    worker, server = worker_parts(settings, Path("train.py"), ["--epochs", "5"], with_server=True)
    assert worker.argv == ("worker", "--", "train.py", "--epochs", "5")
    own = {listen: "0.0.0.0:0", metrics: "127.0.0.1:0", "PARAMSERVER_CLUSTER__BESIDE_WORKER": "true"}
    assert dict(server.environ) == own


# ---- servers that hang


@pytest.mark.parametrize("checkpoint", ["", "step-5"])
def test_a_server_that_hangs_is_killed_if_its_shard_is_in_a_checkpoint(checkpoint: str) -> None:
    async def story(world: World) -> None:
        first = await world.next(SERVER, 1)
        world.status.checkpoint = checkpoint
        member = world.status.processes.add(role="server", pid=first.pid)
        for count in range(100):
            if count == 30:
                member.gone = True
            await world.ask()
            await asyncio.sleep(0.02)
        assert first.running == (not checkpoint)
        world.started[-1].end(0)

    world = World(SERVER)
    assert world.run(story) == 0
    assert len(world.started) == (2 if checkpoint else 1)


def test_restart_and_no_restarts_contradict_each_other() -> None:
    settings = load_settings(None, {"cluster.max_restarts": 0})
    with pytest.raises(errors.ConfigError, match=r"^--restart and cluster\.max_restarts = 0 contradict each other"):
        keep(settings, server_parts(settings), restart=True)
