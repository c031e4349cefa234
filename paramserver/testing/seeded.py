"""A plan made from a seed. The same seed and shape of cluster give the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paramserver.errors import ConfigError
from paramserver.testing.faults import chance
from paramserver.testing.plan import Plan, Planned

# Faults of the storage have to be asked for: a run without --checkpoint-dir does not wait for its storage.
KINDS = ("worker", "server", "coordinator", "store", "network")
ALL_KINDS = (*KINDS, "storage")

_WORKER_PLACES = ("worker.after_pull", "worker.after_grad", "worker.between_shards")
_SERVER_PLACES = (
    "push.recv",
    "push.after_stage",
    "step.before_decide",
    "step.after_decide",
    "commit.before_log",
    "commit.after_log_before_reply",
    "reply.drop",
)
# Places that a server without parameters never reaches.
_APPLY_PLACES = ("apply.mid", "apply.after_weights_before_opt")
_PUSHES = ("drop", "lose_reply", "delay", "duplicate", "reorder", "cut")
_PULLS = ("drop", "lose_reply", "delay", "duplicate")
_STOP_S = (0.2, 1.0)
_DELAY_S = (0.02, 0.3)
_STORAGE_S = (0.5, 3.0)


@dataclass(frozen=True, slots=True)
class Shape:
    """The cluster that a plan is made for. ``steps``: of the whole run; asynchronous: slices of the whole run."""

    servers: int
    workers: int
    steps: int
    mode: str = "sync"


def made(seed: int, faults: int, shape: Shape, kinds: Sequence[str] = KINDS) -> Plan:
    """A plan of so many faults of these ``kinds`` ("network", or the role that is struck). All of them can strike.

    Raises ConfigError for unknown kinds.
    """
    for kind in kinds:
        if kind not in ALL_KINDS:
            raise ConfigError(f"there is no kind of fault {kind!r}; the kinds are {', '.join(ALL_KINDS)}")
    if faults < 1 or not kinds:
        raise ConfigError(f"a plan needs at least one fault and one kind, not {faults} of {len(kinds)} kinds")
    return Plan(tuple(_Dice(seed, number, shape).fault(kinds) for number in range(faults)), seed)


class _Dice:
    """The choices for one fault."""

    def __init__(self, seed: int, number: int, shape: Shape) -> None:
        self._key = (seed, number, shape)
        self._shape = shape
        self._throws = 0

    def fault(self, kinds: Sequence[str]) -> Planned:
        kind = self._one(sorted(set(kinds), key=ALL_KINDS.index))
        step = int(self._throw() * self._shape.steps)
        when: dict[str, int] = {"step": step}
        if self._shape.mode == "async":  # whose steps are versions, of which a process sees only some
            when = {"nth": 1 + step // (2 * self._shape.workers)}
        match kind:
            case "worker":
                do = self._one(("kill", "kill", "stop"))
                return Planned("at", self._one(_WORKER_PLACES), do, "worker-*", seconds=self._between(_STOP_S), **when)
            case "server":
                return self._server(when)
            case "network":
                return self._call(step)
            case "coordinator":
                return self._coordinator(step)
            case "storage":
                do = self._one(("full", "read_only", "gone", "slow"))
                return Planned("storage", "checkpoints", do, step=step, seconds=self._between(_STORAGE_S))
        return Planned("process", "store", self._one(("kill", "stop")), "store", step, seconds=self._between(_STOP_S))

    def _server(self, when: dict[str, int]) -> Planned:
        what = self._one((*_SERVER_PLACES, *_APPLY_PLACES))
        who = "server-*" if what in _APPLY_PLACES else f"server-{int(self._throw() * self._shape.servers)}"
        actions = ["kill", "kill", "stop", "delay"]
        if what in ("push.recv", "reply.drop"):
            actions.append("error")
        do = self._one(actions)
        return Planned("at", what, do, who, seconds=self._between(_DELAY_S if do == "delay" else _STOP_S), **when)

    def _call(self, step: int) -> Planned:
        method = self._one(("Shard.Push", "Shard.Push", "Shard.Pull", "Coordinator.Join", "Coordinator.Session"))
        start: int | None = step
        if method == "Shard.Push":
            do = self._one(_PUSHES)
        elif method == "Shard.Pull":
            do = self._one(_PULLS)
        else:  # once at the start, and again only after other faults
            do, start = self._one(("drop", "lose_reply", "delay")), None
        seconds = self._between(_DELAY_S if do in ("delay", "reorder") else _STOP_S)
        return Planned("call", method, do, "worker-*", start, seconds=seconds)

    def _coordinator(self, step: int) -> Planned:
        do = self._one(("kill", "kill", "stop"))
        return Planned("process", "coordinator", do, "coordinator", step, seconds=self._between(_STOP_S))

    def _throw(self) -> float:
        self._throws += 1
        return chance(*self._key, self._throws)

    def _one(self, choices: Sequence[str]) -> str:
        return choices[int(self._throw() * len(choices))]

    def _between(self, limits: tuple[float, float]) -> float:
        return round(limits[0] + self._throw() * (limits[1] - limits[0]), 2)
