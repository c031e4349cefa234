"""``paramserver run``: train a script on servers and workers on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paramserver.cli.common import Sets, flag, load_job, merge_overrides, parse_assignments
from paramserver.config import Settings
from paramserver.errors import ConfigError


def run(
    script: str | None = None,
    /,
    *,
    module: Annotated[bool, Parameter(name=("--module", "-m"))] = False,
    servers: Annotated[str | None, flag("cluster.servers")] = None,
    workers: Annotated[str | None, flag("cluster.workers")] = None,
    replicas: Annotated[str | None, flag("cluster.replicas")] = None,
    mode: Annotated[str | None, flag("consistency.mode")] = None,
    staleness: Annotated[str | None, flag("consistency.staleness")] = None,
    slices_per_step: Annotated[str | None, flag("training.slices_per_step")] = None,
    seed: Annotated[str | None, flag("training.seed")] = None,
    threads_per_worker: Annotated[str | None, flag("training.threads_per_worker")] = None,
    nonfinite: Annotated[str | None, flag("training.nonfinite")] = None,
    store: Annotated[str | None, flag("cluster.store", "auto|memory|URL")] = None,
    job: Annotated[str | None, flag("cluster.job", "NAME")] = None,
    ddp: bool = False,
    summary: Annotated[str | None, flag("run.summary", "FILE")] = None,
    report: Annotated[str | None, flag("run.report", "FILE")] = None,
    records: Annotated[str | None, flag("run.records", "FILE")] = None,
    track: Annotated[str | None, flag("run.track", "NAMES")] = None,
    save: Annotated[str | None, flag("run.save", "FILE")] = None,
    checkpoint_dir: Annotated[str | None, flag("checkpoint.dir", "DIR|URL")] = None,
    checkpoint_every: Annotated[str | None, flag("checkpoint.every")] = None,
    resume: Annotated[str | None, flag("checkpoint.resume", "DIR|URL")] = None,
    fresh: bool = False,
    dashboard: Annotated[str | None, flag("web.dashboard", "auto|off|HOST:PORT")] = None,
    metrics: Annotated[str | None, flag("web.metrics", "off|HOST:0")] = None,
    config: Path | None = None,
    set_: Sets = None,
    script_args: Annotated[list[str] | None, Parameter(parse=False)] = None,
) -> int:
    """Train a script on a cluster on this machine.

    Starts a coordinator, servers and workers as processes of their own, shows how they get on, and stops them all at
    the end. Arguments of the script go after "--".

    Parameters
    ----------
    script
        The training script; each worker runs it.
    module
        The script is the name of a module, such as pkg.train, which is run as by python -m.
    servers
        Servers that share the model.
    workers
        Workers that share the data.
    replicas
        How many further servers hold a copy of each part of the model, so that training goes on when a server dies.
    mode
        "sync" or "async".
    staleness
        async: how many slices the fastest worker may be ahead of the slowest, or "unbounded".
    slices_per_step
        sync: slices in a step; as many as workers if 0.
    seed
        Seed of the data order, dropout and augmentation.
    threads_per_worker
        Threads each worker computes with.
    nonfinite
        On a NaN or infinite gradient: "skip" the step, "reject" the contribution, or "fail" the run.
    store
        "auto" (a private server), "memory", or the address of a Redis or Valkey server.
    job
        Name of the job.
    ddp
        The script uses torch.distributed: workers are the ranks of init_process_group("paramserver").
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
    checkpoint_dir
        Keep checkpoints in this directory, or at this URL.
    checkpoint_every
        Steps (async: slices) from one checkpoint to the next; if 0, every checkpoint.every_s seconds in
        --checkpoint-dir, and otherwise every 5 s or more seldom for as long as the run takes.
    resume
        Go on from this checkpoint, or from the newest in this directory, with the same script and settings.
    fresh
        Begin anew: forget a job of this name in the store, and set aside the checkpoints in --checkpoint-dir.
    dashboard
        Where to serve the dashboard: "auto" (a free port of this machine), host:port, or "off".
    metrics
        Where servers and workers serve metrics about themselves: 127.0.0.1:0 for any ports, which `status` shows.
    config
        TOML file with settings; flags and PARAMSERVER_* variables override it.
    set_
        Any other setting, as section.key=value; may be repeated.
    """
    flags = {
        "run.script": script,
        "run.module": "true" if module else None,
        "run.ddp": "true" if ddp else None,
        "run.args": script_args,
        "run.summary": summary,
        "run.report": report,
        "run.records": records,
        "run.track": track,
        "run.save": save,
        "checkpoint.dir": checkpoint_dir,
        "checkpoint.every": checkpoint_every,
        "checkpoint.resume": resume,
        "cluster.servers": servers,
        "cluster.workers": workers,
        "cluster.replicas": replicas,
        "cluster.store": store,
        "cluster.job": job,
        "consistency.mode": mode,
        "consistency.staleness": staleness,
        "training.slices_per_step": slices_per_step,
        "training.seed": seed,
        "training.threads_per_worker": threads_per_worker,
        "training.nonfinite": nonfinite,
        "web.dashboard": dashboard,
        "web.metrics": metrics,
    }
    settings = load_job(config, merge_overrides(flags, parse_assignments(set_ or [])))
    path = script_path(settings)
    if not settings.web.metrics.endswith((":0", "off")):
        raise ConfigError(
            f"web.metrics is {settings.web.metrics}, but each process of a run needs a port of its own: say port 0, as "
            "in 127.0.0.1:0"
        )
    from paramserver.launcher.launcher import launch

    return launch(settings, path, list(settings.run.args), fresh)


def script_path(settings: Settings) -> Path:
    """The script to train. Raises ConfigError if none is given or it is not a file."""
    if not settings.run.script:
        raise ConfigError("no script is given; name one, as in: paramserver run train.py")
    path = Path(settings.run.script)
    if settings.run.module:
        if "/" in settings.run.script or path.suffix in (".py", ".ipynb"):
            raise ConfigError(f'"{path}" is a file; -m takes the name of a module, such as pkg.train')
        return path
    if path.suffix == ".ipynb":
        raise ConfigError(
            f'script "{path}" is a notebook; call paramserver.launch(function, workers=4) in a cell of it, or save its '
            "code as a Python file"
        )
    if path.is_dir():
        raise ConfigError(f'script "{path}" is a directory; give the path of a Python file')
    if not path.is_file():
        raise ConfigError(f'script "{path}" does not exist; give the path of a Python file')
    return path
