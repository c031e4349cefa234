"""A job on Ray, as its driver sees the job: the actors, the wait for their ends, other numbers of them."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from paramserver import errors, logs
from paramserver.config import Settings, env_name
from paramserver.machine.jobs import call_coordinator
from paramserver.pki import certs
from paramserver.pki.certs import ADMIN_TOKEN, JOIN_TOKEN
from paramserver.pki.security import load_security
from paramserver.processes.environment import ENV_WISH
from paramserver.processes.process import Guard
from paramserver.ray.actor import FILES, Role, actor_options
from paramserver.transport.addresses import join
from paramserver.v1 import coordinator_pb2

if TYPE_CHECKING:
    from google.protobuf.message import Message

_SHIM = "import sys, ray.cloudpickle as p\nwith open(sys.argv[1], 'rb') as f: call, args = p.load(f)\ncall(*args)\n"
_LOOK_S, _SAY_S, _SCALE_S, _END_S = 0.5, 5.0, 600.0, 10.0


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a job. ``summary``: the content of the file that ``--summary`` writes.

    >>> result = Result({"weights_sha256": "5eed"})
    >>> result.digest
    '5eed'
    """

    summary: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 of the final weights, in hexadecimal digits.

        >>> Result({"weights_sha256": "5eed"}).digest
        '5eed'
        """
        return str(self.summary["weights_sha256"])


def no_room(missing: Sequence[str], waited_s: float, total: Mapping[str, float], free: Mapping[str, float]) -> str:
    """The sentence for a job whose processes Ray cannot place. ``total``, ``free``: the cluster's resources."""
    shown = {key: amount for key, amount in total.items() if key in ("CPU", "GPU")}
    have = ", ".join(f"{amount:g} {key} ({free.get(key, 0.0):g} free)" for key, amount in shown.items()) or "no CPU"
    return (
        f"Ray has found no place for {', '.join(missing)} within {waited_s:g} s: the cluster has {have}; add nodes, "
        "ask for fewer or smaller processes (servers, workers, resources_per_worker), or wait longer (timeout_s)"
    )


