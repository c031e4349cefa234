"""How the launcher starts its processes: command line, environment, and the first address of the coordinator.

Servers and workers are forks of preloaded processes: one for each environment that they have, mostly one in all.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paramserver import errors
from paramserver.checkpoint.owner import Holding
from paramserver.config import ENV_PREFIX, Settings, env_name
from paramserver.launcher.input import Input
from paramserver.launcher.seats import ChildFailedError
from paramserver.preload.starter import Handed, Preloading
from paramserver.preload.title import ROOM
from paramserver.processes import environment as env
from paramserver.processes.lines import OnceHeard, Output
from paramserver.processes.process import Child, Guard
from paramserver.processes.starting import Executing, Starter, python
from paramserver.transport.addresses import own_loopback

START_TIMEOUT_S = 60.0
ROLES = python("paramserver.roles.child")
_PRELOADED = python("paramserver.roles.preloaded")


class Spawner:
    """Starts the processes of one run. ``output(name)`` makes what takes a stream of a process.

    ``store``: URL and shown name of the store. ``token_files``: variables that name the files with the run's tokens.
    The operators' token is for the coordinator alone. ``holding``: of the place of the checkpoints. ``starter``: how
    processes are made. ``given``: the standard input of workers. ``fresh``: an earlier job of this name does not count.
    ``address``: of the coordinator, once it was started; ``dashboard``: the URL of its page, or "". A coordinator that
    is started again keeps both.
    """

    def __init__(
        self,
        settings: Settings,
        script: Path,
        script_args: list[str],
        guard: Guard,
        output: Callable[[str], Output],
        store: tuple[str, str],
        token_files: Mapping[str, str],
        holding: Holding,
        starter: Starter,
        given: Input,
        fresh: bool = False,
    ) -> None:
        self.address = self.dashboard = ""
        self._children: list[Child] = []
        self._settings = settings
        self._script, self._script_args = script, script_args
        self._guard = guard
        self._output = output
        self._starter = starter
        self._input = given
        self._join = {key: path for key, path in token_files.items() if key == env_name("security.token_file")}
        self._secrets = {
            env.ENV_STORE: store[0],
            env.ENV_STORE_NAME: store[1],
            **token_files,
            env.ENV_HISTORIES: json.dumps(holding.histories),
            env.ENV_PRIVATE: "1" if holding.private else "",
            env.ENV_FRESH: "1" if fresh else "",
            env.ENV_ORIGINS: json.dumps(settings.origins()),
        }
        # The name by which the store knows the coordinator that leads.
        self._leader = ""
        # The port at which the ranks of a DDP script meet.
        self._meeting = 0

    def children(self, *roles: str) -> list[Child]:
        """The started processes in these roles, except for processes that ended before the last start."""
        return [child for child in self._children if child.name.partition("-")[0] in roles]

    async def coordinator(self) -> Child:
        """The first coordinator; returns when it listens, at :attr:`address`.

        May be called again after a coordinator that was killed before it listened. Raises ChildFailedError if the
        coordinator ends, DeadlineError if it does not listen within 60 s.
        """
        reading, writing = os.pipe()
        former = {env.ENV_FORMER: self._leader} if self._leader else {}
        try:
            child = await self._coordinator({env.ENV_READY_FD: str(writing), **former}, (writing,))
        finally:
            os.close(writing)
        try:
            line = await asyncio.wait_for(asyncio.to_thread(_read_line, reading), START_TIMEOUT_S)
        except TimeoutError as error:
            raise errors.DeadlineError(f"the coordinator did not start within {START_TIMEOUT_S:g} s") from error
        if not line:
            assert child.exited is not None
            raise ChildFailedError("the coordinator could not start; it says why above", await child.exited)
        self.address, _, self.dashboard = line.partition(" ")
        cluster = self._settings.cluster.model_copy(update={"coordinator": self.address})
        changes: dict[str, object] = {"cluster": cluster}
        if self.dashboard:
            changes["web"] = self._settings.web.model_copy(update={"dashboard": self.dashboard.rpartition("/")[2]})
        self._settings = self._settings.model_copy(update=changes)
        return child

    async def coordinator_again(self) -> Child:
        """A coordinator that takes the job over from its ended predecessor, at the same address."""
        return await self._coordinator({env.ENV_FORMER: self._leader})

    async def _coordinator(self, own: Mapping[str, str], pass_fds: tuple[int, ...] = ()) -> Child:
        self._leader = secrets.token_hex(8)
        environment = {**self._secrets, **own, env.ENV_LEADER: self._leader}
        return await self._start("coordinator", ["coordinator"], environment, 1, pass_fds)

    async def server(self, index: int, replaces: Sequence[int] = ()) -> Child:
        """The server of this index. ``replaces``: pids of its ended predecessors in this seat."""
        # Its threads work on a chunk each.
        return await self._member("server", index, ["server"], 1, replaces)

    async def worker(self, index: int, replaces: Sequence[int] = ()) -> Child:
        """A worker that wishes for this rank."""
        module = ["-m"] if self._settings.run.module else []
        argv = ["worker", *module, str(self._script), *self._script_args]
        ranks = {env.ENV_RANKS: f"{self._meeting} {self._settings.cluster.workers}"} if self._meeting else {}
        own = {**ranks, **self._input.variables}
        return await self._member("worker", index, argv, self._settings.training.threads_per_worker, replaces, own)

    def meet_anew(self) -> None:
        """The workers that are started from now on are ranks, which meet at a port that was not used before."""
        host = own_loopback()
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
            self._meeting = free.getsockname()[1]

    async def _member(
        self,
        role: str,
        index: int,
        argv: list[str],
        threads: int,
        replaces: Sequence[int],
        own: Mapping[str, str] | None = None,
    ) -> Child:
        own = {env.ENV_INDEX: str(index), **env.replacing(replaces), **(own or {})}
        return await self._start(f"{role}-{index}", argv, own, threads)

    async def _start(
        self, name: str, argv: list[str], own: Mapping[str, str], threads: int, pass_fds: tuple[int, ...] = ()
    ) -> Child:
        child = Child(name, self._guard, self._output, self._starter)
        self._children = [*(c for c in self._children if c.running), child]
        environment = {**common_environment(threads), **self._internal(), **own}
        with self._input.opened(argv[0] == "worker") as stdin:
            await child.start([*ROLES, *argv], environment, pass_fds, name == "coordinator", stdin)
        return child

    def _internal(self) -> dict[str, str]:
        """The variables of this package."""
        internal = {n: v for n, v in os.environ.items() if n.startswith(f"{ENV_PREFIX}INTERNAL_")}
        # An empty PARAMSERVER_CONFIG: the variables say everything, no file is read again.
        return {**internal, **self._settings.as_environment(), **self._join, f"{ENV_PREFIX}CONFIG": ""}


async def preload(
    settings: Settings, script: Path, guard: Guard, output: Callable[[str], Output], say: Callable[[str], None]
) -> Preloading:
    """A starter whose processes are forked. ``output(name)`` makes what takes a stream of a process."""

    def child() -> Child:
        return Child("preload", guard, lambda name: OnceHeard(lambda: output(name)))

    preloading = Preloading(ROLES, [*_PRELOADED, str(script), ROOM], child, ENV_PREFIX, say)
    for threads in sorted({1, settings.training.threads_per_worker}):
        await preloading.prepare(common_environment(threads))
    return preloading


def starter_of(function: socket.socket | None, guard: Guard, preloading: Preloading | None) -> Starter:
    """How processes are made. ``function``: to the process of which workers are forked, in place of a script."""
    others = preloading or Executing()
    return others if function is None else Handed([*ROLES, "worker"], function, Child("function", guard, None), others)


def common_environment(threads: int) -> dict[str, str]:
    """The variables that are not of this package, in a process that computes with so many threads."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    return {**kept, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads)}


def _read_line(fd: int) -> str:
    with open(fd) as pipe:
        return pipe.readline().strip()
