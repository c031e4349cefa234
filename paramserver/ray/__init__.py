"""A job on a Ray cluster: each process of the job is a Ray actor, which Ray places, and starts again where it has died.

Importing this package does not import Ray. See docs/ray.md.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paramserver import errors
from paramserver.config import NO_CHECKPOINTS, load_settings
from paramserver.ray.job import Job, Result

__all__ = ["Job", "Result", "run", "start"]

_ONE_CPU = {"CPU": 1.0}


def run(script: str | Callable[..., object], args: Sequence[Any] = (), **options: Any) -> Result:
    """Train on the running Ray cluster, and wait for the end. The parameters are those of :func:`start`.

    >>> result = psr.run(train_function, [2], workers=2)
    >>> result.summary["epochs"]
    2

    Raises UserError, DeadlineError or JobFailedError.
    """
    with start(script, args, **options) as job:
        return job.wait()


def start(
    script: str | Callable[..., object],
    args: Sequence[Any] = (),
    *,
    servers: int = 1,
    workers: int = 2,
    replicas: int | str = "auto",
    checkpoint_dir: str = NO_CHECKPOINTS,
    insecure: bool = False,
    resources_per_server: Mapping[str, float] = _ONE_CPU,
    resources_per_worker: Mapping[str, float] = _ONE_CPU,
    max_restarts: int = 3,
    timeout_s: float = 180.0,
    settings: Mapping[str, object] | None = None,
) -> Job:
    """Begin a job on the running Ray cluster; returns at once. The job ends with this process.

    ``script``: a path that all nodes have, or a function, which Ray carries to the workers. ``checkpoint_dir``: a
    directory or URL that all nodes reach. ``insecure``: without TLS and tokens. ``max_restarts``: how often Ray starts
    each process again, -1 for always. ``timeout_s``: how long to wait for room on the cluster, in seconds.
    ``settings``: any others, by name, such as ``{"consistency.mode": "async"}``.
    Raises ConfigError if Ray is not installed or not initialized, or for settings that cannot be.

    >>> with psr.start(train_function, [2], settings={"training.slices_per_step": 4}) as job:
    ...     job.scale(workers=3)
    ...     result = job.wait()
    >>> len(result.digest)
    64
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise errors.ConfigError("Ray is not installed: pip install 'paramserver[ray]'") from error
    if not ray.is_initialized():
        raise errors.ConfigError("this process is not connected to a Ray cluster: call ray.init() first")
    given = {
        "cluster.servers": servers,
        "cluster.workers": workers,
        "cluster.replicas": replicas,
        "cluster.job": f"ray-{secrets.token_hex(4)}",
        "cluster.store": "memory",
        "cluster.join_timeout_s": timeout_s,
        "checkpoint.dir": checkpoint_dir,
        "security.insecure": insecure,
    }
    loaded = load_settings(overrides={**given, **(settings or {})})
    loaded.replicas(launched=False)  # refuses a wish that cannot be
    return Job(loaded, script, args, {"server": resources_per_server, "worker": resources_per_worker}, max_restarts)
