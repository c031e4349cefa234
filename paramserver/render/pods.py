"""Pods, and the Kubernetes objects that plain manifests and JobSets share."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paramserver.config import ENV_CONFIG
from paramserver.errors import ConfigError
from paramserver.render import monitoring, volumes
from paramserver.render.request import (
    CERTS,
    ETC,
    HEALTH,
    HOPELESS,
    RESULTS,
    STOP_S,
    STORE_CERTIFICATE,
    STORE_COMMANDS,
    STORE_IMAGE,
    STORE_KEY,
    STORE_PORT,
    STORE_SECRET,
    UID,
    Containers,
    Files,
    Request,
    Values,
)
from paramserver.render.text import Octal, double_dollars, environment, toml_text, yaml_text

Object = dict[str, Any]

# Names that are made of a job's name and a number must fit into a label of DNS.
MAX_NAME_CHARS = 40
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_CONFIG = f"{ETC}/config"
# Enough for a small model.
_MEMORY = {"coordinator": "1Gi", "server": "2Gi", "worker": "2Gi"}
_RETRIES = 3
_STORE_RIGHTS = " ".join(f"+{command}" for command in STORE_COMMANDS.split())

# The user goes in by a pipe: arguments and environment are in sight of others. The store gets its password's hash.
_STORE_SCRIPT = f"""\
digest=$(printf %s "$(cat {STORE_SECRET})" | sha256sum | cut -c 1-64)
exec valkey-server - --dir /data --appendonly yes --maxmemory-policy noeviction <<CONFIGURATION
port 0
tls-port {STORE_PORT}
tls-cert-file {STORE_CERTIFICATE}
tls-key-file {STORE_KEY}
tls-auth-clients no
user default off
user paramserver on #$digest resetkeys ~paramserver:* resetchannels -@all {_STORE_RIGHTS}
CONFIGURATION
"""


def kubernetes_object(api: str, kind: str, meta: Object, **parts: object) -> Object:
    """An object of Kubernetes. ``parts``: "spec", or "data"."""
    return {"apiVersion": api, "kind": kind, "metadata": meta, **parts}


def common_files(name: str, containers: Containers) -> Files:
    """The files of the configuration and of the store that is started along with the job."""
    files = {
        "config.yaml": yaml_text(
            "The coordinator's configuration. Servers and workers get their settings from the coordinator.\n\n"
            + secrets_text(name, containers),
            [config_map(name, containers)],
        )
    }
    if (claim := volumes.data_claim(containers)) is not None:
        meta = metadata(name, "coordinator", "data")
        files["data.yaml"] = yaml_text(
            volumes.data_head(containers), [kubernetes_object("v1", "PersistentVolumeClaim", meta, spec=claim)]
        )
    if containers.own_store:
        files["store.yaml"] = yaml_text(
            "The store of the coordinator: a Valkey server, which shows a certificate of its own. Only the\n"
            "coordinator talks to it, as a user that may do what the coordinator needs. The tag of the image may\n"
            "move: to say which bytes run, write valkey/valkey@sha256:DIGEST, with the digest that this shows:\n"
            f"  docker buildx imagetools inspect {STORE_IMAGE}",
            store_objects(name),
        )
    files["network.yaml"] = yaml_text(
        "Who may connect to whom, where the network of the cluster knows policies. Members of the job reach each\n"
        "other, and only the coordinator reaches the store."
        + ("" if containers.dashboard == "off" else f"\n{_who_scrapes(containers)}"),
        network_policies(name, containers),
    )
    if containers.dashboard != "off":
        files["monitoring.yaml"] = _monitoring(name, containers)
    return files


def _monitoring(name: str, containers: Containers) -> str:
    """Configuration, alerts and dashboard for a Prometheus and a Grafana in the cluster."""
    certs = "" if containers.request.insecure else CERTS
    head = (
        "For a Prometheus and a Grafana in the cluster, which are not started here. Prometheus needs this\n"
        "configuration and these rules. A Grafana that collects ConfigMaps with the label grafana_dashboard shows the\n"
        "dashboard."
    )
    if certs:
        command = _secret_command(f"{name}-monitoring-keys", "certs/{ca.crt,join.token}")
        head += f"\nPrometheus shows the token of the members. Mount this Secret at {certs}:\n  {command}"
    data = {"prometheus.yml": monitoring.kubernetes_config(name, certs), "rules.yml": monitoring.rules()}
    meta = metadata(name, "monitoring")
    shown = metadata(name, "monitoring", "dashboard")
    shown["labels"] = {**shown["labels"], "grafana_dashboard": "1"}
    return yaml_text(
        head,
        [
            kubernetes_object("v1", "ConfigMap", meta, data=data),
            kubernetes_object("v1", "ConfigMap", shown, data={"paramserver.json": monitoring.dashboard()}),
        ],
    )


def _scraped(containers: Containers, address: str, template: Object) -> Object:
    """The template of a pod that serves metrics at ``address``, in the words by which Prometheus finds it."""
    port = address.rpartition(":")[2]
    if port == "off":
        return template
    scheme = "http" if containers.request.insecure else "https"
    (container,) = template["spec"]["containers"]
    ports = container.setdefault("ports", [])
    container["ports"] = [*ports, {"name": "metrics", "containerPort": int(port), "protocol": "TCP"}]
    annotations = {"scrape": "true", "port": port, "path": "/metrics", "scheme": scheme}
    meta = template["metadata"]
    own = {f"prometheus.io/{key}": value for key, value in annotations.items()}
    template["metadata"] = {**meta, "annotations": {**meta.get("annotations", {}), **own}}
    return template


def object_name(request: Request) -> str:
    """The first part of the names of all objects. Raises ConfigError if it cannot be one."""
    name = request.job
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME_CHARS:
        raise ConfigError(
            f'cluster.job is "{name}", which Kubernetes does not take for a name; choose one of up to '
            f"{MAX_NAME_CHARS} lower-case letters, digits and hyphens that begins with a letter"
        )
    return name


def secret_name(name: str, role: str) -> str:
    """The Secret with the keys and tokens of this role alone."""
    return f"{name}-{role}-keys"


def store_url(name: str) -> str:
    """The address of the store that is started along with the job."""
    return f"rediss://paramserver@{name}-store:{STORE_PORT}/0?ssl_ca_certs={STORE_CERTIFICATE}"


def secrets_text(name: str, containers: Containers) -> str:
    """How to make the Secrets that the objects refer to, in words and commands."""
    commands = []
    if not containers.request.insecure:
        commands.append("paramserver certs init ./certs")
        commands += [
            _secret_command(secret_name(name, role), f"certs/{{{','.join(secret_files(role))}}}")
            for role in ("coordinator", "server", "worker")
        ]
    if containers.password_file:
        made = _secret_command(f"{name}-store", f"password={'/dev/stdin' if containers.own_store else 'FILE'}")
        if containers.own_store:
            commands.append(
                "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 "
                f"-subj /CN={name}-store -addext subjectAltName=DNS:{name}-store -keyout store.key -out store.crt"
            )
            made = f"openssl rand -hex 24 | {made} --from-file=tls.crt=store.crt --from-file=tls.key=store.key"
        commands.append(made)
    if containers.checkpoints.by_url:
        commands.append(
            f"kubectl create secret generic {volumes.storage_keys(name)} --from-env-file=storage.env   "
            f"# NAME=value, keys of {containers.checkpoints.dir}; none if pods have a role"
        )
    if not commands:
        return ""
    return "The Secrets, which are made once and never written here (with bash):\n\n" + "\n".join(
        f"  {one}" for one in commands
    )


def secret_files(role: str) -> list[str]:
    """The files that a role needs of the directory that `paramserver certs init` makes."""
    files = ["ca.crt", f"{role}.crt", f"{role}.key", "join.token"]
    # Commands are given in the coordinator's container.
    return [*files, "admin.crt", "admin.key", "admin.token"] if role == "coordinator" else files


def _secret_command(name: str, files: str) -> str:
    return f"kubectl create secret generic {name} --from-file={files}"


def metadata(name: str, role: str, suffix: str = "") -> Object:
    """Name and labels of an object."""
    return {"name": f"{name}-{suffix or role}", "labels": labels(name, role)}


def labels(name: str, role: str) -> dict[str, str]:
    """Labels by which objects find their pods."""
    return {
        "app.kubernetes.io/name": "paramserver",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/component": role,
    }


def config_map(name: str, containers: Containers) -> Object:
    """The coordinator's configuration file."""
    data = {"cluster.toml": toml_text("", containers.coordinator_values())}
    return kubernetes_object("v1", "ConfigMap", metadata(name, "coordinator", "config"), data=data)