class Job:
    """A running job. It owns the actors, and ends them when it is closed; use it in a ``with`` statement.

    >>> job = psr.start(train_function, [2], workers=1)
    >>> job.close()
    """

    def __init__(
        self,
        settings: Settings,
        script: str | Callable[..., object],
        args: Sequence[Any],
        resources: Mapping[str, Mapping[str, float]],
        max_restarts: int,
    ) -> None:
        import ray

        self._ray, self._settings, self._resources, self._max_restarts = ray, settings, resources, max_restarts
        self._argv, self._files = ["--", str(script), *map(str, args)], {}
        if callable(script):
            self._argv = ["--", f"{FILES}/train.py", f"{FILES}/train.pickle"]
            self._files = {"train.py": _SHIM.encode(), "train.pickle": ray.cloudpickle.dumps((script, tuple(args)))}
        # Workers and servers that were started, those that have ended included: each has a number of its own.
        self._counts = {"server": 0, "worker": 0}
        # Names by what Ray promises: that the actor lives, and that its process has ended.
        self._placing: dict[Any, str] = {}
        self._running: dict[Any, str] = {}
        self._actors: list[Any] = []
        self._since = self._said = time.monotonic()
        self._guard, self._directory = Guard(), tempfile.mkdtemp(prefix="paramserver-ray-")
        self._guard.tell("directory", self._directory)  # even if this process is killed
        self._certs = Path(self._directory, "certs")
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        """Place all actors; the coordinator on the node of this process, without which there is no job anyway."""
        if not self._settings.security.insecure:
            certs.init(self._certs, job=self._settings.cluster.job)
        here = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            self._ray.get_runtime_context().get_node_id(), soft=False
        )
        actor = self._actor("coordinator", num_cpus=0, scheduling_strategy=here)
        answer = actor.place.remote()
        if not self._ray.wait([answer], timeout=self._settings.cluster.join_timeout_s)[0]:
            raise errors.DeadlineError(self._no_room())
        host, port = self._ray.get(answer)
        self._address = join(host, port)
        environ = {
            **self._settings.as_environment(),
            env_name("cluster.store"): self._settings.cluster.store,  # may hold a password
            env_name("cluster.listen"): join("0.0.0.0", port),
            env_name("cluster.advertise_host"): host,
        }
        self._start("coordinator", "coordinator", actor, [], environ)
        for role in self._counts:
            self._add(role, getattr(self._settings.cluster, f"{role}s"))

    def _actor(self, name: str, **options: Any) -> Any:
        """Ask Ray for an actor. Ray's autoscaler sees what the actor needs."""
        restarts = {"max_restarts": self._max_restarts, "max_task_retries": -1}
        actor = self._ray.remote(Role).options(**restarts, **options).remote()
        self._actors.append(actor)
        self._placing[actor.__ray_ready__.remote()] = name
        return actor

    def _start(self, role: str, name: str, actor: Any, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        """Let an actor begin; it does so when it has a place."""
        needed = ["ca.crt", f"{role}.crt", f"{role}.key", JOIN_TOKEN, *([ADMIN_TOKEN] if role == "coordinator" else [])]
        files = (
            {} if self._settings.security.insecure else {one: self._certs.joinpath(one).read_bytes() for one in needed}
        )
        own = self._files if role == "worker" else {}
        self._running[actor.run.remote(role, argv, environ, {**files, **own})] = name

    def _add(self, role: str, number: int) -> None:
        """Servers lie on different nodes as far as Ray finds room; a node then takes few of them along."""
        spread = {"scheduling_strategy": "SPREAD"} if role == "server" else {}
        self._since = time.monotonic()
        for index in range(self._counts[role], self._counts[role] + number):
            name = f"{role}-{index}"
            environ = {**self._settings.given_as_environment(), env_name("cluster.coordinator"): self._address}
            actor = self._actor(name, **spread, **actor_options(self._resources[role]))
            argv = self._argv if role == "worker" else []
            self._start(role, name, actor, argv, {**environ, ENV_WISH: str(index)})
        self._counts[role] += number

    def wait(self) -> Result:
        """Wait until the model is trained, and return what came out.

        >>> job.wait().summary["state"]
        'done'

        Raises DeadlineError if Ray finds no room for the processes in time, JobFailedError if one of them fails.
        """
        while True:
            self._check_placed()
            for ended in self._ray.wait(list(self._running), timeout=_LOOK_S)[0]:
                name = self._running.pop(ended)
                try:
                    code, summary = self._ray.get(ended)
                except self._ray.exceptions.RayActorError as error:
                    raise errors.JobFailedError(
                        f"{name} has died, and Ray has started it again {self._max_restarts} times already: see its "
                        "lines above, or allow more with max_restarts"
                    ) from error
                if code:
                    raise errors.JobFailedError(f"{name} has ended with exit code {code}: its lines above say why")
                if name == "coordinator":
                    self._ray.wait(list(self._running), num_returns=len(self._running), timeout=_END_S)
                    return Result(json.loads(summary))

    def _check_placed(self) -> None:
        """Say who has no place yet. Raises DeadlineError."""
        if not self._placing:
            return
        for there in self._ray.wait(list(self._placing), num_returns=len(self._placing), timeout=0)[0]:
            del self._placing[there]
        now = time.monotonic()
        if self._placing and now - self._since > self._settings.cluster.join_timeout_s:
            raise errors.DeadlineError(self._no_room())
        if self._placing and now - self._said > _SAY_S:
            self._said = now
            logs.say(f"waiting for Ray to place {', '.join(self._placing.values())}")

    def _no_room(self) -> str:
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        return no_room(list(self._placing.values()), self._settings.cluster.join_timeout_s, total, free)

    def scale(self, *, workers: int | None = None, servers: int | None = None) -> None:
        """Have another number of workers or servers while the job trains; the model moves to other servers.

        Call it from another thread than :meth:`wait`. Raises ConfigError, DeadlineError or UnavailableError.

        >>> job.scale(workers=2)
        """
        for role, wanted in (("worker", workers), ("server", servers)):
            if wanted is None:
                continue
            present = self._present(role)
            self._add(role, max(0, wanted - present))
            if role == "server" or wanted < present:
                self._call("Coordinator.Scale", coordinator_pb2.ScaleRequest(**{f"{role}s": wanted}, wait_s=_SCALE_S))

    def _present(self, role: str) -> int:
        return sum(name.startswith(role) for name in self._running.values())

    def _call(self, method: str, request: Message) -> Message:
        """Ask the coordinator, in a thread: a notebook has an event loop of its own."""
        security = self._settings.security.model_copy(
            update={"certs": str(self._certs) if self._certs.exists() else ""}
        )
        known = load_security(self._settings.model_copy(update={"security": security}), "admin")
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call_coordinator, self._address, method, request, _SCALE_S, known).result()

    def close(self) -> None:
        """End all processes of the job, if it still runs.

        >>> job.close()
        """
        for actor in self._actors:
            self._ray.kill(actor)
        shutil.rmtree(self._directory, ignore_errors=True)
        self._guard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
