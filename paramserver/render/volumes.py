"""Volumes of pods: checkpoints, results, data, meetings to share memory; and the Secret with the keys of a storage."""

from __future__ import annotations

import re
from typing import Any

from paramserver.errors import ConfigError
from paramserver.render.request import DATASET, MEETING, RESULTS, UID, Containers

Object = dict[str, Any]

# On a node, the directories in which its pods meet. They hold sockets only.
_NODE_DIRECTORY = "/run/paramserver-pods"
_CLAIM_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


def claim(mode: str, size: str, storage_class: str = "") -> Object:
    """The specification of a claim."""
    chosen = {"storageClassName": storage_class} if storage_class else {}
    return {"accessModes": [mode], **chosen, "resources": {"requests": {"storage": size}}}


def data_claim(containers: Containers) -> Object | None:
    """The specification of the claim for checkpoints and results; None if no file has to stay."""
    request = containers.request
    shared = containers.checkpoints.on_disk or request.standby
    if request.storage_class and not containers.checkpoints.on_disk:
        raise ConfigError(
            f"--storage-class is about a volume of checkpoints, but checkpoint.dir is {containers.checkpoints.dir}; "
            "leave one of them out"
        )
    if not (containers.checkpoints.on_disk or containers.results):
        return None
    return claim("ReadWriteMany" if shared else "ReadWriteOnce", "10Gi", request.storage_class)


def data_head(containers: Containers) -> str:
    """The sentences at the top of the claim's file."""
    if not containers.checkpoints.on_disk:
        return "The volume of the coordinator's results."
    replicated = containers.request.replicated
    dies = "the death of all servers that hold a shard" if replicated else "the death of a server"
    return (
        f"The volume of checkpoints ({containers.checkpoints.dir}) and results. It has to hold checkpoint.keep + 1\n"
        "checkpoints, each with the weights and the optimizer state: raise its size for a large model.\n"
        "The coordinator and all servers write to it from their nodes, so its storage class has to offer\n"
        "ReadWriteMany, as those of NFS, CephFS, EFS, Filestore and Azure Files do (render --storage-class NAME\n"
        "chooses one). With a class that only offers ReadWriteOnce the claim stays Pending, and neither the\n"
        "coordinator nor a server starts. Then name a URL such as s3://bucket/run in checkpoint.dir.\n"
        f'With checkpoint.dir = "none" {dies} ends the job.\n'
        "Deleting the claim deletes the checkpoints."
    )


def data_volume(name: str, containers: Containers) -> Object:
    """The volume of checkpoints and results, which a container sees at /data."""
    if data_claim(containers) is None:
        return {"name": "data", "emptyDir": {}}
    return {"name": "data", "persistentVolumeClaim": {"claimName": f"{name}-data"}}


def data_mount() -> Object:
    """The place of `data_volume` in a container."""
    return {"name": "data", "mountPath": RESULTS}


def storage_keys(name: str) -> str:
    """The Secret with the variables in which the library of a storage finds its keys."""
    return f"{name}-storage"


def key_sources(name: str, containers: Containers) -> Object:
    """A part of a container that talks to an object store. Without the Secret the pod starts, too."""
    if not containers.checkpoints.by_url:
        return {}
    return {"envFrom": [{"secretRef": {"name": storage_keys(name), "optional": True}}]}


def dataset_volume(containers: Containers) -> Object:
    """The claim with the workers' data. Raises ConfigError for a name that no claim can have."""
    dataset = containers.request.dataset
    if not _CLAIM_NAME.fullmatch(dataset):
        raise ConfigError(f'--dataset is "{dataset}", but must be the name of a PersistentVolumeClaim')
    return {"name": "dataset", "persistentVolumeClaim": {"claimName": dataset, "readOnly": True}}


def dataset_mount() -> Object:
    """The place of `dataset_volume` in a container."""
    return {"name": "dataset", "mountPath": DATASET, "readOnly": True}


def with_meeting(name: str, containers: Containers, template: Object) -> Object:
    """The template of a pod, which meets other pods of its node to share memory if that is wanted.

    Namespaces and jobs have directories of their own on the node. These belong to root. Only the group of the image's
    user may enter them, and only root can list them: a meeting is found by the process that was told its name.
    """
    if not containers.meeting:
        return template
    pod = template["spec"]
    (container,) = pod["containers"]
    mount = {"name": "meeting", "mountPath": MEETING, "subPathExpr": f"$(POD_NAMESPACE)/{name}"}
    namespace = {"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}
    container["env"] = [namespace, *container["env"]]
    container["volumeMounts"] = [*container["volumeMounts"], mount]
    pod["initContainers"] = [
        {
            "name": "meeting",
            "image": container["image"],
            "command": ["sh", "-c", f"chgrp {UID} {MEETING} && chmod 1730 {MEETING}"],
            "env": [namespace],
            "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
            # The owner of a directory needs no capability for this, as a member of the pod's group.
            "securityContext": {**container["securityContext"], "runAsUser": 0, "runAsNonRoot": False},
            "volumeMounts": [mount],
        }
    ]
    directory = {"path": _NODE_DIRECTORY, "type": "DirectoryOrCreate"}
    pod["volumes"] = [*pod["volumes"], {"name": "meeting", "hostPath": directory}]
    return template
