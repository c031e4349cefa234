"""The place of a task of `srun` by Slurm's variables: its role, its number, and the address of the coordinator."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from paramserver import errors
from paramserver.transport.addresses import join

# Ports of coordinators whose port nobody has chosen; below those that Linux gives to connections.
_PORTS = range(20000, 30000)
# So many steps of a job have ports of their own, which are no ports of the next job.
_STEPS = 16
_EXAMPLE = "srun --ntasks 7 paramserver start auto train.py --servers 2"
_BY_NAME = "start the roles by name, with paramserver start coordinator, server and worker"


@dataclass(frozen=True, slots=True)
class Placed:
    """One task. ``index``: of the server or the worker, from 0. ``local``: the task's number on its node.

    ``workers``: of the job. ``coordinator``: host:port. ``several``: whether the tasks may be on several nodes.
    ``node``: the name of the task's node, or empty. ``job``: a name that a requeued job keeps.
    """

    role: Literal["coordinator", "server", "worker"]
    index: int
    local: int
    workers: int
    coordinator: str
    several: bool
    node: str
    job: str


def place(environ: Mapping[str, str], servers: int, coordinator: str = "", port: int | None = None) -> Placed:
    """The part of a task: task 0 is the coordinator, the next ``servers`` tasks are servers, the others are workers.

    ``coordinator``: its address, if a person has named it. Otherwise it is the first node of the step, or the loopback
    address if there is one node, and ``port``, or a port that follows from the numbers of job and step.
    Raises ConfigError if the process is no task of `srun`, or if there are too few tasks.
    """
    _refuse(environ)
    task, tasks = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS")
    nodes = environ["SLURM_STEP_NODELIST"]
    several, first, node = "," in nodes or "[" in nodes, first_node(nodes), environ.get("SLURMD_NODENAME", "")
    if tasks < servers + 2:
        raise errors.ConfigError(
            f"srun has started too few tasks ({tasks}): a coordinator, {servers} servers and a worker are "
            f"{servers + 2}; say --ntasks {servers + 2} or more"
        )
    if task == 0 and several and not coordinator and node not in ("", first):
        raise errors.ConfigError(
            f"task 0, the coordinator, is on node {node}, but the others look for it on {first}, the first node of the "
            f"step: name its address with --join {node}:PORT, or do without --distribution=arbitrary"
        )
    job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID")
    chosen = port or _PORTS[(_STEPS * job + step) % len(_PORTS)]
    role: Literal["coordinator", "server", "worker"] = (
        "coordinator" if task == 0 else "server" if task <= servers else "worker"
    )
    return Placed(
        role=role,
        index={"coordinator": 0, "server": task - 1, "worker": task - 1 - servers}[role],
        local=_number(environ, "SLURM_LOCALID"),
        workers=tasks - 1 - servers,
        coordinator=coordinator or join(first if several else "127.0.0.1", chosen),
        several=several,
        node=node,
        job=f"slurm-{job}-{step}",
    )


def first_node(nodes: str) -> str:
    """The first node of a list in Slurm's notation: "node07" of "node[07-09,12],other3"."""
    found = re.fullmatch(r"((?:[^,\[\]]|\[[^\[\]]*\])+)(?:,.*)?", nodes)
    name = re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[1]) if found else ""
    if not name or "[" in name:
        raise errors.ConfigError(
            f'SLURM_STEP_NODELIST is "{nodes}", which is no list of nodes: name the coordinator with --join HOST:PORT, '
            f"or {_BY_NAME}"
        )
    return name


def _refuse(environ: Mapping[str, str]) -> None:
    if "SLURM_JOB_ID" not in environ:
        raise errors.ConfigError(
            "start auto takes its role from the variables of Slurm, and there are none: start it with srun, such as "
            f'"{_EXAMPLE}"; elsewhere {_BY_NAME}'
        )
    # A batch script has SLURM_PROCID, too, but no step.
    if not {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"} <= environ.keys():
        raise errors.ConfigError(
            f'this process is in a job of Slurm, but srun has not started it: put srun before it, as in "{_EXAMPLE}"'
        )
    if "SLURM_HET_SIZE" in environ:
        raise errors.ConfigError(f"start auto does not know the roles in a heterogeneous job of Slurm: {_BY_NAME}")


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise errors.ConfigError(f'{name} is "{text}", which is no number: {_BY_NAME}')
    return int(text)
