"""``paramserver run``: a whole cluster as child processes of this one, started, watched, summarised, stopped."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from paramserver import errors
from paramserver.config import ENV_PREFIX, Settings, env_name, hide_password
from paramserver.local.display import Display, make_display
from paramserver.local.gather import closing_lines, gather
from paramserver.local.jobs import Job, process_birth, publish_job, withdraw_job
from paramserver.local.process import Child, Guard, stop_all
from paramserver.local.roles import ENV_INDEX, ENV_READY_FD, ENV_STORE, ENV_STORE_NAME
from paramserver.local.summary import check_writable
from paramserver.local.valkey import EmbeddedStore
from paramserver.transport import grpc
from paramserver.v1 import coordinator_pb2

_POLL_S = 0.25
_START_TIMEOUT_S = 60.0
# A worker's exit code after SIGTERM.
_TERMINATED = 143
# Together below the 5 s after which nothing may be left of an interrupted run.
_WORKER_PATIENCE_S = 1.5
_REST_PATIENCE_S = 1.5


def launch(settings: Settings, script: Path, script_args: list[str]) -> int:
    """Run the script on a cluster on this machine; returns the exit code of the command.

    0 when all workers have ended well, the code of the first worker that failed, 130 or 143 after a signal.
    Raises ParamServerError if the cluster cannot be started or breaks.
    """
    for setting, path in (("run.summary", settings.run.summary), ("run.save", settings.run.save)):
        if path:
            check_writable(setting, Path(path))
    return asyncio.run(Launcher(settings, script, script_args).run())


class Launcher:
    """One run. Owns the job's directory, its store, and all its processes."""

    def __init__(self, settings: Settings, script: Path, script_args: list[str]) -> None:
        host = settings.cluster.coordinator.rpartition(":")[0].strip("[]")
        if host and not is_loopback(host):
            raise errors.ConfigError(
                f"cluster.coordinator is {settings.cluster.coordinator}, but paramserver run serves this machine only: "
                "use a port of 127.0.0.1, or leave it empty"
            )
        job = settings.cluster.job or f"{_job_stem(script)}-{secrets.token_hex(3)}"
        self._settings = settings.model_copy(update={"cluster": settings.cluster.model_copy(update={"job": job})})
        self._script, self._script_args = script, script_args
        self._job = job
        self._display: Display = make_display(settings.log.interval_s)
        self._directory = Path()
        self._store = EmbeddedStore()
        self._guard: Guard | None = None
        self._coordinator: Child | None = None
        self._servers: list[Child] = []
        self._workers: list[Child] = []
        self._published: Job | None = None
        self._address = ""
        self._signal: asyncio.Future[int] | None = None
        self._killed: set[str] = set()
        self._stopping = False

    async def run(self) -> int:
        """Start everything, wait for the workers, tidy up whatever happens."""
        loop = asyncio.get_running_loop()
        self._signal = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        self._directory = Path(tempfile.mkdtemp(prefix="paramserver-"))
        self._guard = Guard()
        self._guard.tell("directory", self._directory)
        try:
            started = asyncio.create_task(self._train())
            await asyncio.wait({started, self._signal}, return_when=asyncio.FIRST_COMPLETED)
            if not started.done():
                started.cancel()
                await asyncio.gather(started, return_exceptions=True)
                self._display.line("", "stopping")
                return 128 + self._signal.result()
            return started.result()
        finally:
            await self._stop()

    def _on_signal(self, number: int) -> None:
        assert self._signal is not None
        if not self._signal.done():
            self._signal.set_result(number)

    async def _train(self) -> int:
        await self._start()
        code = await self._watch()
        if code == 0:
            await self._finish()
        return code

    # ---- starting

    async def _start(self) -> None:
        settings = self._settings
        store, name = settings.cluster.store, hide_password(settings.cluster.store)
        if store == "auto":
            store = self._store.start(self._directory / "store")
            if self._store.socket_directory is not None:
                assert self._guard is not None
                self._guard.tell("directory", self._store.socket_directory)
            name = "embedded"
        environment = self._environment(settings)
        token = secrets.token_urlsafe(32)
        own = {ENV_STORE: store, ENV_STORE_NAME: name, env_name("security.admin_token"): token}
        await self._start_coordinator({**environment, **own})
        self._published = Job(self._job, self._address, os.getpid(), time.time(), process_birth(os.getpid()), token)
        publish_job(self._published)
        joined = settings.model_copy(
            update={"cluster": settings.cluster.model_copy(update={"coordinator": self._address})}
        )
        environment = self._environment(joined)
        python = [sys.executable, "-m", "paramserver.local.roles"]
        for index in range(settings.cluster.servers):
            threads = str(settings.training.threads_per_server)
            own = {ENV_INDEX: str(index), "OMP_NUM_THREADS": threads}
            self._servers.append(await self._child(f"server-{index}", [*python, "server"], {**environment, **own}))
        for index in range(settings.cluster.workers):
            threads = str(settings.training.threads_per_worker)
            own = {ENV_INDEX: str(index), "OMP_NUM_THREADS": threads}
            argv = [*python, "worker", str(self._script), *self._script_args]
            self._workers.append(await self._child(f"worker-{index}", argv, {**environment, **own}))
        self._display.line(
            "",
            f"job {self._job}: {settings.cluster.servers} servers, {settings.cluster.workers} workers, "
            f"coordinator at {self._address}, store {name}",
        )

    def _environment(self, settings: Settings) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        internal = {n: v for n, v in os.environ.items() if n.startswith(f"{ENV_PREFIX}INTERNAL_")}
        # An empty PARAMSERVER_CONFIG: the variables say everything, no file is read again.
        return {
            **kept,
            **internal,
            **settings.as_environment(),
            f"{ENV_PREFIX}CONFIG": "",
            "PYTHONUNBUFFERED": "1",
        }

    async def _child(
        self, name: str, argv: list[str], environment: Mapping[str, str], pass_fds: tuple[int, ...] = ()
    ) -> Child:
        assert self._guard is not None
        child = Child(name, self._guard, self._on_line)
        await child.start(argv, environment, pass_fds)
        return child

    def _on_line(self, name: str, text: str) -> None:
        # While everything is stopped, servers and coordinator miss each other, which is nobody's concern.
        if not self._stopping or name.startswith("worker"):
            self._display.line(name, text)

    async def _start_coordinator(self, environment: Mapping[str, str]) -> None:
        reading, writing = os.pipe()
        argv = [sys.executable, "-m", "paramserver.local.roles", "coordinator"]
        try:
            self._coordinator = await self._child(
                "coordinator", argv, {**environment, ENV_READY_FD: str(writing)}, (writing,)
            )
        finally:
            os.close(writing)
        try:
            line = await asyncio.wait_for(asyncio.to_thread(_read_line, reading), _START_TIMEOUT_S)
        except TimeoutError as error:
            raise errors.DeadlineError(f"the coordinator did not start within {_START_TIMEOUT_S:g} s") from error
        if not line:
            assert self._coordinator.exited is not None
            code = await self._coordinator.exited
            raise _ChildFailed("the coordinator could not start; it says why above", code)
        self._address = line

    # ---- watching

    async def _watch(self) -> int:
        """Wait until all workers have ended well; returns the exit code."""
        channel = grpc.connect(self._address)
        asked_at = 0.0
        try:
            while True:
                running = [w for w in self._workers if w.running]
                code = self._judge()
                if code is not None:
                    return code
                if time.monotonic() - asked_at >= _POLL_S:
                    asked_at = time.monotonic()
                    await self._show(channel)
                exits = {w.exited for w in running if w.exited is not None}
                exits |= {
                    c.exited for c in (self._coordinator, *self._servers) if c is not None and c.exited is not None
                }
                await asyncio.wait(exits, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await channel.close()

    def _judge(self) -> int | None:
        """The exit code if the run is over, None while it goes on. Raises if a part of the cluster is gone."""
        for worker in self._workers:
            code = _exit_of(worker)
            if code is None or code == 0 or worker.name in self._killed:
                continue
            if code == _TERMINATED:
                self._killed.add(worker.name)
                self._display.line("", f"{worker.name} was told to leave; its slices go to the others")
                continue
            if code > 0:
                self._display.line("", f"{worker.name} failed with exit code {code}; the run ends")
                return code
            self._killed.add(worker.name)
            self._display.line("", f"{worker.name} was killed by signal {-code}; its slices go to the others")
        for child in (self._coordinator, *self._servers):
            if child is not None and (code := _exit_of(child)) is not None:
                raise _ChildFailed(f"{child.name} ended unexpectedly ({_how(code)}); the run cannot go on", code)
        if any(worker.running for worker in self._workers):
            return None
        codes = [_exit_of(worker) for worker in self._workers]
        return 0 if 0 in codes else 128 - min(code for code in codes if code is not None)

    async def _show(self, channel: grpc.GrpcChannel) -> None:
        try:
            reply = await channel.call("Coordinator.Status", coordinator_pb2.StatusRequest(), timeout=2.0)
        except errors.ParamServerError:
            return
        status = cast(coordinator_pb2.StatusResponse, reply)
        self._display.update(status)

    # ---- finishing

    async def _finish(self) -> None:
        """Gather the result from the servers, print it, write what was asked for."""
        channel = grpc.connect(self._address)
        try:
            request = coordinator_pb2.StatusRequest(model=True)
            status = cast(
                coordinator_pb2.StatusResponse, await channel.call("Coordinator.Status", request, timeout=30.0)
            )
            self._display.update(status)
            if not status.HasField("model"):
                self._display.line("", "the script ended without training: it never called ctx.prepare or Client.init")
                return
            summary = await gather(status, grpc.connect, self._settings.run)
        finally:
            await channel.close()
        self._display.close()
        for line in closing_lines(status, summary):
            self._display.line("", line)

    # ---- stopping

    async def _stop(self) -> None:
        self._display.close()
        self._stopping = True
        await stop_all(self._workers, _WORKER_PATIENCE_S)
        await stop_all([c for c in (self._coordinator, *self._servers) if c is not None], _REST_PATIENCE_S)
        self._store.stop()
        if self._published is not None:
            withdraw_job(self._published)
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._guard is not None:
            self._guard.close()


class _ChildFailed(errors.ParamServerError):
    """A part of the cluster ended; the command ends with its exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.exit_code = code if code > 0 else 1


def _exit_of(child: Child) -> int | None:
    if child.exited is None or not child.exited.done():
        return None
    return child.exited.result()


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def is_loopback(host: str) -> bool:
    """True if only processes of this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _job_stem(script: Path) -> str:
    stem = "".join(c if c.isalnum() and c.isascii() else "-" for c in script.stem).strip("-")
    return stem[:40] or "job"


def _read_line(fd: int) -> str:
    with open(fd) as pipe:
        return pipe.readline().strip()
