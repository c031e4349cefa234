"""``paramserver run``: a whole cluster as child processes of this one, started, watched, summarised, stopped."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from pydantic import SecretStr

from paramserver import errors
from paramserver.checkpoint.owner import Holding
from paramserver.config import Settings, env_name, hide_password
from paramserver.config.private import temporary_directory
from paramserver.launcher.display import Display, make_display
from paramserver.launcher.input import Input
from paramserver.launcher.poll import POLL_S, Poll
from paramserver.launcher.progress import where_it_stands
from paramserver.launcher.ranks import refuse_with_ddp
from paramserver.launcher.reporting import Reporting
from paramserver.launcher.spawn import Spawner, preload, starter_of
from paramserver.launcher.supervisor import Supervisor
from paramserver.logs import complain
from paramserver.machine.jobs import Job, publish_job, withdraw_job
from paramserver.machine.torchrun import refuse_each_alone
from paramserver.machine.valkey import EmbeddedStore
from paramserver.pki.nearby import point_at_token, write_token
from paramserver.pki.security import load_security
from paramserver.preload.starter import Preloading
from paramserver.processes.alive import process_birth
from paramserver.processes.ends import hand_on, listen
from paramserver.processes.lines import Output, Outputs
from paramserver.processes.logfiles import Logs
from paramserver.processes.process import Guard, stop_all
from paramserver.processes.restarts import Restarts
from paramserver.records.opening import check_records
from paramserver.report.writing import check_report
from paramserver.results.gather import MovedError, gather
from paramserver.results.summary import check_writable
from paramserver.results.verdict import BROKEN, broken_lines, broken_untrained, closing_lines, exit_code
from paramserver.resume.checkpointing import cost_of_a_loss, own_pace
from paramserver.resume.claiming import keep_up, leave
from paramserver.resume.holding import hold_for_run
from paramserver.transport import grpc
from paramserver.transport.base import Channel
from paramserver.transport.security.policy import ADMIN, COORDINATOR, SERVER
from paramserver.transport.security.tokens import Tokens
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.web.tickets import page_link

# For scripts, after a signal: their exit functions and files; after Ctrl-C, whatever they do at a KeyboardInterrupt.
_WORKER_PATIENCE_S = 5.0
_CTRL_C_PATIENCE_S = 60.0
_REST_PATIENCE_S = 1.5
# For the last version, which is saved when all scripts have ended.
_LAST_S = 2.0
# Nobody waits for a run that has ended by itself: coordinator and servers may tidy up on a busy machine, too.
_TIDY_S = 10.0
# After so many leases without an answer, the coordinator is taken for hung.
_HANG_LEASES = 2.0
_MODEL_S = 30.0
# For the report of a run without a result: how long the coordinator may take, also if a signal ends the run.
_REPORT_S = 5.0
_REPORT_HURRY_S = 0.5


def launch(
    settings: Settings,
    script: Path,
    script_args: list[str],
    fresh: bool = False,
    function: tuple[socket.socket, Path] | None = None,
) -> int:
    """Run the script on a cluster on this machine; returns the exit code of the command.

    ``fresh``: begin anew, whatever the store and the directory of the checkpoints hold; checkpoints are set aside.
    ``function``: in place of a script, a socket to the process of which workers are forked (`roles.launched`), and the
    directory for their results, where the summary of a job that has come to its end goes, too.

    The code is 0 when all workers have ended well and every promise is kept, 1 if a promise is broken, the code of the
    first worker that failed, 130 or 143 after a signal.
    Raises ParamServerError if the cluster cannot be started or breaks.
    """
    if not settings.cluster.each_alone:
        refuse_each_alone(os.environ, "each of them is a command that starts a whole cluster")
    check_writable(settings.run)
    check_records(settings.run)
    if settings.run.report:
        check_report(Path(settings.run.report))
    return asyncio.run(Launcher(settings, script, script_args, fresh, function).run())


class Launcher:
    """One run. Owns the job's directory, its store, and all its processes."""

    def __init__(
        self,
        settings: Settings,
        script: Path,
        script_args: list[str],
        fresh: bool = False,
        function: tuple[socket.socket, Path] | None = None,
    ) -> None:
        host = settings.cluster.coordinator.rpartition(":")[0].strip("[]")
        if host and not is_loopback(host):
            raise errors.ConfigError(
                f"cluster.coordinator is {settings.cluster.coordinator}, but paramserver run serves this machine only: "
                "use a port of 127.0.0.1, or leave it empty"
            )
        metrics = settings.web.metrics
        here = metrics == "off" or is_loopback(metrics.rpartition(":")[0].strip("[]"))
        if not (here or settings.security.insecure):
            raise errors.ConfigError(
                f"web.metrics is {metrics}, but paramserver run serves this machine only: say 127.0.0.1:0"
            )
        settings.replicas(launched=True)  # refuses a wish that cannot be
        if settings.run.ddp:
            refuse_with_ddp(settings)
        job = settings.cluster.job or f"{_job_stem(script)}-{secrets.token_hex(3)}"
        self._settings = settings.model_copy(update={"cluster": settings.cluster.model_copy(update={"job": job})})
        self._script, self._script_args = script, script_args
        self._function = function
        self._job = job
        self._fresh = fresh
        self._keeping: asyncio.Task[None] | None = None
        self._holding: Holding | None = None
        self._display: Display = make_display(settings.log.interval_s, settings.log.format == "json")
        self._token = secrets.token_urlsafe(32)
        own = settings.security.model_copy(update={"admin_token": SecretStr(self._token)})
        anywhere = settings.cluster.model_copy(update={"coordinator": ""})  # no other job's token counts
        self._security = load_security(settings.model_copy(update={"security": own, "cluster": anywhere}), ADMIN)
        # Empty: the user has named a file with one.
        self._join_token = ""
        if self._security.join.path is None:
            self._join_token = self._security.join.first() or secrets.token_urlsafe(32)
            self._security.join = Tokens([self._join_token])
        self._report = Reporting(self._settings, [self._token, *filter(None, [self._join_token])])
        # The last line that was said, and the lines at the end of a run with a result.
        self._said = ""
        self._last_lines: list[str] = []
        self._directory = Path()
        self._token_files: dict[str, str] = {}
        # Where other commands of this user find the join token.
        self._published_token: Path | None = None
        # Where the user wants checkpoints; empty: nowhere.
        self._wanted_checkpoints = ""
        self._logs: Logs | None = None
        self._store = EmbeddedStore()
        self._guard: Guard | None = None
        self._preloading: Preloading | None = None
        self._spawner: Spawner | None = None
        self._supervisor: Supervisor | None = None
        self._poll: Poll | None = None
        self._heard_last = coordinator_pb2.StatusResponse()
        self._published: Job | None = None
        self._address = ""
        self._signal: asyncio.Future[int] | None = None
        self._stopping = False

    async def run(self) -> int:
        """Start everything, wait for the workers, tidy up in every case."""
        loop = asyncio.get_running_loop()
        self._signal = loop.create_future()
        listen(self._on_signal, self._hand_on)
        self._directory = temporary_directory()
        self._token_files = self._write_tokens()
        self._keep_checkpoints()
        self._guard = Guard()
        self._guard.tell("directory", self._directory)
        if self._function is not None:
            self._guard.tell("directory", self._function[1])
        self._logs = Logs(self._directory / "logs", lambda line: self._display.line("", line))
        try:
            code = await self._until_over(self._signal)
            await self._tell(code, self._said)
            return code
        except errors.ParamServerError as error:
            self._last_lines = [str(error), *self._last_lines]
            await self._tell(error.exit_code, str(error))
            raise
        finally:
            await self._stop()

    async def _until_over(self, signalled: asyncio.Future[int]) -> int:
        started = asyncio.create_task(self._train())
        await asyncio.wait({started, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            started.cancel()
            await asyncio.gather(started, return_exceptions=True)
            self._said = ""
            await self._interrupt(signalled.result())
            return 128 + signalled.result()
        return started.result()

    async def _tell(self, code: int, why: str) -> None:
        """Say how the run has ended: in a report, on its page. ``why`` there is no result; empty after a signal."""
        interrupted = self._signal is not None and self._signal.done()
        failed = self._supervisor.failed() if self._supervisor is not None and not interrupted else []
        channel = self._connect(self._address) if self._address else None
        hurry_s = _REPORT_S if not interrupted else _REPORT_HURRY_S
        lines = self._last_lines or [why or f"stopped by {signal.Signals(code - 128).name}"]
        try:
            line = await self._report.broken_off(code, why, channel, self._directory / "logs", failed, hurry_s)
            if line:
                self._display.line("", line)
                lines.append(line)
        except errors.UserError as error:  # the exit code is not 0 already
            complain(f"paramserver: error: {error}")
        finally:
            await self._report.tell(code, lines, channel, hurry_s)
            if channel is not None:
                await channel.close()

    def _connect(self, address: str, peer: str = COORDINATOR) -> Channel:
        """A channel to a process of this job. With certificates, the launcher shows the admin's."""
        return grpc.connect(address, self._security, peer)

    def _on_signal(self, number: int) -> None:
        assert self._signal is not None
        if not self._signal.done():
            self._signal.set_result(number)
        elif self._spawner is not None:  # the second one ends the scripts, a third one what is being saved, too
            workers = [child for child in self._spawner.children("worker") if child.running]
            for child in workers or self._spawner.children("server", "coordinator"):
                child.kill()

    def _hand_on(self, number: signal.Signals) -> None:
        workers = self._spawner.children("worker") if self._spawner is not None else []
        self._say(hand_on({child.pid: child.name for child in workers if child.running}, number))

    async def _interrupt(self, number: int) -> None:
        """Let the scripts end as the signal asks them to, while servers still answer them; say what is left of the run.

        Ctrl-C of a terminal reaches this process only, since each child has a session of its own.
        """
        workers = self._spawner.children("worker") if self._spawner is not None else []
        line, patience_s = "stopping", _WORKER_PATIENCE_S
        if number == signal.SIGINT:
            patience_s = _CTRL_C_PATIENCE_S
            line += f": the scripts get a KeyboardInterrupt and have {patience_s:g} s; Ctrl-C again ends them at once"
        self._display.line("", line)
        await stop_all(workers, patience_s, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        if self._poll is None or self._settings.run.ddp:
            return
        deadline = time.monotonic() + _LAST_S
        while (status := await self._poll.ask()) is not None and status.closing and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)  # the last version is being saved
        self._display.line(
            "", where_it_stands(status or self._heard_last, self._wanted_checkpoints, self._function is not None)
        )

    async def _train(self) -> int:
        supervisor = await self._start()
        poll = self._poll = Poll(self._connect(self._address), self._heard, request=self._report.request)
        poll.start()
        while True:
            code = await supervisor.watch(poll)
            if code != 0:
                return code
            try:
                return await self._finish(supervisor)
            except errors.RetryableError:
                if supervisor.all_servers_run():
                    raise
                # A server has died since the workers ended: it is started again, and so are they, if need be.

    def _heard(self, status: coordinator_pb2.StatusResponse) -> None:
        assert self._supervisor is not None
        self._supervisor.hear(status)
        self._heard_last = status
        self._report.hear(status)
        self._update(status)

    def _update(self, status: coordinator_pb2.StatusResponse) -> None:
        if not self._settings.run.ddp:  # steps and samples are the script's own
            self._display.update(status)

    def _write_tokens(self) -> dict[str, str]:
        """Write this run's tokens into files of its directory; returns the variables that name the files."""
        tokens = {"security.admin_token_file": self._token, "security.token_file": self._join_token}
        variables = {}
        for key, token in tokens.items():
            if token:
                path = self._directory / key.removeprefix("security.")
                write_token(path, token)
                variables[env_name(key)] = str(path)
        return variables

    def _keep_checkpoints(self) -> None:
        """Without a place of its own the job can still go back to a checkpoint as long as it runs."""
        wanted = self._settings.checkpoint
        place = wanted.place or str(self._directory / "checkpoints")
        if "://" not in place:
            place = str(Path(place).absolute())
        self._wanted_checkpoints = place if wanted.place else ""
        changes: dict[str, object] = {"dir": place}
        if not wanted.place:
            changes |= own_pace(self._settings)
        self._settings = self._settings.model_copy(update={"checkpoint": wanted.model_copy(update=changes)})

    # ---- starting

    async def _start(self) -> Supervisor:
        settings, loop = self._settings, asyncio.get_running_loop()

        def say_soon(line: str) -> None:
            loop.call_soon_threadsafe(self._say, line)

        store, name = settings.cluster.store, hide_password(settings.cluster.store)
        durable = store != "memory"
        assert self._guard is not None
        if settings.cluster.preload:
            self._preloading = await preload(settings, self._script, self._guard, self._output, self._say)
        holding = self._holding = await hold_for_run(settings, self._fresh, not self._wanted_checkpoints)
        self._keeping = asyncio.create_task(keep_up(holding))
        if store == "auto":
            store = self._store.start(self._directory / "store")
            if self._store.socket_directory is not None:
                self._guard.tell("directory", self._store.socket_directory)
            name = "embedded"
        spawner = self._spawner = Spawner(
            settings,
            self._script,
            self._script_args,
            self._guard,
            self._output,
            (store, name),
            self._token_files,
            holding,
            starter_of(self._function and self._function[0], self._guard, self._preloading),
            Input(say_soon),
            self._fresh,
        )
        supervisor = self._supervisor = Supervisor(
            spawner,
            self._store,
            Restarts(settings.cluster.max_restarts),
            self._say,
            _HANG_LEASES * settings.cluster.lease_s,
            durable,
            ddp=settings.run.ddp,
        )
        await supervisor.start_coordinator()
        self._address = spawner.address
        holding.lead_at(self._address)
        pid = os.getpid()
        logs = str(self._directory / "logs")
        birth = process_birth(pid)
        join_file = self._security.join.path or Path(self._token_files[env_name("security.token_file")])
        self._published_token = point_at_token(self._address, join_file)
        certs = settings.security.certs and str(Path(settings.security.certs).absolute())
        self._published = Job(self._job, self._address, pid, time.time(), birth, self._token, certs, logs=logs)
        publish_job(self._published)
        for index in range(settings.cluster.servers):
            await supervisor.start_server(index)
        for index in range(settings.cluster.workers):
            await supervisor.start_worker(index)
        page, terminal = spawner.dashboard, sys.stdout.isatty()
        self._say(
            f"job {self._job}: {settings.cluster.servers} servers, {settings.cluster.workers} workers, "
            f"coordinator at {self._address}, store {name}"
            + (f", dashboard at {page}" if page and not terminal else ""),
        )
        if page and terminal:  # a link opens the page once, and others could read it in a file
            self._display.line("", f"dashboard at {page_link(page, self._security.join)}")
        if line := cost_of_a_loss(settings, not self._wanted_checkpoints):
            self._say(line)
        return supervisor

    def _say(self, line: str) -> None:
        self._said = line
        self._display.line("", line)
        if self._logs is not None:
            self._logs.line("run", line)

    def _output(self, name: str) -> Output:
        # While everything is stopped, servers and coordinator miss each other, and say so to nobody's use.
        assert self._logs is not None
        outputs = [self._display.output(name), self._logs.output(name)]
        return Outputs(outputs, lambda: not self._stopping or name.startswith("worker"))

    # ---- finishing

    async def _finish(self, supervisor: Supervisor) -> int:
        """Gather the result from the servers, print it, write what was asked for; the exit code of the run."""
        channel = self._connect(self._address)
        try:
            summary = None
            while summary is None:
                status = await _status(channel, model=True)
                self._update(status)
                if not status.HasField("model"):
                    line = "the script ended without training: it never called ctx.prepare or Client.init"
                    if self._settings.run.ddp:
                        line = f"the script has ended on all {self._settings.cluster.workers} ranks"
                    broken = broken_untrained(self._settings.run)
                    self._print([line, await self._report.untrained(broken, channel), *broken_lines(broken)])
                    return BROKEN if broken else 0
                summary = await self._gather(status, channel, supervisor.restarts.total)
            code = exit_code(summary)
            if self._function is not None:
                (self._function[1] / "summary").write_text(json.dumps(summary))
            *lines, last = closing_lines(status, summary)
            try:
                lines.append(await self._report.finished(summary, code, channel))
            except errors.UserError:
                self._print(lines)  # not that everything promised is there
                raise
        finally:
            await channel.close()
        self._print([*lines, last])
        return code

    def _print(self, lines: Sequence[str]) -> None:
        self._display.close()
        self._last_lines = [*filter(None, lines)]
        for line in self._last_lines:
            self._display.line("", line)

    async def _gather(
        self, status: coordinator_pb2.StatusResponse, channel: Channel, restarts: Mapping[str, int]
    ) -> dict[str, Any] | None:
        """The summary; None if shards have moved to other servers meanwhile."""

        async def look() -> types_pb2.View:
            return (await _status(channel)).view

        run, checkpoints = self._settings.run, self._wanted_checkpoints
        try:
            connect = partial(self._connect, peer=SERVER)
            return await gather(status, connect, look, run, restarts, checkpoints)
        except MovedError as error:
            self._display.line("", str(error))
            return None

    # ---- stopping

    async def _stop(self) -> None:
        self._display.close()
        self._stopping = True
        if self._preloading is not None:
            await self._preloading.close()
        if self._poll is not None:
            await self._poll.close()
        if self._spawner is not None:
            await stop_all(self._spawner.children("worker"), _WORKER_PATIENCE_S)
            interrupted = self._signal is not None and self._signal.done()
            rest = self._spawner.children("coordinator", "server")
            await stop_all(rest, _REST_PATIENCE_S if interrupted else _TIDY_S)
        self._store.stop()
        if self._keeping is not None and self._holding is not None:
            self._keeping.cancel()
            await leave(self._holding, True)
        if self._published is not None:
            withdraw_job(self._published)
        if self._published_token is not None:
            self._published_token.unlink(missing_ok=True)
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._guard is not None:
            self._guard.close()


async def _status(channel: Channel, model: bool = False) -> coordinator_pb2.StatusResponse:
    request = coordinator_pb2.StatusRequest(model=model)
    status = await channel.call("Coordinator.Status", request, timeout=_MODEL_S)
    return cast(coordinator_pb2.StatusResponse, status)


def is_loopback(host: str) -> bool:
    """True if only processes of this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _job_stem(script: Path) -> str:
    stem = "".join(c if c.isalnum() and c.isascii() else "-" for c in script.name.removesuffix(".py")).strip("-")
    return stem[:40] or "job"
