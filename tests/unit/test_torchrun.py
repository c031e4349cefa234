"""What torchrun's variables mean for a script: its rank, its GPU, and that it is not alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paramserver import api as entry
from paramserver.config import Settings, load_settings
from paramserver.errors import ConfigError
from paramserver.machine.torchrun import Torchrun, refuse_each_alone, torchrun
from paramserver.processes.environment import ENV_INDEX, ENV_LOCAL, ENV_WISH

STARTED = {"TORCHELASTIC_RUN_ID": "none", "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}


def test_what_torchrun_says() -> None:
    assert torchrun(STARTED) == Torchrun(rank=5, local_rank=1, processes=8)


@pytest.mark.parametrize("change", [{"RANK": ""}, {"WORLD_SIZE": "many"}])
def test_what_others_say_does_not_count(change: dict[str, str]) -> None:
    assert torchrun({**STARTED, **change}) is None
    assert torchrun({name: value for name, value in STARTED.items() if name != "TORCHELASTIC_RUN_ID"}) is None


def test_the_wishes_of_a_launcher_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert entry._wished_index() is None
    for variables, wish in [(STARTED, 5), ({ENV_WISH: "3"}, 3), ({ENV_INDEX: "2"}, 2)]:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert entry._wished_index() == wish


@pytest.mark.parametrize("start", [entry.init, entry.Client])
def test_several_processes_do_not_train_alone(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in STARTED.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"torchrun has started 8 processes, and no cluster is configured"):
        start()


SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}
BATCH = {"SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("variables", "who"),
    [
        (STARTED, "torchrun has started 8 processes"),
        (SLURM, "srun has started 4 processes"),
        ({**SLURM, "PMI_SIZE": "4", "PMI_RANK": "1"}, "srun has started 4 processes"),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"},
            "mpirun has started 2 processes",
        ),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "mpirun has started 2 processes"),
        ({"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0"}, "sets RANK and WORLD_SIZE has started 3"),
    ],
)
def test_whoever_has_started_several_processes_is_named(variables: dict[str, str], who: str) -> None:
    with pytest.raises(ConfigError, match=who) as refused:
        refuse_each_alone(variables, "no cluster is configured")
    joins = "paramserver start auto" if "srun" in who else "paramserver run SCRIPT --workers"
    assert joins in str(refused.value)
    assert "PARAMSERVER_CLUSTER__EACH_ALONE=true" in str(refused.value)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        BATCH,
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        {**SLURM, "SLURM_PTY_PORT": "40001"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"RANK": "silver", "WORLD_SIZE": "3"},
        {"WORLD_SIZE": "3"},
    ],
)
def test_one_process_may_train_alone(variables: dict[str, str]) -> None:
    """In a batch script of Slurm, and in a shell of srun, there is one process, whatever the number of tasks."""
    refuse_each_alone(variables, "no cluster is configured")


def test_each_may_be_meant_to_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    entry._alone(load_settings(None, {"cluster.each_alone": "true"})).close()


def test_one_process_of_torchrun_may_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**STARTED, "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    entry._alone(load_settings()).close()


@pytest.mark.parametrize(
    ("variables", "device"),
    [({}, "auto"), (STARTED, "cuda:1"), ({ENV_LOCAL: "6"}, "cuda:2"), ({ENV_INDEX: "6"} | STARTED, "auto")],
)
def test_gpus_are_shared_out_by_the_number_on_the_machine(
    variables: dict[str, str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "torch", SimpleNamespace(cuda=_Cuda))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert entry._share_gpus_out(Settings()).training.device == device


def test_a_device_that_a_person_has_named_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "torch", SimpleNamespace(cuda=_Cuda))
    monkeypatch.setenv(ENV_LOCAL, "1")
    settings = load_settings(None, {"training.device": "cpu"})
    assert entry._share_gpus_out(settings).training.device == "cpu"


class _Cuda:
    """Four GPUs."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 4
