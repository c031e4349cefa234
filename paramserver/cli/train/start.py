"""``paramserver start coordinator | server | worker``: one role on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from paramserver.cli.common import load_job, merge_overrides, parse_assignments
from paramserver.cli.train.run import script_path
from paramserver.config import Settings, load_settings
from paramserver.errors import ConfigError
from paramserver.processes.environment import is_part

app = App(name="start", help="Start one role of a cluster on this machine: coordinator, server or worker.")

_Text = Annotated[str | None, Parameter(allow_leading_hyphen=True)]
_Sets = Annotated[list[str] | None, Parameter(name="--set")]


@app.command
def coordinator(
    *,
    listen: _Text = None,
    advertise_host: _Text = None,
    servers: _Text = None,
    workers: _Text = None,
    replicas: _Text = None,
    mode: _Text = None,
    staleness: _Text = None,
    store: _Text = None,
    job: _Text = None,
    certs: _Text = None,
    insecure: bool | None = None,
    resume: bool = False,
    go_on: Annotated[bool, Parameter(name="--continue")] = False,
    fresh: bool = False,
    checkpoint_dir: _Text = None,
    checkpoint_every: _Text = None,
    from_checkpoint: _Text = None,
    summary: _Text = None,
    save: _Text = None,
    dashboard: _Text = None,
    config: Path | None = None,
    set_: _Sets = None,
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
        "run.save": save,
    }
    settings = load_job(config, merge_overrides(flags, parse_assignments(set_ or [])))
    settings.replicas(launched=False)  # refuses a wish that cannot be
    from paramserver.resume.options import Options
    from paramserver.roles.start import start_coordinator

    return start_coordinator(settings, Options(resume=resume or go_on, must=resume, fresh=fresh))


@app.command
def server(
    *,
    join: _Text = None,
    listen: _Text = None,
    advertise_host: _Text = None,
    certs: _Text = None,
    insecure: bool | None = None,
    servers_per_host: _Text = None,
    restart: bool = False,
    config: Path | None = None,
    set_: _Sets = None,
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
    }
    overrides = merge_overrides(flags, parse_assignments(set_ or []))
    settings = _with_coordinator(load_settings(config, overrides))
    if not is_part() and (restart or settings.cluster.servers_per_host > 1):
        from paramserver.launch.keeper import keep, server_parts

        return keep(settings, server_parts(settings), restart)
    from paramserver.roles.start import start_server

    return start_server(settings, config, overrides)


@app.command
def worker(
    script: str | None = None,
    /,
    *,
    join: _Text = None,
    certs: _Text = None,
    insecure: bool | None = None,
    device: _Text = None,
    with_server: bool = False,
    restart: bool = False,
    config: Path | None = None,
    set_: _Sets = None,
    script_args: Annotated[list[str] | None, Parameter(parse=False)] = None,
) -> int:
    """Run a training script as a worker of a job: paramserver start worker --join HOST:PORT -- SCRIPT ARGUMENTS

    Parameters
    ----------
    script
        The training script; it may also stand after "--", followed by its arguments.
    join
        Address of the coordinator, host:port; of several that stand by for each other, all with commas between.
    certs
        Directory with certificates (see "paramserver certs init").
    insecure
        Allow other machines without TLS.
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
        "training.device": device,
        "run.script": script,
        "run.args": script_args,
    }
    overrides = merge_overrides(flags, parse_assignments(set_ or []))
    settings = _with_coordinator(load_settings(config, overrides))
    path = script_path(settings)
    args = list(settings.run.args)
    if restart or with_server:
        from paramserver.launch.keeper import keep, worker_parts

        return keep(settings, worker_parts(settings, path, args, with_server), restart)
    from paramserver.roles.start import start_worker

    return start_worker(settings, path, args)


def _with_coordinator(settings: Settings) -> Settings:
    if not settings.cluster.coordinator:
        raise ConfigError("no coordinator is named; say --join HOST:PORT, or set cluster.coordinator")
    return settings
