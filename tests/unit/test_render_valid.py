"""Rendered files are what the programs that read them accept, and deploy/ holds what is rendered now."""

from __future__ import annotations

import configparser
import copy
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

from paramserver.config import load_settings
from paramserver.render.request import UID, Files, Request
from paramserver.render.targets import TARGETS, WATCHING
from tests.support import rendered

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "configs" / "cluster.toml"
KUBERNETES = ("1.33", "1.37")

# Every target with everything it can render.
VARIANTS: dict[str, tuple[dict[str, object], dict[str, Any]]] = {
    "example": ({}, {}),
    "everything": (
        {
            "cluster.job": "digits",
            "cluster.servers": 3,
            "consistency.mode": "async",
            "run.summary": "summary.json",
            "run.args": ["--name", "a $b %c 'd' \"e\""],
            "training.device": "cuda",
            "log.level": "debug",
        },
        {"gpu": True, "standby": True, "share_memory": True},
    ),
    "other store": ({"cluster.store": "rediss://h:1/2", "cluster.store_password_file": "p"}, {}),
    "insecure": ({"security.insecure": True, "security.certs": ""}, {}),
    "object store": ({"checkpoint.dir": "s3://bucket/run", "run.save": "model.safetensors"}, {}),
    "no checkpoints": ({"checkpoint.dir": "none"}, {}),
    "insecure, other store": ({"security.insecure": True, "cluster.store": "redis://h"}, {}),
}


# The others are combinations of what these show.
_SHORT = {"example", "everything", "insecure, other store"}


@pytest.fixture(params=[pytest.param(name, marks=[] if name in _SHORT else pytest.mark.long) for name in VARIANTS])
def request_(request: pytest.FixtureRequest) -> Request:
    """One of the variants."""
    overrides, options = VARIANTS[request.param]
    return Request(load_settings(EXAMPLE, overrides, environ={}), **options)


# ---- deploy/


@pytest.mark.parametrize("target", [*TARGETS, *WATCHING])
def test_deploy_holds_what_is_rendered(target: str) -> None:
    directory = ROOT / "deploy" / target
    files = {**TARGETS, **WATCHING}[target](Request(load_settings(EXAMPLE, environ={})))
    found = {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}
    again = f"run: paramserver render {target} --config configs/cluster.toml --output deploy/{target} --force"
    assert found.keys() == files.keys(), again
    for name, text in files.items():
        assert found[name] == text, f"deploy/{target}/{name} is out of date; {again}"


# ---- systemd

UNIT = {"Description", "Wants", "After", "RequiresMountsFor", "StartLimitIntervalSec", "StartLimitBurst"}
SERVICE = {
    *("Type", "User", "Group", "WorkingDirectory", "Environment", "EnvironmentFile", "ExecStart", "UMask"),
    *("StateDirectory", "StateDirectoryMode", "RuntimeDirectory", "RuntimeDirectoryMode", "RuntimeDirectoryPreserve"),
    *("Restart", "RestartSec", "RestartPreventExitStatus", "SuccessExitStatus", "ReadWritePaths"),
    *("KillSignal", "KillMode", "TimeoutStopSec", "LimitNOFILE", "LimitCORE"),
    *("NoNewPrivileges", "CapabilityBoundingSet", "LockPersonality", "PrivateTmp", "PrivateDevices"),
    *("ProtectClock", "ProtectControlGroups", "ProtectHome", "ProtectHostname", "ProtectKernelLogs", "ProtectProc"),
    *("ProtectKernelModules", "ProtectKernelTunables", "ProtectSystem", "RestrictAddressFamilies"),
    *("RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID", "SystemCallArchitectures"),
    *("SystemCallErrorNumber", "SystemCallFilter"),
}
MAY_REPEAT = {"Environment", "EnvironmentFile"}


def assignments(unit: str) -> list[tuple[str, str, str]]:
    """Section, name and value of each line."""
    found, section = [], ""
    for line in unit.split("\n"):
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            name, equals, value = line.partition("=")
            assert equals, line
            found.append((section, name, value))
    return found


