"""docker-compose, for one machine: the shape of the docker-compose.yml of the project, with the job's own settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paramserver.config import ENV_RESTART_COMMAND
from paramserver.errors import ConfigError
from paramserver.render import monitoring
from paramserver.render.request import (
    COMPOSE_CERTS,
    COMPOSE_STORE,
    COMPOSE_STORE_PASSWORD,
    DATASET,
    MEETING,
    RESULTS,
    STORE_IMAGE,
    STORE_PORT,
    STORE_SECRET,
    UID,
    Containers,
    Files,
    Request,
    Values,
)
from paramserver.render.text import double_dollars, environment, yaml_text

_Service = dict[str, Any]

_STORE_KEYS = "redis"
_GRACE = "30s"
# With the keys of the storage behind a URL.
_STORAGE_KEYS = "storage.env"
# A file system for the sockets of processes that meet to share memory. Only the group of the image's user may enter it,
# and only root can list it: a meeting is found by the process that was told its name.
_MEETING_VOLUME: Mapping[str, Any] = {
    "driver": "local",
    "driver_opts": {
        "type": "tmpfs",
        "device": "tmpfs",
        "o": f"size=1m,nr_inodes=4096,mode=1730,gid={UID},nosuid,nodev,noexec",
    },
}
# The limits of every container.
_NODE: Mapping[str, Any] = {
    "init": True,
    "user": f"{UID}:{UID}",
    "read_only": True,
    "tmpfs": ["/tmp:mode=1777"],
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "pids_limit": 1024,
    "ulimits": {"nofile": 16384},
    "stop_grace_period": _GRACE,
    "logging": {"driver": "json-file", "options": {"max-size": "10m", "max-file": "3"}},
}


def render(request: Request) -> Files:
    """One file. Raises ConfigError if the settings do not fit containers."""
    containers = Containers(
        request,
        coordinator="coordinator",
        store=COMPOSE_STORE,
        when_done="stay",
        certs=COMPOSE_CERTS,
        store_password=COMPOSE_STORE_PASSWORD,
        meeting=MEETING,
    )
    own_store = containers.own_store
    services: dict[str, _Service] = {}
    if own_store or not request.insecure:
        services["certs"] = _certs(containers)
    if own_store:
        services["redis"] = _redis()
    services["coordinator"] = _coordinator(containers)
    services["server"] = _member(containers, "server", ["start", "server"], request.settings.cluster.servers)
    services["worker"] = _member(containers, "worker", request.worker_words, request.settings.cluster.workers)
    if containers.dashboard != "off":
        services |= _monitoring(containers)
    mounted = {mount.partition(":")[0] for one in services.values() for mount in one.get("volumes", ())}
    volumes = sorted(name for name in mounted if "/" not in name)
    document = {
        "services": double_dollars(services),
        "volumes": {name: _MEETING_VOLUME if name == "meeting" else {} for name in volumes},
        "networks": {
            "cluster": {},
            **({"store": {"internal": True}} if own_store else {}),
            **({"monitoring": {}} if "prometheus" in services else {}),
        },
    }
    password = request.settings.cluster.store_password_file
    head = (
        "A cluster on one machine, for Compose 1.29 and 2.\n"
        "  docker-compose up\n"
        "  docker-compose up --scale worker=8                        also while it trains\n"
        "  docker-compose exec coordinator paramserver status\n"
        "  docker-compose --profile monitoring up                    with Grafana at http://127.0.0.1:3000"
        f"{_page(containers)}"
    )
    if containers.password_file and not own_store:
        document["secrets"] = {"password": {"file": double_dollars(password)}}
        head += f"\nThe file with the store's password has to be one that user {UID} can read."
    if containers.checkpoints.by_url:
        head += (
            f"\nThe file {_STORAGE_KEYS} beside this one holds the keys of {containers.checkpoints.dir},\n"
            "one NAME=value a line. Only its user should be able to read it:\n"
            f"  touch {_STORAGE_KEYS} && chmod 600 {_STORAGE_KEYS}"
        )
    return {"docker-compose.yml": yaml_text(head, [document])}


def _page(containers: Containers) -> str:
    """A line about the page of the job; empty if there is none."""
    if containers.dashboard == "off":
        return ""
    scheme, sign_in = "https", ". To sign in:\n  docker-compose exec coordinator paramserver dashboard --token"
    if containers.request.insecure:
        scheme, sign_in = "http", ""
    return f"\nThe page of the job is at {scheme}://127.0.0.1:{containers.dashboard.rpartition(':')[2]}{sign_in}"


def _coordinator(containers: Containers) -> _Service:
    service = _node(containers, "coordinator", ["start", "coordinator", "--continue"], containers.coordinator_values())
    service["volumes"].append(f"data:{RESULTS}")
    service["working_dir"] = RESULTS
    if containers.dashboard != "off":
        port = containers.dashboard.rpartition(":")[2]
        service["ports"] = [f"127.0.0.1:{port}:{port}"]
    if containers.checkpoints.by_url:
        service["env_file"] = [_STORAGE_KEYS]
    if containers.own_store:
        service["networks"].append("store")
        service["depends_on"]["redis"] = {"condition": "service_healthy"}
        if containers.request.insecure:
            service["volumes"].append(f"coordinator-keys:{COMPOSE_CERTS}:ro")
            service["depends_on"]["certs"] = {"condition": "service_completed_successfully"}
    elif containers.password_file:
        service["secrets"] = [{"source": "password", "target": STORE_SECRET}]
    return service


def _member(containers: Containers, role: str, words: list[str], count: int) -> _Service:
    service = _node(containers, role, words, containers.member_values())
    service["shm_size"] = "1g"
    service["volumes"].append(f"meeting:{MEETING}")
    service["deploy"] = {"replicas": count}
    if role == "server" and containers.checkpoints.on_disk:
        service["volumes"].append(f"data:{RESULTS}")
    if role == "server" and containers.checkpoints.by_url:
        service["env_file"] = [_STORAGE_KEYS]
    if role == "worker":
        if containers.request.dataset:
            service["volumes"].append(f"{_directory(containers.request.dataset)}:{DATASET}:ro")
        # A worker that has done its work is not started again.
        service["restart"] = "on-failure"
        if containers.request.gpu:
            device = {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
            service["deploy"]["resources"] = {"reservations": {"devices": [device]}}
    return service


def _directory(path: str) -> str:
    """The workers' data on this machine. Raises ConfigError for a path that Compose would take for something else."""
    if not path.startswith(("/", "./", "../")) or ":" in path:
        raise ConfigError(f'--dataset is "{path}", but must be a directory such as /srv/images or ./images')
    return path


