"""Plain Kubernetes objects: no custom resources, no namespace, no secrets."""

from __future__ import annotations

from paramserver.config import NO_CHECKPOINTS
from paramserver.render import pods
from paramserver.render.request import Containers, Files, Request
from paramserver.render.text import yaml_text


def render(request: Request) -> Files:
    """Manifests by file name, for ``kubectl apply -f DIRECTORY``."""
    name = pods.object_name(request)
    # A pod that has ended would be started again, so coordinator and servers stay when the job is done.
    containers = Containers(request, f"{name}-coordinator", pods.store_url(name), "stay", meeting=request.meeting)
    files = {
        **pods.common_files(name, containers),
        "coordinator.yaml": yaml_text(
            "The coordinator. The Service leads to the coordinator that is ready. A standby coordinator is not ready.\n"
            f"  kubectl exec deployment/{name}-coordinator -- paramserver status\n"
            f"  kubectl scale deployment/{name}-coordinator --replicas 2      a second one, on standby",
            [pods.service(name, "coordinator", request.port, "grpc"), _coordinator(name, containers)],
        ),
        "server.yaml": yaml_text(
            "The servers. They call the coordinator, and tell it the address of their pod.\n"
            + _about_eviction(name, containers),
            _servers(name, containers),
        ),
        "worker.yaml": yaml_text(
            "The workers. When a worker is lost, other workers take its slices.\n"
            f"  kubectl wait --for=condition=complete --timeout=-1s job/{name}-worker\n"
            f'  kubectl patch job {name}-worker -p \'{{"spec": {{"parallelism": 8, "completions": 8}}}}\'',
            [_workers(name, containers)],
        ),
    }
    return dict(sorted(files.items()))


def _lost_with_one(containers: Containers) -> bool:
    """Whether the death of a server ends the job."""
    return containers.checkpoints.dir == NO_CHECKPOINTS and not containers.request.replicated


def _about_eviction(name: str, containers: Containers) -> str:
    if _lost_with_one(containers):
        return (
            "If a server is evicted, its shard is lost, and there are no checkpoints: the budget forbids it. To empty\n"
            f"a node nevertheless:\n  kubectl delete poddisruptionbudget {name}-server"
        )
    if containers.request.replicated:
        return (
            "When a server is evicted, the others go on with its shards, and no step is done again. Another pod takes\n"
            "its place, and gets copies of shards in the background. The budget lets one server go at a time: wait\n"
            "until `paramserver status` shows all shards as replicated before the next server goes."
        )
    return (
        "When a server is evicted, another pod takes its place, and the job goes back to its last checkpoint. The\n"
        "budget lets one server go at a time."
    )


def _coordinator(name: str, containers: Containers) -> pods.Object:
    spec = {
        "replicas": 2 if containers.request.standby else 1,
        # A coordinator that stands by is never ready, for which a rolling update would wait.
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": pods.labels(name, "coordinator")},
        "template": pods.coordinator_pod(name, containers, "Always"),
    }
    return pods.kubernetes_object("apps/v1", "Deployment", pods.metadata(name, "coordinator"), spec=spec)


def _servers(name: str, containers: Containers) -> list[pods.Object]:
    """The servers, the service that names their pods, and the budget that says how many may be evicted at once."""
    labels, meta = pods.labels(name, "server"), pods.metadata(name, "server")
    spec = {
        "serviceName": f"{name}-server",
        "replicas": containers.request.settings.cluster.servers,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels},
        "template": pods.server_pod(name, containers, "Always"),
    }
    budget = {"maxUnavailable": 0 if _lost_with_one(containers) else 1, "selector": {"matchLabels": labels}}
    return [
        pods.kubernetes_object("v1", "Service", meta, spec={"clusterIP": "None", "selector": labels}),
        pods.kubernetes_object("apps/v1", "StatefulSet", meta, spec=spec),
        pods.kubernetes_object("policy/v1", "PodDisruptionBudget", meta, spec=budget),
    ]


def _workers(name: str, containers: Containers) -> pods.Object:
    meta = pods.metadata(name, "worker")
    return pods.kubernetes_object("batch/v1", "Job", meta, spec=pods.worker_job(name, containers))
