"""The variables that torchrun and other programs set for each of the processes that they start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paramserver.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Torchrun:
    """One process of torchrun. ``local_rank``: its number on its machine. ``processes``: on all machines."""

    rank: int
    local_rank: int
    processes: int


def torchrun(environ: Mapping[str, str]) -> Torchrun | None:
    """The numbers that torchrun gave this process, or None if torchrun has not started it.

    Others set RANK and WORLD_SIZE, too. Only torchrun sets TORCHELASTIC_RUN_ID.
    """
    numbers = [environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    if "TORCHELASTIC_RUN_ID" not in environ or not all(number.isdecimal() for number in numbers):
        return None
    return Torchrun(*map(int, numbers))


# Who starts several processes of a script: the variables with their number and with the number of this process; a
# variable that tells the program from others.
_STARTERS = (
    ("torchrun", "WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_ID"),  # a batch script has no step
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", ""),
    ("mpirun", "PMI_SIZE", "PMI_RANK", ""),
    ("mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", ""),
    ("mpirun", "PMIX_SIZE", "PMIX_RANK", ""),
    ("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", ""),
    ("horovodrun", "HOROVOD_SIZE", "HOROVOD_RANK", ""),
    ("a program that sets RANK and WORLD_SIZE", "WORLD_SIZE", "RANK", ""),  # such as the operator of Kubeflow
)
# An interactive shell of srun: other tasks of the step have no terminal, and have ended.
_SHELL = "SLURM_PTY_PORT"


def started_together(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Who has started this process together with others, and how many processes they are; None: nobody has.

    >>> started_together({"RANK": "0", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"})
    ('torchrun', 4)
    """
    for who, size, number, sign in _STARTERS:
        given = environ.get(size, ""), environ.get(number, "")
        if not all(text.isdecimal() for text in given) or (sign and sign not in environ):
            continue
        if int(given[0]) > 1 and not (who == "srun" and _SHELL in environ):
            return who, int(given[0])
    return None


def refuse_each_alone(environ: Mapping[str, str], what: str) -> None:
    """Raise ConfigError if this process and others would each train a model of their own. ``what``: the process is."""
    started = started_together(environ)
    if started is None:
        return
    who, count = started
    if who == "srun":
        way = f"start them with: srun --ntasks {count + 2} paramserver start auto SCRIPT --servers 1"
    else:
        way = (
            "start a coordinator and servers, and name the coordinator in PARAMSERVER_CLUSTER__COORDINATOR=HOST:PORT "
            f"or in paramserver.toml, or start all on one machine with: paramserver run SCRIPT --workers {count}"
        )
    raise ConfigError(
        f"{who} has started {count} processes, and {what}: each would train a model of its own; {way}; if each is "
        "meant to train alone, set cluster.each_alone = true (PARAMSERVER_CLUSTER__EACH_ALONE=true)"
    )