def coordinator_pod(name: str, containers: Containers, restart: str) -> Object:
    """The template of the coordinator's pod."""
    request = containers.request
    container = _container(request, "coordinator", ["start", "coordinator", "--continue"], {})
    # Also for commands that are given in the container.
    container["env"] = [{"name": ENV_CONFIG, "value": f"{_CONFIG}/cluster.toml"}]
    container |= volumes.key_sources(name, containers)
    container["workingDir"] = RESULTS
    container["ports"] = [{"name": "grpc", "containerPort": request.port, "protocol": "TCP"}]
    container["volumeMounts"] += [
        {"name": "config", "mountPath": _CONFIG, "readOnly": True},
        volumes.data_mount(),
    ]
    more: list[Object] = [
        {"name": "config", "configMap": {"name": f"{name}-config"}},
        volumes.data_volume(name, containers),
    ]
    if containers.password_file:
        container["volumeMounts"].append(_store_mount())
        more.append(_store_volume(name, "password", *(["tls.crt"] if containers.own_store else [])))
    template = _template(request, name, "coordinator", container, more, restart)
    # A change of the configuration changes the pod, and so reaches it.
    digest = hashlib.sha256(config_map(name, containers)["data"]["cluster.toml"].encode()).hexdigest()
    template["metadata"]["annotations"] = {"paramserver/config": digest[:16]}
    return _scraped(containers, containers.dashboard, template)


