"""``paramserver render``: files that start a job on other machines."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Annotated

from paramserver.cli.common import Directory, Name, Sets, parse_assignments, shows, tell
from paramserver.config import load_settings
from paramserver.errors import ConfigError

# Each option with the targets that take it; the others refuse it.
_ONLY = {
    "--image": ("compose", "k8s", "jobset"),
    "--prefix": ("systemd",),
    "--standby": ("k8s",),
    "--dataset": ("compose", "k8s", "jobset"),
    "--storage-class": ("k8s", "jobset"),
    "--share-memory": ("k8s", "jobset"),
}


def render(
    target: str,
    /,
    *,
    config: Path | None = None,
    set_: Sets = None,
    output: Path | None = None,
    force: bool = False,
    image: Name = None,
    prefix: Directory = None,
    gpu: bool = False,
    standby: bool = False,
    dataset: Annotated[str | None, shows("DIRECTORY|CLAIM")] = None,
    storage_class: Name = None,
    share_memory: bool = False,
) -> int:
    """Write files that start the job elsewhere: systemd units, a compose file, Kubernetes manifests; or that watch it.

    The files are made from the settings of the job, and hold no secret.

    Parameters
    ----------
    target
        "systemd", "compose", "k8s", "jobset", or "monitoring": the files of Prometheus and Grafana.
    config
        TOML file with settings; PARAMSERVER_* variables override it.
    set_
        A setting as section.key=value; may be repeated.
    output
        Directory for the files, which has to be empty. Without it they are printed.
    force
        Replace files of the same names in the directory.
    image
        compose, k8s, jobset: the image of all roles; "paramserver:latest" if not given.
    prefix
        systemd: the virtual environment with paramserver; "/opt/paramserver" if not given.
    gpu
        One GPU for each worker.
    standby
        k8s: a second coordinator, which takes over when the first is lost.
    dataset
        Data for the workers, which see it at /dataset and cannot change it. compose: a directory of the machine, such
        as /srv/images; k8s, jobset: the name of a PersistentVolumeClaim.
    storage_class
        k8s, jobset: the class of the volume of the checkpoints; it has to offer ReadWriteMany.
    share_memory
        k8s, jobset: servers and workers of one node share memory. They meet in a directory of the node (hostPath),
        which a container of root opens for them, so the namespace has to allow that.
    """
    from paramserver.render.output import as_stream, write_directory
    from paramserver.render.request import DEFAULT_IMAGE, DEFAULT_PREFIX, Request
    from paramserver.render.targets import TARGETS, WATCHING

    makers = {**TARGETS, **WATCHING}
    if target not in makers:
        near = difflib.get_close_matches(target, makers, n=1)
        hint = f'did you mean "{near[0]}"?' if near else "there are " + ", ".join(makers)
        raise ConfigError(f'"{target}" is nothing to render; {hint}')
    given = {"--image": image is not None, "--prefix": prefix is not None, "--standby": standby}
    given["--share-memory"] = share_memory
    given |= {"--dataset": dataset is not None, "--storage-class": storage_class is not None}
    for option, targets in _ONLY.items():
        if given[option] and target not in targets:
            raise ConfigError(f"{option} means nothing to {target}, only to {', '.join(targets)}; leave it out")
    if force and output is None:
        raise ConfigError("--force is about files in a directory; name it with --output")
    settings = load_settings(config, parse_assignments(set_ or []))
    request = Request(
        settings,
        image=DEFAULT_IMAGE if image is None else image,
        prefix=DEFAULT_PREFIX if prefix is None else prefix.rstrip("/"),
        gpu=gpu,
        standby=standby,
        dataset=dataset or "",
        storage_class=storage_class or "",
        share_memory=share_memory,
    )
    files = makers[target](request)
    if output is None:
        sys.stdout.write(as_stream(files))
    else:
        for path in write_directory(files, output, force):
            tell(str(path))
    return 0
