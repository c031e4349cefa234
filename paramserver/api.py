"""``ps.init`` and ``ps.Client``: join the configured cluster, or run alone."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401  (first, so that its exit handler runs after ours)
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import structlog
import torch

from paramserver import errors, logs
from paramserver.alone.job import InProcessJob
from paramserver.config import Settings, load_settings, split_addresses
from paramserver.coordinator.options import JobOptions
from paramserver.failpoints import known_as
from paramserver.machine.hosts import route_to
from paramserver.machine.torchrun import refuse_each_alone, torchrun
from paramserver.membership.joining import JoinOptions
from paramserver.membership.settings import adopted, consistency_of, fetch, shared
from paramserver.processes.ends import end_as_python
from paramserver.processes.environment import ENV_INDEX, ENV_LOCAL, ENV_WISH, is_part, replaced_pids
from paramserver.records.opening import check_records
from paramserver.results.verdict import broken_sentences
from paramserver.tensors.own import allow
from paramserver.tensors.own import server_optimizer as server_optimizer
from paramserver.tensors.uncompiled import postpone_compiler
from paramserver.transport import bulk
from paramserver.transport.allocation import keep_memory
from paramserver.transport.base import Channel
from paramserver.transport.grpc import connector
from paramserver.transport.security.access import Security
from paramserver.transport.shm.meeting import meet_in
from paramserver.v1 import types_pb2
from paramserver.web.metrics.members import WORKER, worker_samples
from paramserver.web.metrics.port import MetricsPort
from paramserver.worker.again import check_after, check_before
from paramserver.worker.background import Background
from paramserver.worker.chosen import seed_and_threads
from paramserver.worker.client import RawClient
from paramserver.worker.context import Context
from paramserver.worker.engine import Engine

log = structlog.get_logger("paramserver")


def init(config: str | os.PathLike[str] | None = None, **overrides: object) -> Context:
    """Join the job that is configured, or train alone in this process if none is.

    A job is configured if ``cluster.coordinator`` is set, which ``paramserver run`` and ``start worker`` do.

    ``config``: a TOML file. Without it the file that ``PARAMSERVER_CONFIG`` names, or ``paramserver.toml`` in the
    current directory. ``overrides``: settings by dotted name with the dot written as two underscores. Other settings
    come from the environment, the file, and the job. Seeds torch, NumPy and Python with ``training.seed``, so that
    models built afterwards are equal on all workers.

    Raises ConfigError for settings that are wrong or differ from the job's, UnavailableError if no coordinator answers
    within ``cluster.join_timeout_s`` seconds, VersionMismatchError for another version of paramserver or torch,
    DeniedError if the job does not accept certificate or token, UserError if this process has an open context of a job,
    or has left this job before.

    >>> ctx = ps.init(training__seed=1)
    >>> ctx.rank, ctx.world_size, ctx.is_main, ctx.mode
    (0, 1, True, 'sync')
    """
    settings = _settings(config, overrides)
    _set_log_up(settings)
    postpone_compiler()
    if settings.cluster.coordinator:
        check_before(_contexts, launched=ENV_INDEX in os.environ or is_part())
        with _background() as background:
            security = _security(settings, settings.cluster.coordinator)
            coordinator = to_coordinator(settings.cluster.coordinator, security)
            if ENV_INDEX not in os.environ:  # the launcher has given its workers everything
                theirs = background.run(fetch(coordinator, settings))
                settings = _settings(config, {**overrides, **adopted(settings, theirs)})
            seed_and_threads(settings)
            settings = _share_gpus_out(settings)
            engine = _connected(settings, background, coordinator, security)
            check_after(_contexts, engine)
            context = Context(settings, engine, _leave)
    else:
        seed_and_threads(settings)
        job = _alone(settings)
        engine = job.worker(0)
        logs.known_as("", lambda: engine.weights.version)
        context = Context(settings, engine, lambda ctx: _leave_alone(ctx, job))
        log.info(
            "no cluster is configured: training alone in this process",
            mode=str(job.options.consistency),
            slices_per_step=job.coordinator.job.options.step_slices,
        )
    _contexts.append(context)
    return context


def _set_log_up(settings: Settings) -> None:
    logs.configure(settings.log.level, settings.log.format, "worker")


def close_all() -> int:
    """Close the contexts and clients that a script has left open; returns the exit code, 0 if all went well."""
    code = 0
    left: list[Context | RawClient] = [*_contexts, *_clients]
    for one in left:
        try:
            one.close()
        except errors.EndedError as error:
            logs.complain(f"paramserver: {error}")
        except errors.ParamServerError as error:
            logs.complain(f"paramserver: error: {error}")
            code = code or error.exit_code
        except Exception as error:
            logs.show_exception(error, error.__traceback__)
            code = code or 1
    return code


def _close_at_exit() -> None:
    """Set the exit code here: Python prints an error of an exit function, and ends with code 0 nevertheless."""
    try:
        code = close_all()
    except KeyboardInterrupt:
        abandon_all("")
        code = 130
    if code:
        end_as_python(code)


# Contexts and clients that the script may leave open. A client closes itself when the script has dropped it.
_contexts: list[Context] = []
_clients: weakref.WeakSet[RawClient] = weakref.WeakSet()
# A process that the script forks, for example to load data, must not close them.
os.register_at_fork(after_in_child=_contexts.clear)
os.register_at_fork(after_in_child=_clients.clear)
# Not `atexit`: before that Python ends the thread pools with which servers in this process would give the last weights.
threading._register_atexit(_close_at_exit)  # type: ignore[attr-defined]


class Client(RawClient):
    """Push and pull of named arrays, without a torch module. Thread-safe: calls of several threads take turns.

    Call :meth:`init` once (of all clients' calls the first one counts, and all clients see its bytes), then
    :meth:`push` and :meth:`pull`. Without ``init``, :meth:`pull` shows the model that the job trains. A client that
    only reads is no worker. It becomes a worker with its first push, or with ``init`` if the job has not begun. In
    synchronous mode other workers wait for its part of each step until it closes. Close it at the end, or use ``with``.

    ``coordinator``: host:port of the job. Without it the configured job, or a job of its own in this process.
    ``config``: a TOML file with settings, as for :func:`paramserver.init`. Raises UnavailableError if no coordinator
    answers there, ConfigError for wrong settings, JobFailedError when a client is closed whose own job broke a promise.

    >>> client = ps.Client()
    >>> client.init({"total": np.zeros(3, np.float32)})["total"]
    array([0., 0., 0.], dtype=float32)
    >>> client.push({"total": np.ones(3, np.float32)})
    1
    >>> client.pull(["total"])["total"]
    array([1., 1., 1.], dtype=float32)
    >>> client.close()
    """

    def __init__(self, coordinator: str | None = None, *, config: str | os.PathLike[str] | None = None) -> None:
        settings = _settings(config, {})
        _set_log_up(settings)
        address = coordinator or settings.cluster.coordinator
        if address:
            # A process that was started as a worker of this job joins as a worker. A process from outside joins as an
            # observer at first, and takes the job's settings as they are.
            own = address == settings.cluster.coordinator
            with _background() as background:
                security = _security(settings, address)
                coordinator_channel = to_coordinator(address, security)
                role = types_pb2.ROLE_WORKER if own else types_pb2.ROLE_OBSERVER
                engine = _connected(settings, background, coordinator_channel, security, own, role)

            def close() -> None:
                engine.close()
                engine.background.close()
        else:
            job = _alone(settings)
            engine = job.worker(0)

            def close() -> None:
                engine.close()
                job.settle()
                broken = broken_sentences(job.coordinator.job.promises.broken)
                job.close()
                if broken:
                    raise errors.JobFailedError(" ".join(broken))

        # A dropped client ends its threads. A thread of its own does this, since the collector's must not wait.
        forgotten = weakref.finalize(self, lambda: threading.Thread(target=close, daemon=True).start())
        forgotten.atexit = False
        # In a process that the script forks, dropping or closing the client ends nothing.
        os.register_at_fork(after_in_child=forgotten.detach)

        def close_once() -> None:
            if forgotten.detach() is not None:
                close()

        super().__init__(engine, close_once, settings.training.chunk_bytes)
        _clients.add(self)


@contextmanager
def _background() -> Iterator[Background]:
    """A background loop, which is closed if the block fails."""
    from paramserver.transport import fork

    fork.guard()
    background = Background()
    try:
        yield background
    except BaseException:
        background.close()
        raise


def _security(settings: Settings, coordinator: str) -> Security:
    from paramserver.pki.security import load_security

    cluster = settings.cluster.model_copy(update={"coordinator": coordinator})
    return load_security(settings.model_copy(update={"cluster": cluster}), "worker")


def _settings(config: str | os.PathLike[str] | None, overrides: Mapping[str, object]) -> Settings:
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_settings(Path(config) if config is not None else None, dotted)


def _connected(
    settings: Settings,
    background: Background,
    coordinator: Channel,
    security: Security,
    own: bool = True,
    role: types_pb2.Role = types_pb2.ROLE_WORKER,
) -> Engine:
    keep_memory()
    meet_in(Path(settings.cluster.meeting_dir))
    host = _own_host(coordinator.address)
    options = JoinOptions(
        role=role,
        job=settings.cluster.job if own else "",
        consistency=consistency_of(settings.consistency.mode, settings.consistency.staleness) if own else None,
        slices_per_step=settings.training.slices_per_step if own else 0,
        seed=settings.training.seed if own else None,
        index=_wished_index(),
        pid=os.getpid(),
        address=host,
        join_timeout_s=settings.cluster.join_timeout_s,
        log_interval_s=settings.log.interval_s,
        replaces=replaced_pids(),
        metrics_url=lambda: metrics.url,
    )
    engine = Engine(
        background,
        bulk.connector(security, "server", settings.cluster.transport != "grpc"),
        coordinator,
        options,
        settings.cluster.wait_timeout_s,
        settings.cluster.transport,
        _host_secret(settings, security),
    )
    session = engine.member.session
    metrics = MetricsPort(
        settings, security, WORKER, lambda: worker_samples(session.name, engine.facts()), lambda: session.name
    )
    if role == types_pb2.ROLE_WORKER:
        background.run(metrics.start(settings.cluster.advertise_host or host))
        background.submit(metrics.until_cancelled())
    engine.join()
    known_as(engine.member.session.name)
    logs.known_as(engine.member.session.name, lambda: engine.weights.version)
    _engines.add(engine)
    if _beats:
        background.submit(_beat(engine))
    return engine


def _host_secret(settings: Settings, security: Security) -> str | None:
    """Known to the workers of the job, which pull once for each host; None: each pulls by itself."""
    return security.join.first() if settings.shares_pulls else None


def to_coordinator(addresses: str, security: Security) -> Channel:
    """A channel to the coordinator that leads."""
    from paramserver.transport.rotating import coordinator_channel

    return coordinator_channel(split_addresses(addresses), connector(security, "coordinator"))


# Engines of this process, and what else wants to know about them.
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_beats: list[Callable[[Engine], None]] = []
_BEAT_S = 1.0


def on_beat(tell: Callable[[Engine], None]) -> None:
    """Call ``tell`` once a second from the loop in which an engine's network runs."""
    _beats.append(tell)


async def _beat(engine: Engine) -> None:
    while True:
        for tell in _beats:
            tell(engine)
        await asyncio.sleep(_BEAT_S)


def is_main_here(rank: str) -> bool:
    """Whether this process is the main worker; ``rank``: that of a worker which has no context."""
    return any(context.is_main for context in _contexts) if _contexts else rank == "0"


def abandon_all(failure: str) -> None:
    """Leave all jobs at once; other workers get the open slices. ``failure``: why the script failed, else empty."""
    _contexts.clear()  # nothing is left to be closed at the end of Python
    _clients.clear()
    for engine in list(_engines):
        engine.abandon(failure)


def _wished_index() -> int | None:
    """The rank that the environment of this process asks for; None if it asks for none."""
    wish = os.environ.get(ENV_INDEX) or os.environ.get(ENV_WISH)
    started = torchrun(os.environ)
    return int(wish) if wish else started.rank if started is not None else None


def _share_gpus_out(settings: Settings) -> Settings:
    """Choose the GPU by this process's number on its machine, if Slurm or torchrun has told it."""
    if settings.training.device != "auto" or ENV_INDEX in os.environ or not torch.cuda.is_available():
        return settings
    task, started = os.environ.get(ENV_LOCAL), torchrun(os.environ)
    local = int(task) if task else started.local_rank if started is not None else None
    if local is None:
        return settings
    device = f"cuda:{local % torch.cuda.device_count()}"
    return settings.model_copy(update={"training": settings.training.model_copy(update={"device": device})})


def _own_host(coordinator: str) -> str:
    """This machine's address on the route to the coordinator. Empty if there is no route."""
    try:
        return route_to(coordinator)
    except errors.ParamServerError:
        return ""


def _alone(settings: Settings) -> InProcessJob:
    if not settings.cluster.each_alone:
        refuse_each_alone(os.environ, "no cluster is configured")
    options = JobOptions(
        job=settings.cluster.job or "alone",
        servers=1,
        workers=1,
        consistency=consistency_of(settings.consistency.mode, settings.consistency.staleness),
        slices_per_step=settings.training.slices_per_step,
        seed=settings.training.seed,
        max_model_bytes=settings.cluster.max_model_bytes,
        # A single process cannot lose a member; a debugger's pause must not end the job.
        lease_s=1e9,
        grace_s=1e9,
        stall_s=0.0,
    )
    check_records(settings.run)
    if settings.web.metrics != "off" or settings.web.otlp:
        log.warning(
            "web.metrics and web.otlp are about processes of a cluster: a script that trains alone shows no metrics"
        )
    if settings.run.report:
        from paramserver.report.writing import check_report

        check_report(Path(settings.run.report))
    allow(None)  # the script's own process may run what the script has imported
    job = InProcessJob(options)
    job.start()
    if settings.run.records or settings.run.trackers:
        job.record(settings.run, shared(settings))
    return job


def _leave(context: Context) -> None:
    # After an uncaught error the script has not come to its end.
    try:
        context.engine.close(ended=not (sys.exc_info()[0] or getattr(sys, "last_value", None)))
    finally:
        context.engine.background.close()


def _leave_alone(context: Context, job: InProcessJob) -> None:
    from paramserver.alone.finish import finish_alone

    context.engine.close()
    job.settle()
    try:
        finish_alone(context, job)
    finally:
        job.close()
