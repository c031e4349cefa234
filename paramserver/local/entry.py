"""``ps.init`` and ``ps.Client``: join the configured cluster, or run alone."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import structlog

from paramserver.config import Settings, load_settings
from paramserver.coordinator.service import JobOptions
from paramserver.local import logs
from paramserver.local.alone import InProcessJob, consistency_of
from paramserver.local.roles import ENV_INDEX
from paramserver.transport.session import JoinOptions
from paramserver.v1 import types_pb2
from paramserver.worker.background import Background
from paramserver.worker.client import RawClient
from paramserver.worker.context import Context, seed_and_threads
from paramserver.worker.engine import Engine

log = structlog.get_logger("paramserver")


def init(config: str | os.PathLike[str] | None = None, **overrides: object) -> Context:
    """Join the job that is configured, or train alone in this process if none is.

    ``config``: a TOML file (else ``PARAMSERVER_CONFIG``, ``paramserver.toml``). ``overrides``: settings by dotted name
    with the dot written as two underscores, as in ``init(training__seed=1)``. Seeds torch, NumPy and Python with
    ``training.seed``, so that models built afterwards are equal everywhere.

    Raises ConfigError for settings that are wrong or differ from the job's, UnavailableError if nobody answers.
    """
    settings = _settings(config, overrides)
    logs.configure(settings.log.level)
    seed_and_threads(settings)
    if settings.cluster.coordinator:
        engine = _connected(settings, settings.cluster.coordinator)
        context = Context(settings, engine, _leave)
    else:
        job = _alone(settings)
        context = Context(settings, job.worker(0), lambda ctx: _leave_alone(ctx, job))
        log.info(
            "no cluster is configured: training alone in this process",
            mode=str(job.options.consistency),
            slices_per_step=job.coordinator.slices_per_step,
        )
    atexit.register(context.close)
    return context


class Client(RawClient):
    """Push and pull of named arrays, for those without a torch module (see `RawClient`).

    ``coordinator``: host:port of the job; left out, the configured job, or one of its own in this process.
    Raises UnavailableError if nobody answers there.
    """

    def __init__(self, coordinator: str | None = None, *, config: str | os.PathLike[str] | None = None) -> None:
        settings = _settings(config, {})
        logs.configure(settings.log.level)
        address = coordinator or settings.cluster.coordinator
        if address:
            # Who was started as a worker of this job is expected as one; somebody from outside only looks at first,
            # and takes the job's settings as they are.
            own = address == settings.cluster.coordinator
            engine = _connected(settings, address, own, types_pb2.ROLE_WORKER if own else types_pb2.ROLE_OBSERVER)

            def close() -> None:
                engine.close()
                engine.background.close()
        else:
            job = _alone(settings)
            engine = job.worker(0)

            def close() -> None:
                engine.close()
                job.close()

        super().__init__(engine, close, settings.training.chunk_bytes)


def _settings(config: str | os.PathLike[str] | None, overrides: Mapping[str, object]) -> Settings:
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_settings(Path(config) if config is not None else None, dotted)


def _connected(
    settings: Settings, address: str, own: bool = True, role: types_pb2.Role = types_pb2.ROLE_WORKER
) -> Engine:
    from paramserver.transport import fork, grpc

    fork.guard()
    index = os.environ.get(ENV_INDEX)
    options = JoinOptions(
        role=role,
        job=settings.cluster.job if own else "",
        consistency=consistency_of(settings.consistency.mode, settings.consistency.staleness) if own else None,
        slices_per_step=settings.training.slices_per_step if own else 0,
        seed=settings.training.seed if own else None,
        index=int(index) if index else None,
        pid=os.getpid(),
        address=_own_host(address),
        join_timeout_s=settings.cluster.join_timeout_s,
        log_interval_s=settings.log.interval_s,
    )
    background = Background()
    engine = Engine(background, grpc.connect, address, options, settings.cluster.wait_timeout_s)
    try:
        engine.join()
    except BaseException:
        background.close()
        raise
    return engine


def _own_host(coordinator: str) -> str:
    """This machine's address on the route to the coordinator; no packet is sent. Empty if there is no route."""
    host, _, port = coordinator.rpartition(":")
    try:
        family, kind, number, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return ""


def _alone(settings: Settings) -> InProcessJob:
    options = JobOptions(
        job=settings.cluster.job or "alone",
        servers=1,
        workers=1,
        consistency=consistency_of(settings.consistency.mode, settings.consistency.staleness),
        slices_per_step=settings.training.slices_per_step,
        seed=settings.training.seed,
        # Nobody can die alone; a debugger's pause is no reason to give a worker up.
        lease_s=1e9,
        grace_s=1e9,
    )
    job = InProcessJob(options)
    job.start()
    return job


def _leave(context: Context) -> None:
    context.engine.close()
    context.engine.background.close()


def _leave_alone(context: Context, job: InProcessJob) -> None:
    from paramserver.local.finish import finish_alone

    context.engine.close()
    finish_alone(context, job)
    job.close()