def server_pod(name: str, containers: Containers, restart: str) -> Object:
    """The template of a server's pod."""
    container = _container(containers.request, "server", ["start", "server"], containers.member_values())
    container |= volumes.key_sources(name, containers)
    more: list[Object] = []
    if containers.checkpoints.on_disk:
        container["volumeMounts"].append(volumes.data_mount())
        more.append(volumes.data_volume(name, containers))
    template = _template(containers.request, name, "server", container, more, restart)
    return _scraped(containers, containers.metrics, volumes.with_meeting(name, containers, template))


def worker_pod(name: str, containers: Containers) -> Object:
    """The template of a worker's pod."""
    request = containers.request
    container = _container(request, "worker", request.worker_words, containers.member_values())
    del container["readinessProbe"]  # workers are not called
    if request.gpu:
        container["resources"]["limits"] = {"nvidia.com/gpu": 1}
    more: list[Object] = []
    if request.dataset:
        container["volumeMounts"].append(volumes.dataset_mount())
        more.append(volumes.dataset_volume(containers))
    template = _template(request, name, "worker", container, more, "Never")
    return _scraped(containers, containers.metrics, volumes.with_meeting(name, containers, template))


def worker_job(name: str, containers: Containers) -> Object:
    """The specification of the workers' Job."""
    workers = containers.request.settings.cluster.workers
    return {
        "completionMode": "Indexed",
        "completions": workers,
        "parallelism": workers,
        "backoffLimitPerIndex": _RETRIES,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "worker", "operator": "In", "values": list(HOPELESS)},
                },
            ]
        },
        "template": worker_pod(name, containers),
    }


def store_objects(name: str) -> list[Object]:
    """A Valkey server with a volume, and the service by which the coordinator finds the server."""
    role = "store"
    container: Object = {
        "name": role,
        "image": STORE_IMAGE,
        "command": ["sh", "-c", double_dollars(_STORE_SCRIPT)],
        "ports": [{"name": "valkey", "containerPort": STORE_PORT, "protocol": "TCP"}],
        "readinessProbe": {"tcpSocket": {"port": "valkey"}, "periodSeconds": 5},
        "livenessProbe": {"tcpSocket": {"port": "valkey"}, "periodSeconds": 20},
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
        "securityContext": _container_security(),
        "volumeMounts": [
            {"name": "data", "mountPath": "/data"},
            {"name": "tmp", "mountPath": "/tmp"},
            _store_mount(),
        ],
    }
    mounted = [{"name": "tmp", "emptyDir": {}}, _store_volume(name, "password", "tls.crt", "tls.key")]
    spec = {
        "serviceName": f"{name}-{role}",
        "replicas": 1,
        "selector": {"matchLabels": labels(name, role)},
        "template": {"metadata": {"labels": labels(name, role)}, "spec": _pod(container, mounted, "Always")},
        "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": volumes.claim("ReadWriteOnce", "1Gi")}],
    }
    store = kubernetes_object("apps/v1", "StatefulSet", metadata(name, role), spec=spec)
    return [service(name, role, STORE_PORT, "valkey"), store]


