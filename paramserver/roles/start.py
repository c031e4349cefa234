"""``paramserver start``: one role on this machine, as a process in the foreground."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from paramserver import errors, logs
from paramserver.config import NO_CHECKPOINTS, Settings, hide_password, load_settings, split_addresses
from paramserver.config.private import state_root
from paramserver.machine.hosts import coordinator_place, server_place
from paramserver.machine.jobs import Job, publish_job, withdraw_job
from paramserver.machine.presence import Presence
from paramserver.processes.alive import process_birth
from paramserver.processes.ends import listen
from paramserver.processes.environment import ENV_WISH, JOB_FAILED_CODE, is_part
from paramserver.testing.arming import arm_if_told

if TYPE_CHECKING:
    from paramserver.resume.options import Options
    from paramserver.server.member import ServerMember
    from paramserver.transport.security.access import Security
    from paramserver.worker.engine import Engine

log = structlog.get_logger("paramserver")

_BEAT_S = 1.0
_DEFAULT_JOB = "job"
# The name under which a coordinator leads with a private store.
_PRIVATE = "private"


# ---- coordinator


def start_coordinator(settings: Settings, options: Options) -> int:
    """Lead the job, or stand by; returns the exit code. Raises ParamServerError."""
    logs.configure(settings.log.level, settings.log.format, "coordinator")
    arm_if_told("coordinator")
    from paramserver.records.opening import check_records
    from paramserver.report.writing import check_report
    from paramserver.results.summary import check_writable

    try:
        check_writable(settings.run)
        check_records(settings.run)
        if settings.run.report:
            check_report(Path(settings.run.report))
    except errors.UserError as error:
        if not options.resume:
            raise
        log.warning("the job goes on, and may break a promise at its end", reason=str(error))
    if not settings.cluster.job:
        settings = settings.model_copy(update={"cluster": settings.cluster.model_copy(update={"job": _DEFAULT_JOB})})
    return asyncio.run(_coordinate(settings, options))


async def _coordinate(settings: Settings, options: Options) -> int:
    from paramserver.pki.nearby import share_token, show_token, token_path
    from paramserver.pki.security import load_security
    from paramserver.roles.coordinating import Coordinating
    from paramserver.roles.dashboard import Dashboard
    from paramserver.store import open_store
    from paramserver.transport import bulk, grpc
    from paramserver.transport.addresses import join

    host, port, advertised = coordinator_place(settings)
    token = secrets.token_urlsafe(32)
    security = load_security(settings, "coordinator", token)
    await security.check_listen(host)
    await check_checkpoints(settings, host)
    cluster = settings.cluster
    others = split_addresses(cluster.coordinator)
    own = share_token(security, cluster.job, [join(advertised, port), *others])
    with _store(settings) as (url, store_name):
        if store_name != hide_password(cluster.store):
            # An earlier coordinator of this store has ended, or it would hold the directory.
            options = replace(options, token=_PRIVATE, former=_PRIVATE)
        coordinating = Coordinating(
            settings,
            options,
            lambda: open_store(url, f"paramserver:{cluster.job}", cluster.store_password_file),
            store_name,
            security,
            bulk.connector(security, "server", settings.cluster.transport != "grpc"),
            say=logs.say,
        )
        listen(coordinating.on_signal)
        server = await grpc.serve([("Coordinator", coordinating.endpoint)], host, port, security)
        coordinating.address = join(advertised, server.port)
        show_token(own, [coordinating.address, *others])
        token_file = token_path(coordinating.address) if own else security.join.path
        dashboard = Dashboard(settings, security, coordinating.endpoint)
        await dashboard.start(advertised, again=options.resume)
        coordinating.dashboard, coordinating.show_end = dashboard.url, dashboard.show_end
        # Commands given on this machine find the coordinator here.
        near = join("127.0.0.1" if host in ("0.0.0.0", "::") else host, server.port)
        job = Job(
            cluster.job,
            near,
            os.getpid(),
            time.time(),
            process_birth(os.getpid()),
            token if security.admin.first() == token else "",
            settings.security.certs and str(Path(settings.security.certs).absolute()),
            settings.security.insecure,
        )
        published: list[Job] = []

        def leading() -> None:
            with contextlib.suppress(errors.ConfigError):  # another job on this machine has the name
                publish_job(job)
                published.append(job)
            for line in _join_lines(settings, coordinating.address, security, store_name):
                logs.say(line)
            if job.admin_token:
                logs.say(_commands_line(bool(published)))
            if dashboard.url:
                logs.say(f"dashboard at {dashboard.url}")

        with _present("coordinator", settings, near, token_file) as presence:
            beating = asyncio.create_task(_beat(lambda: presence.update(name="coordinator", ready=coordinating.leads)))
            try:
                return await coordinating.run(leading)
            finally:
                beating.cancel()
                for one in published:
                    withdraw_job(one)
                await dashboard.close()
                await server.stop(0.2)


async def check_checkpoints(settings: Settings, host: str) -> None:
    """Refuse a job of several machines if checkpoint.dir is not set, and warn of it on one. Raises ConfigError.

    ``host``: where the coordinator listens. Servers of other machines cannot reach the loopback interface.
    """
    from paramserver.transport.addresses import resolves_to_loopback

    if settings.checkpoint.dir:
        return
    if not await resolves_to_loopback(host):
        raise errors.ConfigError(
            "checkpoint.dir is empty, and without checkpoints the death of one server ends the job: name a directory "
            "or URL that this machine and all servers share with --checkpoint-dir, or do without and say "
            f"--checkpoint-dir {NO_CHECKPOINTS}"
        )
    log.warning(
        "there are no checkpoints: if a server dies, the job ends; name a place that all servers reach with "
        f"--checkpoint-dir, or say --checkpoint-dir {NO_CHECKPOINTS}"
    )


@contextlib.contextmanager
def _store(settings: Settings) -> Iterator[tuple[str, str]]:
    """Address and name of the store. "auto": a private store, which ends with this process; its data stay."""
    if settings.cluster.store != "auto":
        yield settings.cluster.store, hide_password(settings.cluster.store)
        return
    from paramserver.machine.valkey import EmbeddedStore

    directory = _state_directory(settings)
    log.info(
        "no store is configured: a private one is started, so that only a coordinator on this machine can go on with "
        "the job; set cluster.store = redis://… to have one elsewhere",
        directory=str(directory),
    )
    store = EmbeddedStore()
    try:
        url = store.start(directory, durable=True)
    except OSError as error:
        raise errors.ConfigError(
            f"the private store cannot be kept in {directory} ({error.strerror or error}): choose another directory "
            "with cluster.state_dir, or name a store in cluster.store"
        ) from error
    try:
        yield url, f"embedded in {directory}"
    finally:
        store.stop()


def _state_directory(settings: Settings) -> Path:
    """Where the private store of this job lies. Raises ConfigError if this user has no place for it."""
    given = settings.cluster.state_dir
    try:
        root = Path(given) if given else state_root()
    except RuntimeError as error:
        raise errors.ConfigError("this user has no home directory: name one in cluster.state_dir") from error
    return root.absolute() / settings.cluster.job


def _join_lines(settings: Settings, address: str, security: Security, store_name: str) -> list[str]:
    how = "TLS" if security.tls else "no TLS"
    addresses = settings.cluster.coordinator if "," in settings.cluster.coordinator else address
    flags = f" --join {addresses}".replace(", ", ",")
    if security.tls:
        flags += " --certs DIRECTORY"
    elif security.insecure:
        flags += " --insecure"
    return [
        f"coordinator of job {settings.cluster.job} at {address} ({how}), store {store_name}",
        f"on the machines of servers ({settings.cluster.servers}) and workers ({settings.cluster.workers} or more) run",
        f"  paramserver start server --restart{flags}",
        f"  paramserver start worker --restart{flags} -- SCRIPT ARGUMENTS",
    ]


def _commands_line(known: bool) -> str:
    """Who may give commands to a job without an operators' token. ``known``: this user's commands find the job."""
    remedy = "for others, name a file with an operators' token in security.admin_token_file, here and where they type"
    if known:
        return f"commands (stop, scale, set, drain): from this user on this machine only; {remedy}"
    return f"commands (stop, scale, set, drain): from nobody, as another job of this user has this name here; {remedy}"


# ---- server


def start_server(settings: Settings, config: Path | None, overrides: dict[str, object]) -> int:
    """Hold a shard of the job; returns the exit code. Raises ParamServerError."""
    logs.configure(settings.log.level, settings.log.format, "server")
    arm_if_told("server-?")  # the number comes with the membership
    try:
        return asyncio.run(_serve(settings, config, overrides))
    except errors.JobFailedError as error:
        if not is_part():
            raise
        logs.complain(f"paramserver: error: {error}")
        return JOB_FAILED_CODE


async def _serve(settings: Settings, config: Path | None, overrides: dict[str, object]) -> int:
    from paramserver.api import to_coordinator
    from paramserver.membership.settings import adopted, fetch
    from paramserver.pki.security import load_security
    from paramserver.roles.serving import Serving
    from paramserver.transport.addresses import join

    stop = asyncio.Event()
    # Exit codes of what ends this server.
    got: list[int] = []

    def on_signal(number: signal.Signals) -> None:
        got.append(128 + number)
        stop.set()

    listen(on_signal)
    security = load_security(settings, "server")
    coordinator = to_coordinator(settings.cluster.coordinator, security)
    member: ServerMember | None = None

    def beat() -> None:
        if member is None:
            presence.update(state="joining")
        else:
            presence.update(name=member.session.name or "server", ready=bool(member.session.member), state="serving")

    with _present("server", settings, "", security.join.path) as presence:
        beating = asyncio.create_task(_beat(beat))
        try:
            fetching = asyncio.create_task(fetch(coordinator, settings, server=True))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({fetching, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not fetching.done():
                fetching.cancel()
                return got[0]
            settings = load_settings(config, {**overrides, **adopted(settings, fetching.result())})
            host, port, advertised = server_place(settings)
            near = "127.0.0.1" if host in ("0.0.0.0", "::") else host

            def listening(number: int, made: ServerMember) -> None:
                nonlocal member
                member = made
                presence.update(address=join(near, number))

            wish = os.environ.get(ENV_WISH)
            serving = Serving(settings, security, coordinator, int(wish) if wish else None)
            await serving.run(host, port, advertised, stop, listening)
        finally:
            beating.cancel()
    return got[0] if got else 0


# ---- worker


def start_worker(settings: Settings, script: Path, args: list[str]) -> int:
    """Run the script as a worker of the job, in this process; returns the exit code. Raises ParamServerError."""
    logs.configure(settings.log.level, settings.log.format, "worker")
    arm_if_told("worker-?")  # the number comes with the membership
    from paramserver import api as entry
    from paramserver.roles import child as roles
    from paramserver.roles.scripts import Script

    with _present("worker", settings, "") as presence:
        os.environ.update(settings.given_as_environment())
        stop_beating = _beat_until_joined(presence)

        def tell(engine: Engine) -> None:
            stop_beating()
            presence.update(name=engine.member.session.name, ready=True, state=engine.progress.state)

        entry.on_beat(tell)
        module = ["-m"] if settings.run.module else []
        roles.run_worker(Script([*module, str(script), *args]), lambda code: presence.close())
        return 0


def _beat_until_joined(presence: Presence) -> Callable[[], None]:
    """Give signs of life from a thread, until the returned function is called: then the network loop gives them."""
    joined = threading.Event()

    def run() -> None:
        while not joined.wait(_BEAT_S):
            presence.update(state="starting")

    threading.Thread(target=run, name="beating", daemon=True).start()
    return joined.set


# ---- signs of life


@contextlib.contextmanager
def _present(role: str, settings: Settings, address: str, token_file: Path | None = None) -> Iterator[Presence]:
    """``token_file``: with the token that calls to ``address`` have to show."""
    wanted = settings.security
    presence = Presence.publish(
        role,
        settings.cluster.job,
        address,
        certs=str(Path(wanted.certs).absolute()) if wanted.certs else "",
        token_file=str(token_file.absolute()) if token_file else "",
        insecure=wanted.insecure,
    )
    try:
        yield presence
    finally:
        presence.close()


async def _beat(tell: Callable[[], None]) -> None:
    while True:
        tell()
        await asyncio.sleep(_BEAT_S)
