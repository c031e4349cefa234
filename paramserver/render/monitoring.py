"""Prometheus and Grafana for a job: configuration, alert rules, and a dashboard. None of these files has a secret."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paramserver.config import split_addresses
from paramserver.render.request import DASHBOARD_PORT, Files, Request
from paramserver.render.text import yaml_text

# The same for every job.
_FILES = Path(__file__).parent / "files"
_EVERY = "15s"
# Where compose mounts the files.
DIRECTORY = "/monitoring"
PROMETHEUS_PORT = 9090
GRAFANA_PORT = 3000
PROMETHEUS_IMAGE = "prom/prometheus:v3.5.0"
GRAFANA_IMAGE = "grafana/grafana:12.1.0"
# In the certificates of a role (paramserver.transport.security.tls.server_name).
_SERVER_NAME = "{}.paramserver.internal"
ROLES = ("coordinator", "server", "worker")

_Config = dict[str, Any]


def render(request: Request) -> Files:
    """The files for Prometheus and Grafana, which find the members by asking the coordinator."""
    return {
        "prometheus.yml": prometheus_yml(_asking_the_coordinator(request)),
        "rules.yml": rules(),
        "grafana/provisioning/datasources/paramserver.yml": yaml_text(
            "Grafana's source of data.",
            [
                {
                    "apiVersion": 1,
                    "datasources": [
                        {
                            "name": "paramserver",
                            "uid": "paramserver",
                            "type": "prometheus",
                            "access": "proxy",
                            "url": f"http://prometheus:{PROMETHEUS_PORT}",
                            "isDefault": True,
                            "jsonData": {"timeInterval": _EVERY},
                        }
                    ],
                }
            ],
        ),
        "grafana/provisioning/dashboards/paramserver.yml": yaml_text(
            "Where Grafana finds the dashboard.",
            [
                {
                    "apiVersion": 1,
                    "providers": [
                        {
                            "name": "paramserver",
                            "type": "file",
                            "options": {"path": f"{DIRECTORY}/grafana/dashboards"},
                        }
                    ],
                }
            ],
        ),
        "grafana/dashboards/paramserver.json": dashboard(),
    }


def rules() -> str:
    """The alerts."""
    return (_FILES / "rules.yml").read_text(encoding="utf-8")


def dashboard() -> str:
    """The dashboard of Grafana."""
    return (_FILES / "grafana.json").read_text(encoding="utf-8")


def prometheus_yml(scrape_configs: list[_Config]) -> str:
    """The configuration of Prometheus."""
    head = "Prometheus for a job of paramserver: prometheus --config.file=prometheus.yml"
    whole = {
        "global": {"scrape_interval": _EVERY, "evaluation_interval": _EVERY},
        "rule_files": ["rules.yml"],
        "scrape_configs": scrape_configs,
    }
    return yaml_text(head, [whole])


def credentials(certs: str, token: str, role: str) -> _Config:
    """How Prometheus shows itself to a process in this role. ``certs``: the directory of ca.crt; empty: no TLS."""
    found: _Config = {"scheme": "https" if certs else "http"}
    if token:
        # The type: Prometheus 2.42 has no default for it in http_sd_configs.
        found["authorization"] = {"type": "Bearer", "credentials_file": token}
    if certs:
        found["tls_config"] = {"ca_file": f"{certs}/ca.crt", "server_name": _SERVER_NAME.format(role)}
    return found


def _asking_the_coordinator(request: Request) -> list[_Config]:
    """The coordinator's address is known, and the coordinator gives the addresses of the members' metrics."""
    security, web = request.settings.security, request.settings.web
    certs = "" if request.insecure else security.certs
    token = security.token_file or (f"{certs}/join.token" if certs else "")
    port = web.dashboard.rpartition(":")[2] if ":" in web.dashboard else DASHBOARD_PORT
    hosts = [address.rpartition(":")[0] for address in split_addresses(request.settings.cluster.coordinator)]
    targets = [f"{host}:{port}" for host in hosts or ["127.0.0.1"]]
    shown = credentials(certs, token, "coordinator")
    static: list[_Config] = [{"targets": targets, "labels": {"process": "coordinator"}}]
    asked = {key: value for key, value in shown.items() if key != "scheme"}
    found = [{"job_name": "paramserver", **shown, "static_configs": static}]
    for role in ROLES[1:]:
        asks = [_asks(f"{shown['scheme']}://{target}", role, asked) for target in targets]
        found.append({"job_name": f"paramserver-{role}", **credentials(certs, token, role), "http_sd_configs": asks})
    return found


def _asks(coordinator: str, role: str, shown: Mapping[str, Any]) -> _Config:
    return {"url": f"{coordinator}/api/v1/targets?role={role}", "refresh_interval": _EVERY, **shown}


# ---- docker-compose

_PROFILE = "monitoring"


def compose_services(
    node: Mapping[str, Any], image: str, secure: bool, environment: Mapping[str, str], certs: str
) -> dict[str, _Config]:
    """Services in the profile `monitoring`: one that writes the files, Prometheus, Grafana.

    ``node``: the limits of every container; ``certs``: the directory of the token and the certificate for Prometheus.
    """
    keys = [f"monitoring-keys:{certs}:ro"] if secure else []
    made = {"monitoring-files": {"condition": "service_completed_successfully"}}
    return {
        "monitoring-files": {
            "image": image,
            **node,
            "profiles": [_PROFILE],
            "command": ["render", "monitoring", "--output", DIRECTORY, "--force"],
            "environment": dict(environment),
            "network_mode": "none",
            "healthcheck": {"disable": True},
            "volumes": [f"monitoring:{DIRECTORY}"],
            "depends_on": {"certs": {"condition": "service_completed_successfully"}} if secure else {},
            "restart": "no",
        },
        "prometheus": {
            "image": PROMETHEUS_IMAGE,
            **node,
            "profiles": [_PROFILE],
            "command": [
                f"--config.file={DIRECTORY}/prometheus.yml",
                f"--storage.tsdb.path={DIRECTORY}/data",
                "--storage.tsdb.retention.time=15d",
            ],
            "ports": [f"127.0.0.1:{PROMETHEUS_PORT}:{PROMETHEUS_PORT}"],
            "volumes": [*keys, f"monitoring:{DIRECTORY}"],
            "networks": ["cluster", "monitoring"],
            "depends_on": made,
            "restart": "unless-stopped",
        },
        "grafana": {
            "image": GRAFANA_IMAGE,
            **node,
            "profiles": [_PROFILE],
            # Everybody who reaches the port may look; nobody can log in.
            "environment": {
                "GF_PATHS_PROVISIONING": f"{DIRECTORY}/grafana/provisioning",
                "GF_PATHS_DATA": "/tmp/data",
                "GF_PATHS_LOGS": "/tmp/logs",
                "GF_PATHS_PLUGINS": "/tmp/plugins",
                "GF_AUTH_ANONYMOUS_ENABLED": "true",
                "GF_AUTH_DISABLE_LOGIN_FORM": "true",
                "GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION": "true",
                "GF_ANALYTICS_REPORTING_ENABLED": "false",
                "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
                "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": f"{DIRECTORY}/grafana/dashboards/paramserver.json",
            },
            "ports": [f"127.0.0.1:{GRAFANA_PORT}:{GRAFANA_PORT}"],
            "volumes": [f"monitoring:{DIRECTORY}:ro"],
            "networks": ["monitoring"],
            "depends_on": made,
            "restart": "unless-stopped",
        },
    }


# ---- Kubernetes


def kubernetes_config(name: str, certs: str) -> str:
    """The configuration of a Prometheus in the cluster, which finds the pods by their labels.

    ``certs``: where ca.crt and join.token are mounted; empty: the job has neither.
    """
    found = []
    for role in ROLES:
        label = f"app.kubernetes.io/instance={name},app.kubernetes.io/component={role}"
        found.append(
            {
                "job_name": "paramserver" if role == ROLES[0] else f"paramserver-{role}",
                **credentials(certs, f"{certs}/join.token" if certs else "", role),
                "kubernetes_sd_configs": [{"role": "pod", "selectors": [{"role": "pod", "label": label}]}],
                "relabel_configs": [
                    {
                        "source_labels": ["__meta_kubernetes_pod_container_port_name"],
                        "action": "keep",
                        "regex": "metrics",
                    },
                    {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "process"},
                ],
            }
        )
    return prometheus_yml(found)