def network_policies(name: str, containers: Containers) -> list[Object]:
    """Who may connect to the pods of the job. What pods connect to by themselves is not limited, but for the store."""
    members = {
        "matchLabels": {key: value for key, value in labels(name, "").items() if value},
        "matchExpressions": [
            {"key": "app.kubernetes.io/component", "operator": "In", "values": ["coordinator", "server", "worker"]}
        ],
    }
    allowed: list[Object] = [{"from": [{"podSelector": members}]}]
    ports = {int(where.rpartition(":")[2]) for where in (containers.dashboard, containers.metrics) if where != "off"}
    if ports:
        everywhere: Object = {"podSelector": {}} if containers.request.insecure else {"namespaceSelector": {}}
        open_ports = [{"port": port, "protocol": "TCP"} for port in sorted(ports)]
        allowed.append({"from": [everywhere], "ports": open_ports})
    spec = {"podSelector": members, "policyTypes": ["Ingress"], "ingress": allowed}
    found = [_policy(metadata(name, "job", "members"), spec)]
    if containers.own_store:
        caller = {"podSelector": {"matchLabels": labels(name, "coordinator")}}
        spec = {
            "podSelector": {"matchLabels": labels(name, "store")},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [caller], "ports": [{"port": STORE_PORT, "protocol": "TCP"}]}],
            "egress": [],
        }
        found.append(_policy(metadata(name, "store"), spec))
    return found


def _policy(meta: Object, spec: Object) -> Object:
    return kubernetes_object("networking.k8s.io/v1", "NetworkPolicy", meta, spec=spec)


def _who_scrapes(containers: Containers) -> str:
    if containers.request.insecure:
        return "Page and metrics: every pod of this namespace, as there is no token."
    return "Page and metrics, which take a token: every pod of the cluster, since Prometheus may be anywhere."


def service(name: str, role: str, port: int, port_name: str) -> Object:
    """The address of the pods of a role that are ready."""
    spec = {"selector": labels(name, role), "ports": [{"name": port_name, "port": port, "targetPort": port_name}]}
    return kubernetes_object("v1", "Service", metadata(name, role), spec=spec)


def _container(request: Request, role: str, words: Sequence[str], values: Values) -> Object:
    mounts: list[Object] = [{"name": "tmp", "mountPath": "/tmp"}]
    if role != "coordinator":
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    if not request.insecure:
        mounts.append({"name": "keys", "mountPath": CERTS, "readOnly": True})
    training = request.settings.training
    threads = {"server": max(1, training.threads_per_server), "worker": training.threads_per_worker}.get(role, "250m")
    return {
        "name": role,
        "image": request.image,
        "args": double_dollars(list(words)),
        "env": [{"name": key, "value": double_dollars(value)} for key, value in environment(values).items()],
        # No native gRPC probe: it cannot show a certificate.
        # A server shows itself when it has found the coordinator.
        "startupProbe": _probe([*HEALTH], 5, math.ceil(request.settings.cluster.join_timeout_s / 5) + 12),
        "livenessProbe": _probe([*HEALTH], 20, 3),
        "readinessProbe": _probe([*HEALTH, "--ready"], 10, 2),
        "resources": {"requests": {"cpu": threads, "memory": _MEMORY[role]}},
        "securityContext": _container_security(),
        "volumeMounts": mounts,
    }


def _probe(command: Sequence[str], period_s: int, failures: int) -> Object:
    return {
        "exec": {"command": list(command)},
        "periodSeconds": period_s,
        "timeoutSeconds": 10,
        "failureThreshold": failures,
    }


def _template(
    request: Request, name: str, role: str, container: Object, more: Sequence[Object], restart: str
) -> Object:
    own: list[Object] = [{"name": "tmp", "emptyDir": {}}]
    if role != "coordinator":
        own.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}})
    if not request.insecure:
        own.append({"name": "keys", "secret": {"secretName": secret_name(name, role), "defaultMode": Octal(0o440)}})
    return {"metadata": {"labels": labels(name, role)}, "spec": _pod(container, [*own, *more], restart)}


def _pod(container: Mapping[str, Any], mounted: Sequence[Object], restart: str) -> Object:
    return {
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": STOP_S,
        "automountServiceAccountToken": False,
        # Else Kubernetes sets variables such as PARAMSERVER_STORE_PORT, which are refused as unknown settings.
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "runAsGroup": UID,
            "fsGroup": UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [dict(container)],
        "volumes": list(mounted),
    }


def _container_security() -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _store_mount() -> Object:
    return {"name": "store", "mountPath": STORE_SECRET.rpartition("/")[0], "readOnly": True}


def _store_volume(name: str, *keys: str) -> Object:
    items = [{"key": key, "path": key} for key in keys]
    secret = {"secretName": f"{name}-store", "defaultMode": Octal(0o440), "items": items}
    return {"name": "store", "secret": secret}
