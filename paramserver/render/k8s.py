"""Plain Kubernetes objects: no custom resources, no namespace, no secrets."""

from __future__ import annotations

from paramserver.render import pods
from paramserver.render.request import Containers, Files, Request
from paramserver.render.text import yaml_text


def render(request: Request) -> Files:
    """Manifests by file name, for ``kubectl apply -f DIRECTORY``."""
    name = pods.object_name(request)
    # A pod that has ended would be started again, so coordinator and servers stay when the job is done.
    containers = Containers(request, f"{name}-coordinator", pods.store_url(name), when_done="stay")
    files = {
        "config.yaml": yaml_text(
            "The coordinator's configuration. Servers and workers get from the coordinator what they need to know.\n\n"
            + pods.secrets_text(name, containers),
            [pods.config_map(name, containers), *pods.results_claim(name, containers)],
        ),
        "coordinator.yaml": yaml_text(
            "The coordinator. The Service leads to the one that is ready: one that stands by for another is not.\n"
            f"  kubectl exec deployment/{name}-coordinator -- paramserver status\n"
            f"  kubectl scale deployment/{name}-coordinator --replicas 2      a second one, on standby",
            [pods.coordinator_service(name, request), _coordinator(name, containers)],
        ),
        "server.yaml": yaml_text(
            "The servers. They call the coordinator, and tell it the address of their pod.\n"
            "One that is evicted takes its shard along: the budget forbids it. To empty a node all the same:\n"
            f"  kubectl delete poddisruptionbudget {name}-server",
            [_headless_service(name), _servers(name, containers), _budget(name)],
        ),
        "worker.yaml": yaml_text(
            "The workers. Their slices are taken over by others whenever one is lost.\n"
            f"  kubectl wait --for=condition=complete --timeout=-1s job/{name}-worker\n"
            f'  kubectl patch job {name}-worker -p \'{{"spec": {{"parallelism": 8, "completions": 8}}}}\'',
            [_workers(name, containers)],
        ),
    }
    if containers.own_store:
        files["store.yaml"] = yaml_text(
            "The store of the coordinator: a Valkey server. Only the coordinator talks to it.",
            pods.store_objects(name),
        )
    return dict(sorted(files.items()))


def _coordinator(name: str, containers: Containers) -> pods.Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": pods.metadata(name, "coordinator"),
        "spec": {
            "replicas": 2 if containers.request.standby else 1,
            # One that stands by is never ready, for which a rolling update would wait.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": pods.labels(name, "coordinator")},
            "template": pods.coordinator_pod(name, containers, "Always"),
        },
    }


def _headless_service(name: str) -> pods.Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": pods.metadata(name, "server"),
        "spec": {"clusterIP": "None", "selector": pods.labels(name, "server")},
    }


def _servers(name: str, containers: Containers) -> pods.Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": pods.metadata(name, "server"),
        "spec": {
            "serviceName": f"{name}-server",
            "replicas": containers.request.settings.cluster.servers,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": pods.labels(name, "server")},
            "template": pods.server_pod(name, containers, "Always"),
        },
    }


def _budget(name: str) -> pods.Object:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": pods.metadata(name, "server"),
        "spec": {"maxUnavailable": 0, "selector": {"matchLabels": pods.labels(name, "server")}},
    }


def _workers(name: str, containers: Containers) -> pods.Object:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": pods.metadata(name, "worker"),
        "spec": pods.worker_job(name, containers),
    }