def test_units_say_what_systemd_knows(request_: Request, tmp_path: Path) -> None:
    known = {"Unit": UNIT, "Service": SERVICE, "Install": {"WantedBy"}}
    files = TARGETS["systemd"](request_)
    units = {name: text for name, text in files.items() if name.endswith(".service")}
    assert len(units) == 3
    for name, text in units.items():
        lines = assignments(text)
        for section, key, _ in lines:
            assert key in known[section], f"{section}.{key}"
        once = [key for _, key, _ in lines if key not in MAY_REPEAT]
        assert len(once) == len(set(once))
        parser = configparser.RawConfigParser(strict=False)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(text)
        service = parser["Service"]
        assert service["Restart"] == "on-failure"
        assert service["KillMode"] == "mixed"
        assert int(service["TimeoutStopSec"]) >= 30
        assert service["User"] == "paramserver"
        assert service["NoNewPrivileges"] == "yes"
        assert service["ProtectSystem"] == "strict"
        assert "143" in service["SuccessExitStatus"].split()
        assert ("PrivateDevices" in service) == ("worker" not in name), "a worker needs its GPU"
        # Nobody but the coordinator gets the coordinator's file, where the store stands.
        assert ("cluster.toml" in service["ExecStart"]) == ("coordinator" in name)
    assert "--continue" in units["paramserver-coordinator.service"]
    verify_where_possible(units, tmp_path)


def verify_where_possible(units: Files, directory: Path) -> None:
    """What systemd itself says, if it is installed, of the units with a program that exists."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        return
    for name, text in units.items():
        stub, count = re.subn(r"(?m)^ExecStart=/opt/paramserver/bin/paramserver", f"ExecStart={sys.executable}", text)
        assert count == 1
        path = directory / name.replace("@.", "@1.")
        path.write_text(stub)
        done = subprocess.run([analyze, "verify", str(path)], capture_output=True, text=True, check=False)
        complaints = [line for line in done.stderr.split("\n") if path.name in line]
        assert complaints == []


# ---- docker-compose


def compose_document(request: Request) -> dict[str, Any]:
    (text,) = TARGETS["compose"](request).values()
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def compose_errors(document: dict[str, Any], path: Path) -> str:
    """What the Compose specification has against it; empty if nothing."""
    path.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_the_compose_file_follows_the_specification(request_: Request, tmp_path: Path) -> None:
    document = compose_document(request_)
    assert compose_errors(document, tmp_path / "docker-compose.yml") == ""
    # Compose 1.29 knows none of these.
    assert document.keys() <= {"services", "volumes", "networks", "secrets"}
    services = document["services"]
    mounted = {mount.split(":")[0] for one in services.values() for mount in one.get("volumes", ())}
    assert mounted == set(document["volumes"])
    assert {name for one in services.values() for name in one.get("networks", ())} == set(document["networks"])
    assert {name for one in services.values() for name in one.get("depends_on", ())} <= services.keys()
    for name, service in services.items():
        assert service["user"] == f"{UID}:{UID}"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "container_name" not in service
        # Only the coordinator reaches the store, and each role has no other's keys.
        assert ("store" in service.get("networks", ())) == (name in ("redis", "coordinator") and "redis" in services)
        keys = {mount for mount in service.get("volumes", ()) if mount.endswith(":/certs:ro")}
        assert keys <= {f"{'monitoring' if name == 'prometheus' else name}-keys:/certs:ro"}


def test_the_check_of_compose_files_sees_mistakes(tmp_path: Path) -> None:
    document = compose_document(Request(load_settings(EXAMPLE, environ={})))
    document["services"]["worker"]["restrat"] = "no"
    assert "restrat" in compose_errors(document, tmp_path / "docker-compose.yml")


def test_the_compose_file_has_the_shape_of_the_projects_own() -> None:
    ours = compose_document(Request(load_settings(EXAMPLE, environ={})))["services"]
    hand_made = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for name, service in ours.items():
        other = hand_made[name]
        for key in ("user", "read_only", "cap_drop", "security_opt", "entrypoint", "network_mode", "restart", "init"):
            assert service.get(key) == other.get(key), f"{name}.{key}"
        assert set(service["volumes"]) <= set(other["volumes"])
        assert set(service.get("networks", ())) == set(other.get("networks", ()))
        assert service.get("depends_on", {}) == other.get("depends_on", {})
        assert service.get("healthcheck") == other.get("healthcheck")
    store, password = "PARAMSERVER_CLUSTER__STORE", "PARAMSERVER_CLUSTER__STORE_PASSWORD_FILE"
    for key in (store, password):
        assert ours["coordinator"]["environment"][key] == hand_made["coordinator"]["environment"][key]


# ---- Kubernetes


def validate(document: dict[str, Any]) -> None:
    for version in KUBERNETES:
        kubernetes_validate.validate(document, version, strict=True)


def kubernetes_objects(target: str, request: Request) -> list[dict[str, Any]]:
    """All objects; of a JobSet its Jobs, which Kubernetes has schemas of."""
    found = []
    for document in rendered.objects(TARGETS[target](request)):
        if document["kind"] == "JobSet":
            for one in document["spec"]["replicatedJobs"]:
                metadata = {"name": f"{document['metadata']['name']}-{one['name']}-0"}
                job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, **one["template"]}
                found.append(job)
        else:
            found.append(document)
    return found


def pod_templates(objects: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Objects that make pods, and the templates of these."""
    for one in objects:
        if "template" in one.get("spec", {}):
            yield one, one["spec"]["template"]


