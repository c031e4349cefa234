"""``paramserver simulate``: how fast a job would be on other machines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from paramserver.cli.common import Sets, flag, merge_overrides, parse_assignments, shows, tell
from paramserver.config import Settings, load_settings
from paramserver.errors import ConfigError

if TYPE_CHECKING:
    from paramserver.simulate.costs import Costs
    from paramserver.simulate.scenario import Scenario

_Count = Annotated[str, shows("COUNT")]
# Steps to simulate without --steps: fewer of large clusters, so that it takes seconds.
_STEPS, _FEWEST, _WORK, _BLOCKS = 1000, 10, 60_000, 100_000


def simulate(
    *,
    compute: Annotated[str | None, shows("TIME")] = None,
    params: Annotated[str | None, shows("COUNT|SIZE")] = None,
    workers: Annotated[str | None, flag("cluster.workers")] = None,
    servers: Annotated[str | None, flag("cluster.servers")] = None,
    bandwidth: Annotated[str, shows("RATE")] = "10Gb/s",
    replicas: Annotated[str | None, flag("cluster.replicas")] = None,
    event: Annotated[list[str] | None, shows("KIND:SERVER@TIME")] = None,
    hosts: int = 0,
    servers_per_host: Annotated[str | None, flag("cluster.servers_per_host")] = None,
    workers_per_host: int = 1,
    with_server: Annotated[bool, Parameter(negative=())] = False,
    placement: Annotated[str | None, flag("cluster.placement")] = None,
    transport: Annotated[str | None, flag("cluster.transport")] = None,
    cores: float = 0.0,
    gpu: Annotated[bool, Parameter(negative=())] = False,
    backward: float = 0.67,
    mode: Annotated[str | None, flag("consistency.mode")] = None,
    staleness: Annotated[str | None, flag("consistency.staleness")] = None,
    slices: Annotated[str | None, flag("training.slices_per_step")] = None,
    straggler: Annotated[list[str] | None, shows("SHAPE:NUMBERS")] = None,
    optimizer: Annotated[str, shows("sgd|momentum|adamw")] = "sgd",
    batch: _Count = "0",
    fixed: bool = False,
    steps: _Count = "0",
    seed: Annotated[str | None, flag("training.seed")] = None,
    suggest: bool = False,
    json_: Annotated[Path | None, Parameter(name="--json")] = None,
    costs: Path | None = None,
    calibrate: bool = False,
    out: Path | None = None,
    config: Path | None = None,
    set_: Sets = None,
) -> int:
    """Predict steps per second, staleness and waiting of a job, with any number of workers and servers.

    The decisions are those of the real servers; links, computing and arithmetic take virtual time. As in:
    paramserver simulate --workers 8 --servers 2 --params 25M --compute 0.2s --bandwidth 10Gb/s --suggest

    Parameters
    ----------
    compute
        What a slice takes an ordinary worker, such as 0.2s or 150ms.
    params
        Parameters of the model (float32), such as 60k or 25M; or their size, such as 2GiB.
    workers
        Workers.
    servers
        Servers, those beside workers included.
    bandwidth
        Of each host's link in each direction, such as 10Gb/s (bits) or 1.2GB/s (bytes).
    replicas
        Servers that hold a further copy of each part of the model, or "auto": 1 between machines, else 0.
    event
        A server that dies (kill), is cut off (cut), leaves (drain) or comes back (start), and when, such as
        kill:1@10s; may be repeated.
    hosts
        Machines on which workers and servers are dealt out in turn, 1: all on one; 0: each has a machine of its own.
    servers_per_host
        Servers on each machine for servers alone.
    workers_per_host
        Workers on each machine for workers alone, which pull and push once, unless cluster.host_tier is "off".
    with_server
        The last of the servers are beside the workers, one for each.
    placement
        How much of the model each server takes.
    transport
        How processes on one machine hand weights and gradients to each other.
    cores
        Processors of each machine, which all on it share; 0: there are enough.
    gpu
        Workers compute on GPUs, and leave the processors to others meanwhile.
    backward
        Part of a slice that is the backward pass, during which gradients leave where they travel.
    mode
        "sync" or "async".
    staleness
        async: how many slices the fastest worker may be ahead of the slowest, or "unbounded".
    slices
        Slices in a step; as many as workers if 0.
    straggler
        How the time of a slice varies; may be repeated. One of normal:0.05, lognormal:0.25, exp:0.3 (0.7 fixed and
        0.3 exponential), pareto:2.5, rare:0.02x5 (2 % take 5 times as long), slow:1x2 (one worker always takes twice as
        long), bursts:3x20 (now and then 3 times as long for 20 slices).
    optimizer
        Whose arithmetic the servers do: "sgd", "momentum" or "adamw".
    batch
        Samples in a slice, such as 32 or 60k, to show samples per second.
    fixed
        sync: slices stay with their workers, as in a job without a data set.
    steps
        Steps to simulate (async: times the slices of one); 0: enough for a steady figure.
    seed
        Seed of the stragglers.
    suggest
        Also try other numbers of servers, and servers beside the workers, and say how many are enough.
    json_
        Write everything, each version included, to this JSON file.
    costs
        Costs of calls, bytes and arithmetic, as written by --calibrate --out; else those of a small machine.
    calibrate
        Measure the costs of this machine, which takes a minute, and simulate with them if there is a job to.
    out
        Write what --calibrate measured to this file.
    config
        TOML file with settings of a job: workers, servers, where these are, host_tier, mode, staleness, slices per
        step, seed, chunk size, threads, link_mbps.
    set_
        Any such setting, as section.key=value; may be repeated.
    """
    flags = {
        "cluster.workers": workers,
        "cluster.servers": servers,
        "cluster.replicas": replicas,
        "cluster.servers_per_host": servers_per_host,
        "cluster.placement": placement,
        "cluster.transport": transport,
        "consistency.mode": mode,
        "consistency.staleness": staleness,
        "training.slices_per_step": slices,
        "training.seed": seed,
    }
    settings = load_settings(config, merge_overrides(flags, parse_assignments(set_ or [])))
    known = _costs(costs, calibrate, out)
    if calibrate and compute is None and params is None:
        return 0
    if compute is None or params is None:
        raise ConfigError("say what a slice takes and how large the model is, as in --compute 0.2s --params 25M")
    from paramserver.simulate import events, units
    from paramserver.simulate.parts import stragglers

    samples = units.count("--batch", batch)
    scenario = _scenario(
        settings,
        params=units.parameters("--params", params),
        compute_s=units.seconds("--compute", compute),
        bandwidth=units.bandwidth("--bandwidth", bandwidth),
        stragglers=tuple(stragglers.parse(text) for text in straggler or ()),
        hosts=hosts,
        workers_per_host=workers_per_host,
        with_server=with_server,
        cores=cores,
        gpu=gpu,
        backward=backward,
        optimizer=optimizer,
        moves=not fixed,
        costs=known,
        events=tuple(events.parse(text) for text in event or ()),
        steps=units.count("--steps", steps),
    )
    wanted = settings.cluster.replicas
    replicated = int(hosts != 1) if wanted == "auto" else wanted
    _predict(scenario, samples, replicated if suggest else None, json_)
    return 0


def _predict(scenario: Scenario, samples: int, suggest: int | None, path: Path | None) -> None:
    """Simulate the job, and print what comes out. ``samples``: in a slice; 0: not known.

    ``suggest``: also try other numbers of servers, with so many replicas. ``path``: a JSON file for everything.
    """
    from paramserver.simulate import compare, report
    from paramserver.simulate.cluster import simulate as run
    from paramserver.simulate.parts.seats import shares_pulls

    outcome, record = run(scenario)
    tell("\n".join(report.table(scenario, outcome, samples)))
    if shares_pulls(scenario):
        tell(report.host_tier(outcome, run(replace(scenario, host_tier="off"))[0]))
    if scenario.events:
        tell("\n".join(report.events(record)))
    found = None
    if suggest is not None:
        from paramserver.simulate.suggest import suggest as try_others

        found = try_others(scenario, suggest)
        tell("\n".join(report.suggestion(scenario, found)))
    if (advice := compare.advice(scenario)) is not None:
        tell(f"\n{advice}")
    if path is not None:
        _write(path, report.as_json(scenario, outcome, record, found))


def _costs(path: Path | None, measure: bool, out: Path | None) -> Costs:
    """The costs to simulate with; measures and shows those of this machine if asked to."""
    from paramserver.simulate import costs, report

    if out is not None and not measure:
        raise ConfigError("--out is where --calibrate writes what it measured; add --calibrate")
    if measure and path is not None:
        raise ConfigError("--costs names costs that were measured, --calibrate measures anew; give one of them")
    if not measure:
        return costs.Costs() if path is None else costs.load(path)
    from paramserver.simulate.calibrate import calibrate

    found = calibrate()
    tell("\n".join([*report.costs_table(found), ""]))
    if out is not None:
        costs.save(found, out)
    return found


def _scenario(settings: Settings, *, steps: int, **facts: Any) -> Scenario:
    """The job of these settings."""
    from paramserver.core.versions.consistency import Consistency, Mode
    from paramserver.simulate.scenario import Scenario

    cluster, said, training = settings.cluster, settings.consistency, settings.training
    bound = None if said.staleness == "unbounded" else said.staleness
    mode = Mode(said.mode)
    known = settings.origins()["cluster.link_mbps"] != "default"
    scenario = Scenario(
        workers=cluster.workers,
        servers=cluster.servers,
        servers_per_host=cluster.servers_per_host,
        host_tier=cluster.host_tier,
        placement=cluster.placement,
        transport=cluster.transport,
        consistency=Consistency(mode, bound if mode is Mode.ASYNC else None),
        slices=training.slices_per_step,
        seed=training.seed,
        chunk_bytes=training.chunk_bytes,
        link_mbps=cluster.link_mbps if known else 0.0,
        threads=training.threads_per_server,
        worker_threads=training.threads_per_worker,
        replicas=settings.replicas(launched=facts["hosts"] == 1),
        repair_mbps=cluster.repair_mbps,
        lease_s=cluster.lease_s,
        **facts,
    )
    return replace(scenario, steps=steps or _steps(scenario))


def _steps(scenario: Scenario) -> int:
    """As many as take some seconds to simulate."""
    from paramserver.simulate.cluster import blocks

    calls = max(scenario.workers, scenario.slices) * (scenario.servers + 8)
    return max(_FEWEST, min(_STEPS, _WORK // calls, _BLOCKS // blocks(scenario)))


def _write(path: Path, facts: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(facts, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f'"{path}" cannot be written: {error.strerror}') from error
