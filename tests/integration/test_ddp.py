"""A script for DDP with the backend "paramserver", in processes of its own, beside the same script with gloo."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.integration.harness import ROOT, Place, free_address, place_fixture

SCRIPT = ROOT / "tests" / "support" / "ranks" / "script.py"
MORE = SCRIPT.with_name("more.py")


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


def weights(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return found


def assert_as_gloo(place: Place, found: dict[str, torch.Tensor]) -> None:
    result = place.work / "gloo.pt"
    place.paramserver("run", "--ddp", SCRIPT, "--workers", "2", "--", "gloo", result).check()
    for name, expected in weights(result).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-5, msg=name)


def test_ddp_is_as_with_gloo_and_a_killed_rank_starts_all_again(place: Place) -> None:
    result, flag = place.work / "result.pt", place.work / "flag"
    done = place.paramserver(
        "run", "--ddp", SCRIPT, "--servers", "2", "--workers", "2", "--", "paramserver", result, flag
    ).check()
    assert flag.exists(), "rank 1 has killed itself"
    assert "worker-1 ended unexpectedly (signal 9): all 2 ranks are started again" in done.said
    assert "the script has ended on all 2 ranks" in done.said
    assert_as_gloo(place, weights(result))


@pytest.mark.long
def test_without_restarts_a_killed_rank_ends_the_run(place: Place) -> None:
    result, flag = place.work / "result.pt", place.work / "flag"
    done = place.paramserver(
        "run", "--ddp", SCRIPT, "--set", "cluster.max_restarts=0", "--", "paramserver", result, flag
    ).check(137)
    assert "no rank can go on without the others; cluster.max_restarts is 0" in done.said


@pytest.mark.long
def test_a_script_without_servers_says_how_to_start_it(place: Place) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none"}
    port = free_address().rpartition(":")[2]
    done = place.python(SCRIPT, "paramserver", place.work / "r.pt", environ={**environ, "MASTER_PORT": port})
    assert done.code == 1
    assert "start the script by paramserver run --ddp SCRIPT, or name the coordinator" in done.said


@pytest.mark.long
def test_ranks_of_torchrun_use_the_servers_of_a_job(place: Place) -> None:
    address, result = free_address(), place.work / "result.pt"
    environ = {"PARAMSERVER_CLUSTER__COORDINATOR": address}
    settings = ("--set", "run.ddp=true", "--set", f"cluster.coordinator={address}")
    coordinator = place.launch("start", "coordinator", "--servers", "1", *settings)
    server = place.launch("start", "server", "--join", address)
    port = free_address().rpartition(":")[2]
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port)
    place.start(sys.executable, *torchrun, SCRIPT, "paramserver", result, environ=environ).wait().check()
    assert_as_gloo(place, weights(result))
    for process in (server, coordinator):
        process.kill()


@pytest.mark.long
def test_what_builds_on_process_groups_is_as_with_gloo(place: Place) -> None:
    """What DDP's own tests try, ZeRO, hooks, FSDP2, subgroups, messages, objects, functional collectives."""
    found: dict[str, dict[str, list[torch.Tensor]]] = {}
    for backend in ("gloo", "paramserver"):
        result = place.work / f"{backend}.pt"
        place.paramserver("run", "--ddp", MORE, "--workers", "3", "--", backend, result).check()
        found[backend] = torch.load(result, weights_only=True)
    assert found["gloo"].keys() == found["paramserver"].keys()
    for case, expected in found["gloo"].items():
        for ours, theirs in zip(found["paramserver"][case], expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3 if "half" in case else 1e-5, atol=1e-4, msg=case)


@pytest.mark.long
def test_a_killed_server_starts_all_ranks_again(place: Place) -> None:
    result = place.work / "result.pt"
    run = place.launch(
        "run", "--ddp", SCRIPT, "--servers", "2", "--", "paramserver", result, place.work / "flag", "wait"
    )
    run.wait_for("rank 0 waits")
    servers = {pid for pid, line in place.processes().items() if "roles.child server" in line}
    assert len(servers) == 2
    os.kill(min(servers), signal.SIGKILL)
    run.wait_for(r"server-\d held a part of each collective: all 2 ranks are started again")
    (place.work / "flag.go").touch()
    run.wait().check()
    assert_as_gloo(place, weights(result))