@pytest.mark.parametrize("target", ["k8s", "jobset"])
def test_manifests_follow_the_schemas(target: str, request_: Request) -> None:
    objects = kubernetes_objects(target, request_)
    for one in objects:
        validate(one)
        assert "namespace" not in one["metadata"]
        assert one["kind"] != "Secret"
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(names) == len(set(names))


def test_the_check_of_manifests_sees_mistakes() -> None:
    request = Request(load_settings(EXAMPLE, environ={}))
    for target in ("k8s", "jobset"):
        for owner, _ in pod_templates(kubernetes_objects(target, request)):
            broken = copy.deepcopy(owner)
            broken["spec"]["template"]["spec"]["containers"][0]["imagePullPolcy"] = "Always"
            with pytest.raises(kubernetes_validate.ValidationError, match="imagePullPolcy"):
                validate(broken)


@pytest.mark.parametrize("target", ["k8s", "jobset"])
def test_pods_are_confined_and_complete(target: str, request_: Request) -> None:
    files = TARGETS[target](request_)
    objects = kubernetes_objects(target, request_)
    config_maps = {one["metadata"]["name"] for one in objects if one["kind"] == "ConfigMap"}
    templates = list(pod_templates(objects))
    assert len(templates) in (3, 4)
    for owner, template in templates:
        pod = template["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == UID
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert pod["automountServiceAccountToken"] is False
        # Or Kubernetes sets variables such as PARAMSERVER_COORDINATOR_PORT, which are unknown settings.
        assert pod["enableServiceLinks"] is False
        assert pod["terminationGracePeriodSeconds"] > 30
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        claims = {one["metadata"]["name"] for one in owner["spec"].get("volumeClaimTemplates", ())}
        mounted = [mount["name"] for mount in container["volumeMounts"]]
        assert set(mounted) == {volume["name"] for volume in pod["volumes"]} | claims
        assert len(mounted) == len(set(mounted))
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}
        if "selector" in owner["spec"]:
            assert owner["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        text = "".join(files.values())
        for volume in pod["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440
                assert f"kubectl create secret generic {volume['secret']['secretName']} " in text
            if "configMap" in volume:
                assert volume["configMap"]["name"] in config_maps
        if container["name"] != "store":
            assert container["livenessProbe"]["exec"]["command"] == ["paramserver", "health"]
            budget_s = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
            assert budget_s > request_.settings.cluster.join_timeout_s
    ready = {
        template["spec"]["containers"][0]["name"]: "--ready"
        in template["spec"]["containers"][0].get("readinessProbe", {}).get("exec", {}).get("command", ())
        for _, template in templates
    }
    ready.pop("store", None)
    assert ready == {"coordinator": True, "server": True, "worker": False}


def test_services_lead_to_pods(request_: Request) -> None:
    objects = kubernetes_objects("k8s", request_)
    pods = [template for _, template in pod_templates(objects)]
    services = [one for one in objects if one["kind"] == "Service"]
    assert len(services) >= 2
    for service in services:
        (pod,) = (one for one in pods if service["spec"]["selector"].items() <= one["metadata"]["labels"].items())
        ports = {port["name"] for port in pod["spec"]["containers"][0].get("ports", ())}
        for port in service["spec"].get("ports", ()):
            assert port["targetPort"] in ports
    (servers,) = (
        one for one in objects if one["metadata"]["name"].endswith("-server") and one["kind"] == "StatefulSet"
    )
    assert servers["spec"]["podManagementPolicy"] == "Parallel"
    assert servers["spec"]["serviceName"] in {service["metadata"]["name"] for service in services}


def may_connect(policies: Sequence[Any], caller: dict[str, str], pod: dict[str, str], port: int) -> bool:
    """Whether a network that knows policies lets a pod of the same namespace with these labels connect to another."""

    def chosen(selector: dict[str, Any], labels: dict[str, str]) -> bool:
        words = selector.get("matchExpressions", ())
        return selector.get("matchLabels", {}).items() <= labels.items() and all(
            one["operator"] == "In" and labels.get(one["key"]) in one["values"] for one in words
        )

    def lets_in(rule: dict[str, Any]) -> bool:
        ports = [one["port"] for one in rule.get("ports", ())]
        peers = [chosen(one[kind], caller) for one in rule["from"] for kind in one]
        return (not ports or port in ports) and any(peers)

    rules = [one["spec"]["ingress"] for one in policies if chosen(one["spec"]["podSelector"], pod)]
    return not rules or any(lets_in(rule) for ingress in rules for rule in ingress)


@pytest.mark.parametrize("target", ["k8s", "jobset"])
def test_only_members_connect_to_members_and_only_the_coordinator_to_the_store(target: str, request_: Request) -> None:
    """There were no policies: every pod of the cluster could connect to every port."""
    objects = kubernetes_objects(target, request_)
    policies = [one for one in objects if one["kind"] == "NetworkPolicy"]
    labels: dict[str, dict[str, str]] = {}
    for _, template in pod_templates(objects):
        found = template["metadata"]["labels"]
        labels[found["app.kubernetes.io/component"]] = found
    if target == "jobset":
        for job in jobset(request_)["spec"]["replicatedJobs"]:
            labels[job["name"]] = job["template"]["spec"]["template"]["metadata"]["labels"]
    stranger = {"app": "another"}
    members = ("coordinator", "server", "worker")
    for pod in members:
        assert all(may_connect(policies, labels[caller], labels[pod], 8790) for caller in members)
        assert not may_connect(policies, stranger, labels[pod], 8790)
        assert may_connect(policies, stranger, labels[pod], 8780), "Prometheus reads metrics"
    if "store" in labels:
        reach = {name for name, own in labels.items() if may_connect(policies, own, labels["store"], 6379)}
        assert reach == {"coordinator"}
        assert not may_connect(policies, stranger, labels["store"], 6379)
        assert not may_connect(policies, labels["coordinator"], labels["store"], 22)


# ---- JobSet


def jobset(request: Request) -> dict[str, Any]:
    (found,) = (one for one in rendered.objects(TARGETS["jobset"](request)) if one["kind"] == "JobSet")
    return found


def kept(document: dict[str, Any]) -> Any:
    """What the model of a JobSet keeps of it; it drops what it does not know."""
    model = JobsetV1alpha2JobSet.from_dict(copy.deepcopy(document))
    assert model is not None
    return model.to_dict()


def test_the_model_of_a_jobset_drops_nothing(request_: Request) -> None:
    document = jobset(request_)
    assert kept(document) == document


def test_the_check_of_jobsets_sees_mistakes() -> None:
    document = jobset(Request(load_settings(EXAMPLE, environ={})))
    document["spec"]["succesPolicy"] = document["spec"]["successPolicy"]
    assert kept(document) != document


def test_what_the_controller_of_jobsets_demands(request_: Request) -> None:
    document = jobset(request_)
    spec = document["spec"]
    roles = [one["name"] for one in spec["replicatedJobs"]]
    assert set(spec["successPolicy"]["targetReplicatedJobs"]) <= set(roles)
    for one in spec["replicatedJobs"]:
        job = one["template"]["spec"]
        assert job["completionMode"] == "Indexed", "or pods have no stable names"
        longest = f"{'x' * 40}-{one['name']}-{one['replicas'] - 1}-{job['completions'] - 1}-abcde"
        assert len(longest) <= 63
        if "podFailurePolicy" in job:
            assert job["template"]["spec"]["restartPolicy"] == "Never"
            names = {container["name"] for container in job["template"]["spec"]["containers"]}
            for rule in job["podFailurePolicy"]["rules"]:
                assert rule.get("onExitCodes", {}).get("containerName", "worker") in names
    (config,) = (one for one in rendered.objects(TARGETS["jobset"](request_)) if "cluster.toml" in one.get("data", {}))
    host = f"{document['metadata']['name']}-coordinator-0-0.{document['metadata']['name']}"
    assert f'coordinator = "{host}:8790"' in config["data"]["cluster.toml"]
