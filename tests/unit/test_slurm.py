"""The part of a task of srun: role, number and the coordinator's address, from Slurm's variables."""

from __future__ import annotations

import pytest

from paramserver.errors import ConfigError
from paramserver.machine.slurm import first_node, place

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "node07",
}


def task(number: int, **others: str) -> dict[str, str]:
    """The variables of a task of seven."""
    node, local = divmod(number, 4)
    own = {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(local), "SLURMD_NODENAME": f"node0{7 + node}"}
    return {**STEP, **own, **others}


def test_task_0_leads_the_next_ones_serve_the_others_work() -> None:
    parts = [place(task(number), 2) for number in range(7)]
    assert [(part.role, part.index) for part in parts] == [
        ("coordinator", 0),
        ("server", 0),
        ("server", 1),
        *(("worker", index) for index in range(4)),
    ]
    assert [part.local for part in parts] == [0, 1, 2, 3, 0, 1, 2]
    # What all tasks have to agree on.
    assert {(part.coordinator, part.job, part.workers, part.several) for part in parts} == {
        ("node07:25376", "slurm-4711-0", 4, True)
    }
    assert [part.node for part in parts] == ["node07"] * 4 + ["node08"] * 3


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node3", "node3"),
        ("a,b", "a"),
        ("node[07-09,12],other3", "node07"),
        ("node[3,5]", "node3"),
        ("gpu-1,node[1-2]", "gpu-1"),
        ("rack[0-1]node[10-12]-ib,x", "rack0node10-ib"),
        ("n1.cluster.example,n2.cluster.example", "n1.cluster.example"),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize("nodes", ["", "[1-2", "node[", ",a", "(null)[x]"])
def test_what_is_no_list_of_nodes(nodes: str) -> None:
    with pytest.raises(ConfigError, match="no list of nodes"):
        first_node(nodes)


def test_on_one_node_the_coordinator_is_at_the_loopback_address() -> None:
    part = place(task(3, SLURM_STEP_NODELIST="node07"), 2)
    assert (part.coordinator, part.several) == ("127.0.0.1:25376", False)


def test_a_named_address_or_port_counts() -> None:
    assert place(task(3), 2, port=9000).coordinator == "node07:9000"
    assert place(task(3), 2, "login:8790").coordinator == "login:8790"


def test_steps_and_neighbouring_jobs_have_ports_of_their_own() -> None:
    environs = [task(0, SLURM_JOB_ID=str(4711 + job), SLURM_STEP_ID=str(step)) for job in range(100) for step in (0, 1)]
    ports = [int(place(environ, 2).coordinator.rpartition(":")[2]) for environ in environs]
    assert len(set(ports)) == 200
    assert all(20000 <= port < 30000 for port in ports)


def test_a_requeued_job_finds_its_place_again() -> None:
    assert place(task(5, SLURM_RESTART_COUNT="2"), 2) == place(task(5), 2)


@pytest.mark.parametrize(
    ("environ", "servers", "text"),
    [
        ({}, 1, "takes its role from the variables of Slurm, and there are none: start it with srun"),
        # As in a batch script, which has SLURM_PROCID.
        ({"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": "7"}, 1, "put srun before it"),
        (task(0), 6, r"too few tasks \(7\).*--ntasks 8 or more"),
        (task(0, SLURMD_NODENAME="node08"), 2, "task 0, the coordinator, is on node node08.*--join node08:PORT"),
        (task(0, SLURM_HET_SIZE="2"), 2, "heterogeneous"),
        (task(0, SLURM_PROCID="x"), 2, 'SLURM_PROCID is "x", which is no number'),
        (task(0, SLURM_STEP_NODELIST="node["), 2, "no list of nodes"),
    ],
)
def test_refused(environ: dict[str, str], servers: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        place(environ, servers)


def test_a_named_coordinator_may_be_on_any_node() -> None:
    assert place(task(0, SLURMD_NODENAME="node08"), 2, "node08:8790").role == "coordinator"
