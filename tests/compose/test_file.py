"""The compose file itself: valid for both generations, and with nothing secret in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.compose.harness import ROOT, Cluster

FILE = ROOT / "docker-compose.yml"


@pytest.fixture(scope="module")
def resolved() -> dict[str, Any]:
    """The file as the docker-compose that is here understands it, with all profiles."""
    text = Cluster().compose("--profile", "gpu", "--profile", "monitoring", "config").out
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def test_it_follows_the_specification() -> None:
    """docker-compose ignores some unknown keys; the schema does not."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_schema_check_finds_mistakes(tmp_path: Path) -> None:
    wrong = tmp_path / "docker-compose.yml"
    wrong.write_text(FILE.read_text().replace("read_only: true", "read_onyl: true", 1))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(wrong)]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 1


def test_it_has_nothing_that_compose_1_29_rejects() -> None:
    """The first generation knows none of these, though the specification does."""
    text = FILE.read_text()
    raw = yaml.safe_load(text)
    assert "name" not in raw
    assert not [word for word in ("develop:", "start_interval", "gpus:", "include:") if word in text]


def test_every_service_is_locked_up(resolved: dict[str, Any]) -> None:
    for name, service in resolved["services"].items():
        assert service["user"] == "10001:10001", name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["init"] is True, name
        assert "privileged" not in service, name
        assert ("ports" in service) == (name in ("coordinator", "prometheus", "grafana")), name
        assert all("127.0.0.1" in json.dumps(port) for port in service.get("ports", ())), name
        assert not [volume for volume in service["volumes"] if "docker.sock" in json.dumps(volume)], name


def test_who_is_started_again(resolved: dict[str, Any]) -> None:
    policies = {name: service["restart"] for name, service in resolved["services"].items()}
    assert policies == {
        "certs": "no",
        "redis": "unless-stopped",
        "coordinator": "unless-stopped",
        "server": "unless-stopped",
        "worker": "on-failure",
        "worker-gpu": "on-failure",
        "monitor": "unless-stopped",
        "monitoring-files": "no",
        "prometheus": "unless-stopped",
        "grafana": "unless-stopped",
    }


def test_the_gpu_is_asked_for(resolved: dict[str, Any]) -> None:
    devices = resolved["services"]["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]


def test_profiles() -> None:
    services = yaml.safe_load(FILE.read_text())["services"]
    profiles = {name: service["profiles"] for name, service in services.items() if "profiles" in service}
    watching = {name: ["monitoring"] for name in ("monitoring-files", "prometheus", "grafana")}
    assert profiles == {"worker-gpu": ["gpu"], "monitor": ["state", "monitoring"], **watching}


def test_the_monitoring_has_the_token_and_no_key(resolved: dict[str, Any]) -> None:
    """Prometheus may read metrics, but cannot become a member."""
    for name in ("monitoring-files", "prometheus", "grafana"):
        mounted = json.dumps(resolved["services"][name]["volumes"])
        assert not [role for role in ("ca:", "coordinator-keys", "server-keys", "worker-keys") if role in mounted]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_settings_of_the_shell_reach_the_coordinator(mode: str) -> None:
    cluster = Cluster(PARAMSERVER_CONSISTENCY__MODE=mode, PARAMSERVER_TRAINING__SLICES_PER_STEP="8", WORKERS="3")
    services = yaml.safe_load(cluster.compose("config").out)["services"]
    environment = services["coordinator"]["environment"]
    assert environment["PARAMSERVER_CONSISTENCY__MODE"] == mode
    assert environment["PARAMSERVER_TRAINING__SLICES_PER_STEP"] == "8"
    assert environment["PARAMSERVER_CLUSTER__WORKERS"] == "3"
    assert services["worker"]["deploy"]["replicas"] == 3
    # The others learn it from the coordinator.
    assert "PARAMSERVER_CONSISTENCY__MODE" not in services["worker"]["environment"]


def test_only_the_coordinator_knows_the_store(resolved: dict[str, Any]) -> None:
    services = resolved["services"]
    assert {name for name, one in services.items() if "store" in one.get("networks", {})} == {"redis", "coordinator"}
    assert {name for name, one in services.items() if "redis://" in json.dumps(one)} == {"coordinator"}


def test_the_docker_command_exists() -> None:
    """For all other tests in this directory: none of them is skipped where it is missing."""
    assert os.access("/var/run/docker.sock", os.W_OK) or os.environ.get("DOCKER_HOST")
