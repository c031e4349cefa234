"""Kubernetes JobSet (jobset.x-k8s.io/v1alpha2): all roles as one object that comes to an end."""

from __future__ import annotations

from paramserver.render import pods
from paramserver.render.request import Containers, Files, Request
from paramserver.render.text import yaml_text

# How often the coordinator or a server is started again.
_RETRIES = 6


def render(request: Request) -> Files:
    """Manifests by file name, for ``kubectl apply -f DIRECTORY``."""
    name = pods.object_name(request)
    # A JobSet names its pods NAME-ROLE-JOB-POD, in a headless service of its own name.
    containers = Containers(
        request, f"{name}-coordinator-0-0.{name}", pods.store_url(name), "exit", meeting=request.meeting
    )
    files = {
        **pods.common_files(name, containers),
        "jobset.yaml": yaml_text(
            "The job, as one object for clusters with JobSet. It succeeds when the workers have done their work and\n"
            "the coordinator has written the result. The servers end by themselves.\n"
            "No role depends on another (dependsOn): processes wait for each other in any order, and pods that are\n"
            "created together can be scheduled together.",
            [_jobset(name, containers)],
        ),
    }
    return dict(sorted(files.items()))


def _jobset(name: str, containers: Containers) -> pods.Object:
    servers = containers.request.settings.cluster.servers
    spec = {
        # Also of pods that are not ready yet: the others look for the coordinator from the beginning.
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["coordinator", "worker"]},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [
            _role("coordinator", _job(1, pods.coordinator_pod(name, containers, "OnFailure"))),
            _role("server", _job(servers, pods.server_pod(name, containers, "OnFailure"))),
            _role("worker", pods.worker_job(name, containers)),
        ],
    }
    meta = {"name": name, "labels": pods.labels(name, "job")}
    return pods.kubernetes_object("jobset.x-k8s.io/v1alpha2", "JobSet", meta, spec=spec)


def _role(role: str, job: pods.Object) -> pods.Object:
    return {"name": role, "replicas": 1, "template": {"spec": job}}


def _job(count: int, template: pods.Object) -> pods.Object:
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": _RETRIES,
        "template": template,
    }
