"""``paramserver drain``, ``restart``, ``scale`` and ``stop``: commands that change a running job."""

from __future__ import annotations

import sys
from typing import Annotated

from paramserver.cli.common import shows, tell
from paramserver.cli.target import NEAR, Where, find_target
from paramserver.config import MAX_PROCESSES
from paramserver.errors import ConfigError

WAIT_S = 60.0
# A server that comes back gets a copy of its parts of the model.
RESTART_S = 600.0
CALL_S = 10.0


def drain(name: str, /, *, where: Where = NEAR) -> int:
    """Ask a worker or a server to leave a running job.

    A worker hands in what it is computing, and its share goes to the others. A server leaves when others hold all of
    its parts of the model (cluster.replicas); another one may be started in its place at any time.

    Parameters
    ----------
    name
        Its name, such as worker-3 or server-1 ("paramserver status" lists them).
    """
    from paramserver.v1.coordinator_pb2 import DrainRequest

    target = find_target(where)
    target.call("Coordinator.Drain", DrainRequest(name=name, wait_s=WAIT_S), WAIT_S + 10.0)
    tell(f"{name} has left.")
    return 0


def restart(name: str, /, *, where: Where = NEAR) -> int:
    """Restart servers of a running job, one after the other, while training goes on.

    Each server leaves when others hold all of its parts of the model (cluster.replicas), and ends with exit code 75.
    "run", --restart, Docker, systemd and Kubernetes start it again. The next one follows when this one has its parts
    again.

    Parameters
    ----------
    name
        A server, such as server-1, or "servers" for all of them.
    """
    from paramserver.v1.coordinator_pb2 import DrainRequest, StatusRequest, StatusResponse

    target = find_target(where)
    status = target.call("Coordinator.Status", StatusRequest(), CALL_S)
    assert isinstance(status, StatusResponse)
    there = [process.name for process in status.processes if process.role == "server" and not process.gone]
    for one in there if name == "servers" else [name]:
        target.call("Coordinator.Drain", DrainRequest(name=one, wait_s=RESTART_S, restart=True), RESTART_S + 10.0)
        tell(f"{one} has been restarted.", flush=True)
    return 0


def scale(wish: str, /, *, where: Where = NEAR) -> int:
    """Change the number of workers or servers of a running job, as in: paramserver scale workers=5

    A job of "paramserver run" gets new workers, or the workers of the highest ranks leave. Elsewhere workers can be
    asked to leave, but new ones have to be started on their machines. The slices of a synchronous step stay the same.

    With servers=N the model moves: afterwards each of N servers holds as much of it. The weights stay the same, bit for
    bit. The model moves while workers train; they wait for the last step of it only. "paramserver run" starts and ends
    servers by itself. Elsewhere start the new ones within a minute; the servers of the highest numbers leave. A change
    that cannot be made changes nothing.

    Parameters
    ----------
    wish
        workers=N or servers=N
    """
    from paramserver.v1.coordinator_pb2 import ScaleRequest, ScaleResponse

    who, number = wished(wish)
    target = find_target(where)
    if who == "servers":
        request, limit_s = ScaleRequest(servers=number, wait_s=WAIT_S), RESTART_S
    else:
        request, limit_s = ScaleRequest(workers=number, wait_s=WAIT_S), WAIT_S + 10.0
    response = target.call("Coordinator.Scale", request, limit_s)
    assert isinstance(response, ScaleResponse)
    if who == "servers":
        tell(f"{response.servers} servers now. Workers waited for {response.paused_s:.2f} s.")
        return 0
    tell(f"{response.workers} workers now.")
    if response.note:
        tell(f"paramserver: warning: {response.note}", file=sys.stderr)
    return 0


def wished(wish: str) -> tuple[str, int]:
    """("workers", N) or ("servers", N) for a wish like "workers=N". Raises ConfigError for anything else."""
    key, _, value = wish.partition("=")
    who = key.removeprefix("cluster.")
    if who not in ("workers", "servers"):
        raise ConfigError(f'scale takes workers=N or servers=N, not "{wish}"')
    if not (value.isascii() and value.isdigit() and len(value) < 10 and 1 <= int(value) <= MAX_PROCESSES):
        raise ConfigError(f'{who} is "{value}", but must be an integer from 1 to {MAX_PROCESSES}')
    return who, int(value)


def stop(*, reason: Annotated[str, shows("TEXT")] = "", where: Where = NEAR) -> int:
    """End a running job: its workers leave, the weights so far are gathered, coordinator and servers end.

    Parameters
    ----------
    reason
        Why, in words, for the logs.
    """
    from paramserver.v1.coordinator_pb2 import StopRequest

    target = find_target(where)
    target.call("Coordinator.Stop", StopRequest(reason=reason), WAIT_S)
    tell("The job is stopping.")
    return 0
