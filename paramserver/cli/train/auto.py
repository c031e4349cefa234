"""``paramserver start auto``: the role of a task of Slurm, by its variables."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paramserver.cli.common import Sets, flag, merge_overrides, parse_assignments
from paramserver.cli.train.run import script_path
from paramserver.cli.train.start import coordinator, server, worker
from paramserver.config import NO_CHECKPOINTS, Settings, load_settings
from paramserver.errors import ConfigError
from paramserver.machine.slurm import Placed, place
from paramserver.processes.environment import ENV_LOCAL, ENV_WISH

_EVERYWHERE = "0.0.0.0"


def auto(
    script: str | None = None,
    /,
    *,
    servers: Annotated[str | None, flag("cluster.servers")] = None,
    replicas: Annotated[str | None, flag("cluster.replicas")] = None,
    mode: Annotated[str | None, flag("consistency.mode")] = None,
    staleness: Annotated[str | None, flag("consistency.staleness")] = None,
    join: Annotated[str | None, flag("cluster.coordinator", "HOST:PORT")] = None,
    port: int | None = None,
    job: Annotated[str | None, flag("cluster.job", "NAME")] = None,
    certs: Annotated[str | None, flag("security.certs", "DIR")] = None,
    insecure: bool | None = None,
    fresh: bool = False,
    restart: bool = False,
    checkpoint_dir: Annotated[str | None, flag("checkpoint.dir", "DIR|URL")] = None,
    checkpoint_every: Annotated[str | None, flag("checkpoint.every")] = None,
    from_checkpoint: Annotated[str | None, flag("checkpoint.resume", "DIR|URL")] = None,
    summary: Annotated[str | None, flag("run.summary", "FILE")] = None,
    save: Annotated[str | None, flag("run.save", "FILE")] = None,
    config: Path | None = None,
    set_: Sets = None,
    script_args: Annotated[list[str] | None, Parameter(parse=False)] = None,
) -> int:
    """Be the coordinator, a server or a worker, as the variables of Slurm's srun say.

    Task 0 is the coordinator, the next ones are the servers, all others are workers.

    Parameters
    ----------
    script
        The training script; it may also stand after "--", followed by its arguments.
    servers
        Servers that share the model.
    replicas
        How many further servers hold a copy of each part of the model, so that training goes on when a server dies.
    mode
        "sync" or "async".
    staleness
        async: how many slices the fastest worker may be ahead of the slowest, or "unbounded".
    join
        Address of the coordinator, host:port. By default the first node of the step, and a port that follows from
        the numbers of job and step; 127.0.0.1 if there is one node.
    port
        The port of the coordinator.
    job
        Name of the job. By default "slurm-JOB-STEP". A later job of Slurm that is to go on with the checkpoints needs
        the same name.
    certs
        Directory with certificates (see "paramserver certs init").
    insecure
        Allow other machines without TLS.
    fresh
        Begin anew: set aside the checkpoints in --checkpoint-dir, with which the job otherwise goes on.
    restart
        Start a server or worker again, in the same place, when it is killed or crashes; cluster.max_restarts says how
        often. A script that fails is not started again.
    checkpoint_dir
        Directory, or URL, for checkpoints, which all nodes reach; "none" to do without. Has to be given if there are
        several nodes.
    checkpoint_every
        Steps (async: slices) from one checkpoint to the next; every checkpoint.every_s seconds if 0.
    from_checkpoint
        Begin with this checkpoint, or with the newest in this directory.
    summary
        Write a summary of the run to this JSON file.
    save
        Write the final weights to this safetensors file.
    config
        TOML file with settings; flags and PARAMSERVER_* variables override it. cluster.workers does not count: the
        number of tasks does.
    set_
        Any other setting, as section.key=value; may be repeated.
    """
    if script is None and script_args:
        script, script_args = script_args[0], script_args[1:]
    flags = {
        "cluster.servers": servers,
        "cluster.replicas": replicas,
        "consistency.mode": mode,
        "consistency.staleness": staleness,
        "cluster.coordinator": join,
        "cluster.job": job,
        "security.certs": certs,
        "checkpoint.dir": checkpoint_dir,
        "checkpoint.every": checkpoint_every,
        "checkpoint.resume": from_checkpoint,
        "run.summary": summary,
        "run.save": save,
    }
    given = merge_overrides(flags, parse_assignments(set_ or []))
    secure = {} if insecure is None else {"security.insecure": insecure}
    settings = load_settings(config, {**merge_overrides(secure, given), "run.script": script, "run.args": script_args})
    script_path(settings)  # all tasks say so, or the others would wait for the workers
    if settings.cluster.servers_per_host > 1:
        raise ConfigError("start auto starts one server in each task of a server: leave out cluster.servers_per_host")
    if port is not None and (settings.cluster.coordinator or not 0 < port < 1 << 16):
        raise ConfigError("--port must be from 1 to 65535, and not beside --join, which names the port already")
    placed = place(os.environ, settings.cluster.servers, settings.cluster.coordinator, port)
    overrides = {**given, **_decided(settings, placed)}
    if placed.several:
        asyncio.run(_refuse_early(load_settings(config, {**overrides, **secure}), placed))
    os.environ[ENV_WISH], os.environ[ENV_LOCAL] = str(placed.index), str(placed.local)
    sets = [f"{key}={value}" for key, value in overrides.items()]
    if placed.role == "server":
        return server(insecure=insecure, restart=restart, config=config, set_=sets)
    if placed.role == "worker":
        return worker(script, insecure=insecure, restart=restart, config=config, set_=sets, script_args=script_args)
    # A job that Slurm has requeued has lost all its servers: what is left of it are its checkpoints.
    lost = settings.checkpoint.dir in ("", NO_CHECKPOINTS)
    return coordinator(insecure=insecure, go_on=not (fresh or lost), fresh=fresh or lost, config=config, set_=sets)


def _decided(settings: Settings, placed: Placed) -> Mapping[str, object]:
    """The settings that follow from the task, for all that the user has not set."""
    cluster = settings.cluster
    values: dict[str, object] = {"cluster.coordinator": placed.coordinator, "cluster.workers": placed.workers}
    if not cluster.job:
        values["cluster.job"] = placed.job
    if cluster.store == "auto":
        values["cluster.store"] = "memory"  # no second coordinator comes that could read another one
    # The name of a node may stand for a loopback address on the node itself.
    if placed.several and not cluster.coordinator and not cluster.listen:
        values["cluster.listen"] = _EVERYWHERE
        if placed.node and not cluster.advertise_host:
            values["cluster.advertise_host"] = placed.node
    return values


async def _refuse_early(settings: Settings, placed: Placed) -> None:
    """Refuse in each task what the coordinator would refuse, or the others would wait for it in vain."""
    from paramserver.pki.security import load_security
    from paramserver.roles.start import check_checkpoints

    host = settings.cluster.listen or _EVERYWHERE
    await load_security(settings, placed.role).check_listen(host)
    await check_checkpoints(settings, host)