def _node(containers: Containers, role: str, words: list[str], values: Values) -> _Service:
    service: _Service = {
        "image": containers.request.image,
        **_NODE,
        "command": words,
        # Docker gives a container its own name as the name of the host.
        "environment": {**environment(values), ENV_RESTART_COMMAND: "docker start $HOSTNAME"},
        "volumes": [],
        "networks": ["cluster"],
        "depends_on": {},
        "restart": "unless-stopped",
    }
    if not containers.request.insecure:
        service["volumes"].append(f"{role}-keys:{COMPOSE_CERTS}:ro")
        service["depends_on"]["certs"] = {"condition": "service_completed_successfully"}
    return service


def _certs(containers: Containers) -> _Service:
    """Makes missing certificates, tokens and the store's password, and ends."""
    roles = ("ca", "coordinator-keys", "server-keys", "worker-keys", "monitoring-keys", _STORE_KEYS)
    return {
        "image": containers.request.image,
        **_NODE,
        "entrypoint": ["python", "/app/keys.py"],
        "network_mode": "none",
        "healthcheck": {"disable": True},
        "volumes": [f"{name}:/keys/{name.removesuffix('-keys')}" for name in roles],
        "restart": "no",
    }


def _monitoring(containers: Containers) -> dict[str, _Service]:
    secure = not containers.request.insecure
    values: Values = {
        "cluster.coordinator": f"{containers.coordinator}:{containers.request.port}",
        "web.dashboard": containers.dashboard,
        **containers.request.security_values(COMPOSE_CERTS),
    }
    return monitoring.compose_services(_NODE, containers.request.image, secure, environment(values), COMPOSE_CERTS)


def _redis() -> _Service:
    return {
        "image": STORE_IMAGE,
        **{key: value for key, value in _NODE.items() if key not in ("tmpfs", "ulimits")},
        "command": [
            *("valkey-server", "--dir", "/state", "--aclfile", "/state/users.acl", "--port", str(STORE_PORT)),
            *("--appendonly", "yes", "--maxmemory-policy", "noeviction"),
        ],
        "volumes": [f"{_STORE_KEYS}:/state"],
        "networks": ["store"],
        "depends_on": {"certs": {"condition": "service_completed_successfully"}},
        "healthcheck": {
            # A client without a password gets an answer, too.
            "test": ["CMD-SHELL", "valkey-cli ping | grep -Eq 'PONG|NOAUTH'"],
            "interval": "2s",
            "timeout": "5s",
            "retries": 30,
        },
        "restart": "unless-stopped",
    }
