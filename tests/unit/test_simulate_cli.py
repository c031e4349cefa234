"""`paramserver simulate`: what it prints and writes, and how it refuses what makes no sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paramserver.cli.main import main
from paramserver.simulate import costs, units

JOB = "simulate --params 1M --compute 0.1s --steps 20"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_synchronous_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB.split(), "--workers", "4", "--servers", "2", "--batch", "32", "--json", "out.json"]) == 0
    printed = capsys.readouterr().out
    assert (
        "4 workers, 2 servers, 1 backup of each shard, 1 M parameters (4 MB), 10 Gb/s, sync, 4 slices per step"
        in printed
    )
    said = json.loads(Path("out.json").read_text())
    assert said["scenario"]["workers"] == 4
    assert len(said["versions"]) == 20
    assert 7 < said["outcome"]["steps_per_s"] < 10
    assert f"{said['outcome']['slices_per_s'] * 32:.4g}" in printed


def test_an_asynchronous_job_shows_its_staleness(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB.split(), "--mode", "async", "--staleness", "2", "--straggler", "exp:1"]) == 0
    printed = capsys.readouterr().out
    assert "async with staleness 2" in printed
    assert "2 slices at most" in printed
    assert "updates of others between" in printed
    assert "#" in printed


@pytest.mark.long
def test_suggestions_name_a_number_of_servers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB.split(), "--workers", "4", "--bandwidth", "100Mb/s", "--suggest", "--json", "out.json"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("<- enough") == 1
    assert "ring all-reduce" in printed
    said = json.loads(Path("out.json").read_text())
    assert said["suggested"] in [{k: one[k] for k in ("alone", "beside_workers")} for one in said["servers"]]
    assert any(one["beside_workers"] for one in said["servers"])


def test_where_processes_are_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB.split(), "--workers", "2", "--hosts", "1", "--cores", "2"]) == 0
    assert "(4 MB), one host with 2 cores, shm, sync" in capsys.readouterr().out
    beside = ["--workers", "2", "--servers", "3", "--with-server", "--transport", "grpc", "--placement", "split"]
    assert main([*JOB.split(), *beside]) == 0
    assert "a server beside each worker, 10 Gb/s" in capsys.readouterr().out


def test_what_becomes_of_servers_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    events = ["--event", "kill:1@0.5s", "--event", "start:1@1s"]
    assert main([*JOB.split(), "--workers", "2", "--servers", "3", *events, "--json", "out.json"]) == 0
    printed = capsys.readouterr().out
    assert "3 servers, 1 backup of each shard" in printed
    assert "server-1 dies" in printed
    assert "all shards have their backups" in printed
    said = json.loads(Path("out.json").read_text())
    assert [one["at_s"] for one in said["events"] if one["waited_s"]] == [0.5, 1.0]
    assert said["brought_again"] > 0


@pytest.mark.parametrize(
    ("flags", "advised"),
    [
        ("--workers 8 --servers 2 --params 25M", True),
        ("--workers 8 --servers 6 --params 25M", False),
        ("--workers 8 --servers 2 --params 60k", False),
        ("--workers 8 --servers 2 --params 25M --slices 64", False),
        ("--workers 1 --servers 1 --params 25M", False),
        ("--workers 8 --servers 2 --params 25M --mode async", False),
        ("--workers 8 --servers 2 --params 25M --straggler slow:1x4", False),
        ("--workers 8 --servers 10 --params 25M --with-server", False),
        ("--workers 8 --servers 2 --params 25M --hosts 1", False),
    ],
)
def test_all_reduce_is_advised_where_the_formulas_say_so(
    flags: str, advised: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--compute", "0.1s", "--steps", "2", *flags.split()]) == 0
    assert ("Use all-reduce or FSDP, or" in capsys.readouterr().out) is advised


def test_numbers_come_from_a_file_of_settings(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.toml").write_text(
        '[cluster]\nworkers = 3\nservers = 2\n[consistency]\nmode = "async"\nstaleness = "unbounded"\n'
    )
    assert main([*JOB.split(), "--config", "job.toml", "--servers", "1"]) == 0
    assert "3 workers, 1 server, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ("simulate --compute 1s", "say what a slice takes and how large the model is"),
        ("simulate --params 1M --compute 1", '--compute is "1"'),
        ("simulate --params 1.5 --compute 1s", '--params is "1.5"'),
        (f"{JOB} --bandwidth 10", '--bandwidth is "10", but must be a bandwidth such as 10Gb/s'),
        (f"{JOB} --workers 0", "cluster.workers is"),
        (f"{JOB} --straggler odd", '--straggler "odd" is not understood'),
        (f"{JOB} --optimizer lion", '--optimizer "lion" has no cost; there are sgd, momentum, adamw'),
        (f"{JOB} --transport shm", "add --hosts 1"),
        (f"{JOB} --placement split", "no server is beside a worker"),
        (f"{JOB} --workers 4 --servers 2 --with-server", "it must be 4 or more, not 2"),
        (f"{JOB} --cores -1", "--cores is -1"),
        (f"{JOB} --backward 2", "--backward is 2, but must be from 0 to 1"),
        (f"{JOB} --hosts -1", "--hosts is -1"),
        (f"{JOB} --out x.json", "add --calibrate"),
        (f"{JOB} --calibrate --costs x.json", "give one of them"),
        (f"{JOB} --costs none.json", 'the costs in "none.json" cannot be read'),
        (f"{JOB} --batch -1", '--batch is "-1", but must be a number of 0 or more'),
        ("simulate --params 1M --compute 1s --steps 10x", '--steps is "10x"'),
        (f"{JOB} --servers 2 --replicas 2", "so each part of the model is to be on 3 servers"),
        (f"{JOB} --servers 2 --event kill:1", '--event is "kill:1", but must be kill, cut, start or drain'),
        (f"{JOB} --servers 2 --event stop:1@1s", '--event is "stop:1@1s", but must be kill, cut, start or drain'),
        (f"{JOB} --servers 2 --event kill:1@soon", '--event is "soon", but must be a time above 0'),
        (f"{JOB} --servers 2 --event kill:2@1s", "--event is kill:2@1s, but the servers are server-0 to server-1"),
        (f"{JOB} --servers 2 --event start:1@1s", "but server-1 is there then"),
        (f"{JOB} --servers 2 --event kill:1@1s --event drain:1@2s", "but server-1 is gone then"),
        (f"{JOB} --servers 2 --replicas 0 --event kill:1@1s", "add --replicas 1 and have 2 or more servers"),
        (f"{JOB} --servers 2 --event kill:1@60s", "before an event at 60 s: give more --steps"),
        (f"{JOB} --servers 3 --event kill:1@0.5s --event kill:0@0.5s", "would go back to a checkpoint"),
        (f"{JOB} --json none/out.json", '"none/out.json" cannot be written'),
    ],
)
def test_mistakes_are_one_line(tokens: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tokens.split()) == 2
    complaint = capsys.readouterr().err
    assert says in complaint
    assert complaint.count("\n") == 1


def test_costs_are_read_as_they_were_written() -> None:
    path = Path("costs.json")
    costs.save(costs.Costs(call_s=0.5), path)
    assert costs.load(path) == costs.Costs(call_s=0.5)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"call_s": 1}', "NaN"])
def test_files_without_costs_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("costs.json").write_text(text)
    assert main([*JOB.split(), "--costs", "costs.json"]) == 2
    assert "costs.json" in capsys.readouterr().err


def test_costs_that_are_no_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("costs.json")
    costs.save(costs.Costs(call_s=-0.001), path)
    assert main([*JOB.split(), "--costs", "costs.json"]) == 2
    assert "no positive number" in capsys.readouterr().err


def test_units() -> None:
    assert units.parameters("--params", "1.3B") == 1_300_000_000
    assert units.parameters("--params", "60k") == units.count("--batch", "60k") == 60_000
    assert units.parameters("--params", "1.5M") == 1_500_000
    assert units.parameters("--params", "2GiB") == 1 << 29
    assert units.parameters("--params", "100MB") == 25_000_000
    assert units.count("--steps", "0") == 0
    assert units.seconds("--compute", "150ms") == pytest.approx(0.15)
    assert units.bandwidth("--bandwidth", "10Gb/s") == pytest.approx(1.25e9)
    assert units.bandwidth("--bandwidth", "10Gbps") == pytest.approx(1.25e9)
    assert units.bandwidth("--bandwidth", "200 MB/s") == pytest.approx(2e8)
    assert units.bandwidth("--bandwidth", "1GiB/s") == 1 << 30


def test_one_push_and_pull_per_host_beside_each_workers_own(capsys: pytest.CaptureFixture[str]) -> None:
    hosts = ["--workers", "4", "--workers-per-host", "2", "--servers", "2"]
    assert main([*JOB.split(), *hosts, "--bandwidth", "100Mb/s", "--suggest", "--json", "out.json"]) == 0
    printed = capsys.readouterr().out
    assert "2 workers per host, 100 Mb/s" in printed
    (said,) = (line for line in printed.splitlines() if line.startswith("once per host"))
    assert "times as fast" in said
    assert "all-reduce" not in printed, "the formulas know one worker per host"
    assert json.loads(Path("out.json").read_text())["by_formula_s"] == {}
    slow = ["simulate", "--params", "1M", "--compute", "5s", "--steps", "10", *hosts]
    assert main(slow) == 0
    assert "no faster" in capsys.readouterr().out
    assert main([*slow, "--set", "cluster.host_tier=off"]) == 0
    assert "once per host" not in capsys.readouterr().out


def test_workers_of_a_host_are_one_or_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB.split(), "--workers-per-host", "0"]) == 2
    assert "--workers-per-host is 0" in capsys.readouterr().err
