"""``paramserver start coordinator | server | worker``: one role on this machine. ``start auto`` lies beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from paramserver.cli.common import Sets, flag, load_job, merge_overrides, parse_assignments
from paramserver.cli.examples import example
from paramserver.cli.train.run import script_path
from paramserver.config import Settings, load_settings
from paramserver.errors import ConfigError
from paramserver.processes.environment import is_part

app = App(
    name="start", help="Start one role of a cluster on this machine: coordinator, server, worker, or as Slurm says."
)

app.command(
    "paramserver.cli.train.auto:auto",
    name="auto",
    help="Be the coordinator, a server or a worker, as the variables of Slurm's srun say.",
    help_epilogue=example("start auto"),
)


@app.command(help_epilogue=example("start coordinator"))
def coordinator(
    *,
    listen: Annotated[str | None, flag("cluster.listen", "HOST[:PORT]")] = None,
    advertise_host: Annotated[str | None, flag("cluster.advertise_host", "HOST")] = None,
    servers: Annotated[str | None, flag("cluster.servers")] = None,
    workers: Annotated[str | None, flag("cluster.workers")] = None,
    replicas: Annotated[str | None, flag("cluster.replicas")] = None,
    mode: Annotated[str | None, flag("consistency.mode")] = None,
    staleness: Annotated[str | None, flag("consistency.staleness")] = None,
    store: Annotated[str | None, flag("cluster.store", "auto|memory|URL")] = None,
    job: Annotated[str | None, flag("cluster.job", "NAME")] = None,
    certs: Annotated[str | None, flag("security.certs", "DIR")] = None,
    insecure: bool | None = None,
    resume: bool = False,
    go_on: Annotated[bool, Parameter(name="--continue")] = False,
    fresh: bool = False,
    checkpoint_dir: Annotated[str | None, flag("checkpoint.dir", "DIR|URL")] = None,
    checkpoint_every: Annotated[str | None, flag("checkpoint.every")] = None,
    from_checkpoint: Annotated[str | None, flag("checkpoint.resume", "DIR|URL")] = None,
    summary: Annotated[str | None, flag("run.summary", "FILE")] = None,
    report: Annotated[str | None, flag("run.report", "FILE")] = None,
    records: Annotated[str | None, flag("run.records", "FILE")] = None,
    track: Annotated[str | None, flag("run.track", "NAMES")] = None,
    save: Annotated[str | None, flag("run.save", "FILE")] = None,
    dashboard: Annotated[str | None, flag("web.dashboard", "auto|off|HOST:PORT")] = None,
    config: Path | None = None,
    set_: Sets = None,
) -> int:
    """Lead a job: admits servers and workers, gathers the result when all epochs are trained.

    A second coordinator of the same job and store stands by, and takes over when the first one is gone.

    Parameters
    ----------
    listen
        Host, or host:port, to listen on; 0.0.0.0 for all. Port 8790 if none is given.
    advertise_host
        Under which name the others reach this machine.
    servers
        Servers that share the model.
    workers
        Workers the job starts with; more may come at any time.
    replicas
        How many further servers hold a copy of each part of the model, so that training goes on when a server dies.
    mode
        "sync" or "async".
    staleness
        async: how many slices the fastest worker may be ahead of the slowest, or "unbounded".
    store
        Address of a Redis or Valkey server; "auto" starts a private one, whose data stay on this machine
        (cluster.state_dir).
    job
        Name of the job.
    certs
        Directory with certificates (see "paramserver certs init").
    insecure
        Allow other machines without TLS.
    resume
        Go on with a job that has not ended and whose coordinator is gone: from the store, or, if that has lost the job,
        from what the servers know. Ends with exit code 2 if there is none within cluster.join_timeout_s.
    go_on
        The same, but begin the job if there is none.
    fresh
        Begin anew: forget the job of this name in the store, and set aside the checkpoints in --checkpoint-dir.
    checkpoint_dir
        Directory, or URL, for checkpoints, which all servers and this coordinator reach; "none" to do without. Has to
        be given if other machines can reach this coordinator.
    checkpoint_every
        Steps (async: slices) from one checkpoint to the next; every checkpoint.every_s seconds if 0.
    from_checkpoint
        Begin with this checkpoint, or with the newest in this directory.
    summary
        Write a summary of the run to this JSON file.
    report
        Write a report of the run to this file, .html, .md or .json: curves, faults, ledger, digests, settings.
    records
        Write the values of ctx.log to this file, as JSON lines.
    track
        Give the values of ctx.log to these trackers, with commas between: tensorboard, wandb, mlflow, trackio.
    save
        Write the final weights to this safetensors file.
    dashboard
        Where to serve the dashboard: "auto" (a free port of this machine), host:port, or "off".
    config
        TOML file with settings; flags and PARAMSERVER_* variables override it.
    set_
        Any other setting, as section.key=value; may be repeated.
    """
    if (resume or go_on) and fresh:
        raise ConfigError(f"--{'resume' if resume else 'continue'} and --fresh contradict each other; give one of them")
    flags = {
        "cluster.listen": listen,
        "cluster.advertise_host": advertise_host,
        "cluster.servers": servers,
        "cluster.workers": workers,
        "cluster.replicas": replicas,
        "consistency.mode": mode,
        "consistency.staleness": staleness,
        "cluster.store": store,
        "cluster.job": job,
        "web.dashboard": dashboard,
        "security.certs": certs,
        "security.insecure": insecure,
        "checkpoint.dir": checkpoint_dir,
        "checkpoint.every": checkpoint_every,
        "checkpoint.resume": from_checkpoint,
        "run.summary": summary,
        "run.report": report,
        "run.records": records,
        "run.track": track,
        "run.save": save,
    }
    settings = load_job(config, merge_overrides(flags, parse_assignments(set_ or [])))
    settings.replicas(launched=False)  # refuses a wish that cannot be
    from paramserver.resume.options import Options
    from paramserver.roles.start import start_coordinator

    return start_coordinator(settings, Options(resume=resume or go_on, must=resume, fresh=fresh))


@app.command(help_epilogue=example("start server"))
def server(
    *,
    join: Annotated[str | None, flag("cluster.coordinator", "HOST:PORT")] = None,
    listen: Annotated[str | None, flag("cluster.listen", "HOST[:PORT]")] = None,
    advertise_host: Annotated[str | None, flag("cluster.advertise_host", "HOST")] = None,
    certs: Annotated[str | None, flag("security.certs", "DIR")] = None,
    insecure: bool | None = None,
    metrics: Annotated[str | None, flag("web.metrics", "off|HOST:PORT")] = None,
    servers_per_host: Annotated[str | None, flag("cluster.servers_per_host")] = None,
    restart: bool = False,
    config: Path | None = None,
    set_: Sets = None,
) -> int:
    """Hold a shard of the model. What kind of job it is, the coordinator tells.

    Parameters
    ----------
    join
        Address of the coordinator, host:port; of several that stand by for each other, all with commas between.
    listen
        Host, or host:port, to listen on. By default this machine's address on the route to the coordinator.
    advertise_host
        Under which name the others reach this machine.
    certs
        Directory with certificates (see "paramserver certs init").
    insecure
        Allow other machines without TLS.
    metrics
        Where this process serves metrics about itself: host:port, or "off".
    servers_per_host
        Start so many servers; each counts as one of cluster.servers.
    restart
        Start the server again, in the same place, when it is killed or crashes; cluster.max_restarts says how often.
    config
        TOML file with settings; flags and PARAMSERVER_* variables override it.
    set_
        Any other setting, as section.key=value; may be repeated.
    """
    flags = {
        "cluster.coordinator": join,
        "cluster.listen": listen,
        "cluster.advertise_host": advertise_host,
        "cluster.servers_per_host": servers_per_host,
        "security.certs": certs,
        "security.insecure": insecure,
        "web.metrics": metrics,
    }
    overrides = merge_overrides(flags, parse_assignments(set_ or []))
    settings = _with_coordinator(load_settings(config, overrides))
    if not is_part() and (restart or settings.cluster.servers_per_host > 1):
        from paramserver.launcher.keeper import keep, server_parts

        return keep(settings, server_parts(settings), restart)
    from paramserver.roles.start import start_server

    return start_server(settings, config, overrides)


@app.command(help_epilogue=example("start worker"))
def worker(
    script: str | None = None,
    /,
    *,
    module: Annotated[bool, Parameter(name=("--module", "-m"))] = False,
    join: Annotated[str | None, flag("cluster.coordinator", "HOST:PORT")] = None,
    certs: Annotated[str | None, flag("security.certs", "DIR")] = None,
    insecure: bool | None = None,
    metrics: Annotated[str | None, flag("web.metrics", "off|HOST:PORT")] = None,
    device: Annotated[str | None, flag("training.device", "auto|cpu|cuda:N")] = None,
    with_server: bool = False,
    restart: bool = False,
    config: Path | None = None,
    set_: Sets = None,
    script_args: Annotated[list[str] | None, Parameter(parse=False)] = None,
) -> int:
    """Run a training script as a worker of a job: paramserver start worker --join HOST:PORT -- SCRIPT ARGUMENTS

    Parameters
    ----------
    script
        The training script; it may also stand after "--", followed by its arguments.
    module
        The script is the name of a module, such as pkg.train, which is run as by python -m.
    join
        Address of the coordinator, host:port; of several that stand by for each other, all with commas between.
    certs
        Directory with certificates (see "paramserver certs init").
    insecure
        Allow other machines without TLS.
    metrics
        Where this process serves metrics about itself: host:port, or "off".
    device
        Where to compute: "auto", "cpu", "cuda" or "cuda:N".
    with_server
        Also start a server on this host, which counts as one of cluster.servers; see cluster.placement.
    restart
        Start the worker (and the server of --with-server) again, in the same place, when it is killed or crashes;
        cluster.max_restarts says how often. A script that fails is not started again.
    config
        TOML file with settings; flags and PARAMSERVER_* variables override it.
    set_
        Any other setting, as section.key=value; may be repeated.
    """
    if script is None and script_args:
        script, script_args = script_args[0], script_args[1:]
    flags = {
        "cluster.coordinator": join,
        "security.certs": certs,
        "security.insecure": insecure,
        "web.metrics": metrics,
        "training.device": device,
        "run.script": script,
        "run.module": "true" if module else None,
        "run.args": script_args,
    }
    overrides = merge_overrides(flags, parse_assignments(set_ or []))
    settings = _with_coordinator(load_settings(config, overrides))
    path = script_path(settings)
    args = list(settings.run.args)
    if restart or with_server:
        from paramserver.launcher.keeper import keep, worker_parts

        return keep(settings, worker_parts(settings, path, args, with_server), restart)
    from paramserver.roles.start import start_worker

    return start_worker(settings, path, args)


def _with_coordinator(settings: Settings) -> Settings:
    if not settings.cluster.coordinator:
        raise ConfigError("no coordinator is named; say --join HOST:PORT, or set cluster.coordinator")
    return settings
