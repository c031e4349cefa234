"""`paramserver render`: what becomes of the settings, and what is refused."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from paramserver.cli.common import guard
from paramserver.cli.prepare.render import render
from paramserver.config import ENV_PREFIX, FIELDS, Settings, load_settings
from paramserver.errors import ConfigError
from paramserver.render.output import as_stream, write_directory
from paramserver.render.request import Files, Request
from paramserver.render.targets import TARGETS, WATCHING
from paramserver.render.text import double_dollars, environment_file, toml_text, unit_words
from paramserver.transport.security.tls import server_name
from tests.support.rendered import containers, objects, pods

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "configs" / "cluster.toml"
CONTAINERS = ("compose", "k8s", "jobset")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No paramserver.toml lies about."""
    monkeypatch.chdir(tmp_path)


def settings(**values: object) -> Settings:
    """The example's, with other values: ``cluster__store="redis://h"``."""
    overrides = {key.replace("__", "."): value for key, value in values.items()}
    return load_settings(EXAMPLE, overrides, environ={})


def rendered(target: str, options: Mapping[str, Any] | None = None, **values: Any) -> Files:
    """``options``: of the command."""
    return TARGETS[target](Request(settings(**values), **{"image": "i:1", **(options or {})}))


def named(files: Files, kind: str, name: str) -> dict[str, Any]:
    """The one object of that kind and name."""
    (found,) = (one for one in objects(files) if one["kind"] == kind and one["metadata"]["name"] == name)
    return found


def coordinator_settings(target: str, files: Files, tmp_path: Path) -> Settings:
    """The settings that the coordinator would load."""
    if target == "compose":
        return load_settings(environ=compose_environment(files, "coordinator"))
    text = files["cluster.toml"] if target == "systemd" else objects(files)[0]["data"]["cluster.toml"]
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return load_settings(path, environ={})


def member_settings(target: str, files: Files, role: str) -> Settings:
    """The settings that a server or worker would load."""
    if target == "systemd":
        return load_settings(environ=shell_environment(files["member.env"]))
    if target == "compose":
        return load_settings(environ=compose_environment(files, role))
    return load_settings(environ={one["name"]: one["value"] for one in containers(files)[role]["env"]})


def compose_environment(files: Files, service: str) -> dict[str, str]:
    (document,) = objects(files)
    environment: dict[str, str] = document["services"][service]["environment"]
    return {key: value for key, value in environment.items() if key.startswith(ENV_PREFIX)}


def shell_environment(text: str) -> dict[str, str]:
    """What a shell makes of the assignments, by name."""
    path = Path("member.env")
    path.write_text(text)
    script = "set -a; unset PWD OLDPWD SHLVL; . ./member.env; env -0"
    out = subprocess.run(["sh", "-c", script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=True).stdout
    pairs = (item.partition("=") for item in out.decode().split("\0") if item)
    return {name: value for name, _, value in pairs if name not in ("PATH", "PWD", "OLDPWD", "SHLVL", "_")}


def refusal(target: str, options: Mapping[str, Any] | None = None, **values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        rendered(target, options, **values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what the processes will read


@pytest.mark.parametrize("target", TARGETS)
def test_the_coordinator_reads_the_jobs_settings(target: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "cluster__lease_s": 2.5,
        "consistency__mode": "async",
        "consistency__staleness": "unbounded",
        "training__seed": 7,
        "log__level": "debug",
        "cluster__servers": 3,
        "run__summary": "out/summary.json",
        "checkpoint__every_s": 60.0,
    }
    files = rendered(target, **changes)
    loaded = coordinator_settings(target, files, tmp_path).values()
    wanted = settings(**changes).values()
    own = {"cluster.coordinator", "cluster.listen", "cluster.advertise_host", "cluster.job", "cluster.store"}
    own |= {"cluster.store_password_file", "cluster.when_done", "run.script", "run.args", "security.certs"}
    own |= {"security.insecure", "checkpoint.dir", "log.format", "web.dashboard"}
    for key in set(FIELDS) - own:
        assert loaded[key] == wanted[key], key
    assert loaded["log.format"] == ("auto" if target == "systemd" else "json")
    assert loaded["run.script"] == ""


@pytest.mark.parametrize("target", TARGETS)
def test_members_know_the_address_and_what_concerns_their_machine(target: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "cluster__store": "redis://h:6379/0",
        "cluster__store_password_file": "/secret/file",
        "consistency__mode": "async",
        "training__device": "cuda:0",
        "cluster__job": "digits",
        "log__level": "warning",
    }
    files = rendered(target, **changes)
    coordinator = coordinator_settings(target, files, tmp_path)
    for role in ("server", "worker"):
        loaded = member_settings(target, files, role)
        assert loaded.cluster.coordinator == coordinator.cluster.coordinator
        assert loaded.training.device == "cuda:0"
        assert loaded.log.level == "warning"
        assert loaded.security == coordinator.security
        # The mode may have been changed since, and the store is the coordinator's alone.
        assert loaded.consistency == Settings().consistency
        assert (loaded.cluster.store, loaded.cluster.store_password_file) == ("auto", "")


@pytest.mark.parametrize("target", ["systemd", "k8s", "jobset"])
def test_tls_unless_it_is_expressly_not_wanted(target: str, tmp_path: Path) -> None:
    certs = "/etc/paramserver/certs"
    for given in ("", "./certs", certs):
        files = rendered(target, security__certs=given)
        for loaded in (coordinator_settings(target, files, tmp_path), member_settings(target, files, "worker")):
            assert (loaded.security.certs, loaded.security.insecure) == (certs, False)
    files = rendered(target, security__certs="", security__insecure=True)
    for loaded in (coordinator_settings(target, files, tmp_path), member_settings(target, files, "worker")):
        assert (loaded.security.certs, loaded.security.insecure) == ("", True)
    assert "certs" not in "".join(files.values()).replace("ssl_ca_certs=", "")  # of the store, which has its own


@pytest.mark.parametrize("target", TARGETS)
def test_no_secret_is_written(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {
        "PARAMSERVER_SECURITY__TOKEN": "CANARY-join-token-1",
        "PARAMSERVER_SECURITY__ADMIN_TOKEN": "CANARY-admin-token-2",
    }
    Path("canary").write_text("CANARY-password\n")
    loaded = load_settings(EXAMPLE, {"cluster.store": "redis://h", "cluster.store_password_file": "canary"}, environ)
    assert loaded.security.token.get_secret_value() == "CANARY-join-token-1"
    assert "CANARY" not in as_stream(TARGETS[target](Request(loaded)))


@pytest.mark.parametrize("url", ["redis://user:CANARY@h:6379/0", "redis://h/0?password=CANARY", "redis://:CANARY@h"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_password_in_the_stores_address_is_refused_and_not_shown(target: str, url: str) -> None:
    text = refusal(target, cluster__store=url)
    assert "cluster.store_password_file" in text
    assert "CANARY" not in text


# ---- addresses and the store


def test_addresses_in_containers(tmp_path: Path) -> None:
    for target, host in (("k8s", "digits-coordinator"), ("jobset", "digits-coordinator-0-0.digits")):
        files = rendered(target, cluster__job="digits", cluster__coordinator="example:9000")
        cluster = coordinator_settings(target, files, tmp_path).cluster
        assert (cluster.coordinator, cluster.listen, cluster.advertise_host) == (f"{host}:9000", "0.0.0.0:9000", host)
        assert containers(files)["coordinator"]["ports"][0] == {
            "name": "grpc",
            "containerPort": 9000,
            "protocol": "TCP",
        }
    service = named(rendered("k8s", cluster__coordinator=""), "Service", "paramserver-coordinator")
    assert service["spec"]["ports"][0]["port"] == 8790


@pytest.mark.parametrize("target", ["k8s", "jobset"])
def test_a_store_of_its_own_or_another_one(target: str, tmp_path: Path) -> None:
    own = rendered(target)
    cluster = coordinator_settings(target, own, tmp_path).cluster
    certificate = "/run/secrets/paramserver/tls.crt"
    assert cluster.store == f"rediss://paramserver@paramserver-store:6379/0?ssl_ca_certs={certificate}"
    assert cluster.store_password_file == "/run/secrets/paramserver/password"
    assert "store.yaml" in own
    script = containers(own)["store"]["command"][2]
    # $$ is a $ for Kubernetes, and then the shell reads the file.
    assert 'printf %s "$$(cat /run/secrets/paramserver/password)" | sha256sum' in script

    other = rendered(target, cluster__store="rediss://h:6380/1")
    cluster = coordinator_settings(target, other, tmp_path).cluster
    assert (cluster.store, cluster.store_password_file) == ("rediss://h:6380/1", "")
    assert "store.yaml" not in other
    assert "paramserver-store" not in as_stream(other)

    with_password = rendered(target, cluster__store="redis://h", cluster__store_password_file="x/y")
    cluster = coordinator_settings(target, with_password, tmp_path).cluster
    assert cluster.store_password_file == "/run/secrets/paramserver/password"
    assert "create secret generic paramserver-store " in as_stream(with_password)


@pytest.mark.parametrize(
    "url", ["unix:///run/valkey.sock", "redis://localhost:6379", "redis://127.0.0.1", "redis://[::1]:1"]
)
@pytest.mark.parametrize("target", CONTAINERS)
def test_a_store_on_this_machine_is_no_store_for_containers(target: str, url: str) -> None:
    assert "no container can reach" in refusal(target, cluster__store=url)


# ---- systemd


def test_systemd_needs_the_coordinators_address() -> None:
    assert "cluster.coordinator is empty" in refusal("systemd", cluster__coordinator="")


def test_units_say_what_is_needed_for_the_job_at_hand() -> None:
    files = rendered("systemd", run__script="/srv/train 1.py", run__args=["--name", "100 %", "$HOME", 'a"b\\c'])
    worker = files["paramserver-worker@.service"]
    words = r'-- "/srv/train 1.py" --name "100 %%" "$$HOME" "a\"b\\c"'
    assert f"ExecStart=/opt/paramserver/bin/paramserver start worker {words}\n" in worker
    assert "CUDA_VISIBLE_DEVICES" not in worker
    assert "CUDA_VISIBLE_DEVICES=%i" in rendered("systemd", {"gpu": True})["paramserver-worker@.service"]
    assert "-- /opt/paramserver/workers/digits.py --epochs 5\n" in rendered("systemd")["paramserver-worker@.service"]


def test_results_outside_of_the_state_directory_may_be_written() -> None:
    unit = "paramserver-coordinator.service"
    assert "ReadWritePaths" not in rendered("systemd", run__save="model.safetensors")[unit]
    files = rendered("systemd", run__save="/data/models/m.safetensors", run__summary="/var/lib/paramserver/s.json")
    assert "\nReadWritePaths=/data/models\n" in files[unit]


# ---- Kubernetes


def test_replicas_gpu_and_standby() -> None:
    files = rendered("k8s", {"gpu": True, "standby": True, "image": "r/p:2"}, cluster__servers=3, cluster__workers=5)
    assert named(files, "StatefulSet", "paramserver-server")["spec"]["replicas"] == 3
    job = named(files, "Job", "paramserver-worker")["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (5, 5, "Indexed")
    assert named(files, "Deployment", "paramserver-coordinator")["spec"]["replicas"] == 2
    found = containers(files)
    assert found["worker"]["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert "limits" not in found["server"]["resources"]
    assert {found[role]["image"] for role in ("coordinator", "server", "worker")} == {"r/p:2"}


@pytest.mark.parametrize("target", ["k8s", "jobset"])
def test_pods_of_a_node_meet_if_that_is_wanted(target: str) -> None:
    """In a directory per namespace and job, which a container of root without capabilities opens for their group."""

    plain, sharing = pods(rendered(target)), pods(rendered(target, {"share_memory": True}, cluster__job="digits"))
    assert not [role for role, pod in plain.items() if "hostPath" in str(pod) or "meeting" in str(pod).lower()]
    for role, pod in sharing.items():
        if role not in ("server", "worker"):
            assert "hostPath" not in str(pod)
            continue
        assert {"name": "meeting", "hostPath": {"path": "/run/paramserver-pods", "type": "DirectoryOrCreate"}} in pod[
            "volumes"
        ]
        (opener,), (container,) = pod["initContainers"], pod["containers"]
        mount = {"name": "meeting", "mountPath": "/meeting", "subPathExpr": "$(POD_NAMESPACE)/digits"}
        assert opener["volumeMounts"] == [mount]
        assert mount in container["volumeMounts"]
        assert opener["command"][-1] == "chgrp 10001 /meeting && chmod 1730 /meeting"
        security = opener["securityContext"]
        assert (security["runAsUser"], security["runAsNonRoot"]) == (0, False)
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["allowPrivilegeEscalation"] is False
        assert pod["securityContext"]["runAsGroup"] == 10001
        assert {"name": "PARAMSERVER_CLUSTER__MEETING_DIR", "value": "/meeting"} in container["env"]
        assert container["env"][0]["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}


def test_the_page_is_published_to_this_machine_only() -> None:
    (own,) = yaml.safe_load_all((ROOT / "docker-compose.yml").read_text())
    assert own["services"]["coordinator"]["ports"] == ["127.0.0.1:${DASHBOARD_PORT:-8780}:8780"]
    files = rendered("compose")
    assert objects(files)[0]["services"]["coordinator"]["ports"] == ["127.0.0.1:8780:8780"]
    assert "https://127.0.0.1:8780. To sign in:" in files["docker-compose.yml"]
    (off,) = objects(rendered("compose", web__dashboard="off"))
    assert "ports" not in off["services"]["coordinator"]


def test_containers_of_compose_meet_where_only_their_group_may_enter() -> None:
    (document,) = objects(rendered("compose"))
    (own,) = yaml.safe_load_all((ROOT / "docker-compose.yml").read_text())
    for one in (document, own):
        assert one["volumes"]["meeting"]["driver_opts"]["type"] == "tmpfs"
        options = set(one["volumes"]["meeting"]["driver_opts"]["o"].split(","))
        assert {"mode=1730", "gid=10001", "size=1m", "nosuid", "nodev", "noexec"} <= options
        assert not [option for option in options if option.startswith("uid=")]
        meeting = {
            name for name, service in one["services"].items() if "meeting:/meeting" in service.get("volumes", ())
        }
        told = {
            name
            for name, service in one["services"].items()
            if service.get("environment", {}).get("PARAMSERVER_CLUSTER__MEETING_DIR") == "/meeting"
        }
        assert meeting == told == {"server", "worker", *({"worker-gpu"} & one["services"].keys())}


def test_a_jobset_ends_and_its_results_stay(tmp_path: Path) -> None:
    files = rendered("jobset", cluster__servers=3, cluster__workers=5, run__summary="s.json")
    spec = named(files, "JobSet", "paramserver")["spec"]
    assert [one["name"] for one in spec["replicatedJobs"]] == ["coordinator", "server", "worker"]
    assert [one["template"]["spec"]["completions"] for one in spec["replicatedJobs"]] == [1, 3, 5]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["coordinator", "worker"]}
    assert coordinator_settings("jobset", files, tmp_path).cluster.when_done == "exit"
    assert coordinator_settings("k8s", rendered("k8s"), tmp_path).cluster.when_done == "stay"
    pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "paramserver-data"}} in pod["volumes"]
    assert pod["containers"][0]["workingDir"] == "/data"


def test_a_changed_configuration_starts_the_coordinator_again() -> None:
    def mark(**values: Any) -> str:
        template = named(rendered("k8s", **values), "Deployment", "paramserver-coordinator")["spec"]["template"]
        return str(template["metadata"]["annotations"]["paramserver/config"])

    assert mark() == mark()
    assert mark() != mark(consistency__mode="async")


@pytest.mark.parametrize("name", ["My_Job", "0digits", "a.b", "x" * 41, "digits-"])
@pytest.mark.parametrize("target", ["k8s", "jobset"])
def test_names_that_kubernetes_does_not_take(target: str, name: str) -> None:
    assert f'cluster.job is "{name}"' in refusal(target, cluster__job=name)
    rendered("systemd", cluster__job=name)


# ---- all containers


@pytest.mark.parametrize("target", CONTAINERS)
def test_words_that_would_be_expanded_are_not(target: str) -> None:
    files = rendered(target, run__args=["$(HOME)", "${HOME}", "a$"])
    if target == "compose":
        words = objects(files)[0]["services"]["worker"]["command"]
    else:
        words = containers(files)["worker"]["args"]
    assert words[-3:] == ["$$(HOME)", "$${HOME}", "a$$"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_script_is_needed(target: str) -> None:
    assert "run.script is empty" in refusal(target, run__script="")


@pytest.mark.parametrize("path", ["/tmp/x.json", "../x.json", "/data/../x", "/database/x"])
@pytest.mark.parametrize("target", CONTAINERS)
def test_results_where_a_container_cannot_write(target: str, path: str) -> None:
    assert f'run.summary is "{path}"' in refusal(target, run__summary=path)
    rendered(target, run__summary="/data/x.json")


def test_standby_needs_a_store() -> None:
    assert "standby" in refusal("k8s", {"standby": True}, cluster__store="memory")
    rendered("k8s", cluster__store="memory")


@pytest.mark.parametrize("image", ["", "a b", " a", "a\n"])
def test_images_that_are_none(image: str) -> None:
    assert "is not an image" in refusal("k8s", {"image": image})


# ---- text


def test_text_of_odd_values() -> None:
    odd = 'a"b\\c $HOME `id` # é'
    assert shell_environment(environment_file("head\nmore", {"log.level": odd, "cluster.job": "x"})) == {
        "PARAMSERVER_LOG__LEVEL": odd,
        "PARAMSERVER_CLUSTER__JOB": "x",
    }
    toml = toml_text("head", {"run.summary": odd, "run.args": ("a b", '"'), "security.insecure": True})
    Path("x.toml").write_text(toml)
    loaded = load_settings(Path("x.toml"), environ={})
    assert (loaded.run.summary, loaded.run.args, loaded.security.insecure) == (odd, ("a b", '"'), True)
    assert unit_words(["a", "", "x y", "50%", "line\nend"]) == r'a "" "x y" "50%%" "line\nend"'
    assert double_dollars({"a": ["$x", 1], "b": "$$"}) == {"a": ["$$x", 1], "b": "$$$$"}


# ---- the command


def run(capsys: pytest.CaptureFixture[str], target: str, **options: Any) -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    code = guard(lambda: render(target, **options))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_without_a_directory_everything_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "k8s", config=EXAMPLE, set_=["cluster.workers=3"])
    assert code == 0
    kinds = [one["kind"] for one in yaml.safe_load_all(out)]
    assert kinds.count("StatefulSet") == 2
    assert len(kinds) == 14
    assert "parallelism: 3" in out
    code, out, _ = run(capsys, "systemd", config=EXAMPLE, prefix="/srv/ps/")
    assert code == 0
    assert out.count("# ==== ") == 5
    assert "ExecStart=/srv/ps/bin/paramserver start server\n" in out
    code, out, _ = run(capsys, "compose", config=EXAMPLE, image="r/p:2", dataset="/srv/images")
    assert yaml.safe_load(out)["services"]["server"]["image"] == "r/p:2"
    assert "/srv/images:/dataset:ro" in yaml.safe_load(out)["services"]["worker"]["volumes"]
    code, out, _ = run(capsys, "k8s", config=EXAMPLE, dataset="images", storage_class="nfs")
    assert "storageClassName: nfs" in out
    assert "claimName: images" in out


def test_a_directory_is_filled_and_not_overwritten(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    code, out, _ = run(capsys, "jobset", config=EXAMPLE, output=folder)
    assert code == 0
    assert sorted(out.split()) == sorted(str(path) for path in folder.iterdir())
    (folder / "jobset.yaml").write_text("mine")
    (folder / "notes.txt").write_text("mine, too")
    code, _, error = run(capsys, "jobset", config=EXAMPLE, output=folder)
    assert code == 2
    assert "is not empty" in error
    assert (folder / "jobset.yaml").read_text() == "mine"
    code, _, _ = run(capsys, "jobset", config=EXAMPLE, output=folder, force=True)
    assert code == 0
    assert "kind: JobSet" in (folder / "jobset.yaml").read_text()
    assert (folder / "notes.txt").read_text() == "mine, too"


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_directory({"a": "b"}, tmp_path / "file" / "x", force=False)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_directory({"a": "b"}, tmp_path / "file", force=True)


MISTAKES: Sequence[tuple[str, dict[str, Any], str]] = [
    ("jobsets", {}, 'did you mean "jobset"?'),
    ("helm", {}, "there are systemd, compose, k8s, jobset, monitoring"),
    ("systemd", {"image": "x"}, "--image means nothing to systemd"),
    ("k8s", {"prefix": "/x"}, "--prefix means nothing to k8s"),
    ("compose", {"standby": True}, "--standby means nothing to compose"),
    ("systemd", {"dataset": "/srv"}, "--dataset means nothing to systemd"),
    ("compose", {"storage_class": "nfs"}, "--storage-class means nothing to compose"),
    ("compose", {"dataset": "images"}, "must be a directory such as /srv/images"),
    ("k8s", {"dataset": "/srv/images"}, "must be the name of a PersistentVolumeClaim"),
    ("k8s", {"storage_class": "nfs", "set_": ["checkpoint.dir=none"]}, "leave one of them out"),
    ("k8s", {"force": True}, "name it with --output"),
    ("systemd", {"prefix": "venv"}, "is not an absolute path"),
    ("k8s", {"set_": ["cluster.wrkers=3"]}, 'did you mean "cluster.workers"?'),
    ("k8s", {"config": Path("nowhere.toml")}, "does not exist"),
]


@pytest.mark.parametrize(("target", "options", "hint"), MISTAKES, ids=lambda value: str(value)[:40])
def test_mistakes_take_one_line(
    capsys: pytest.CaptureFixture[str], target: str, options: dict[str, Any], hint: str
) -> None:
    code, out, error = run(capsys, target, **{"config": EXAMPLE, **options})
    assert code == 2
    assert out == ""
    assert hint in error
    assert error.count("\n") == 1


# ---- metrics


def test_pods_say_where_they_serve_metrics() -> None:
    for target in ("k8s", "jobset"):
        found = containers(rendered(target))
        ports = {
            name: {port["name"]: port["containerPort"] for port in one.get("ports", [])} for name, one in found.items()
        }
        assert [ports[role].get("metrics") for role in ("coordinator", "server", "worker", "store")] == [
            *(8780, 8781, 8781),
            None,
        ]
    pod = named(rendered("k8s"), "Deployment", "paramserver-coordinator")["spec"]["template"]
    annotations = pod["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == "8780"
    assert annotations["prometheus.io/scheme"] == "https"
    assert "paramserver/config" in annotations


@pytest.mark.parametrize("target", CONTAINERS)
def test_without_a_dashboard_there_are_no_metrics(target: str) -> None:
    text = as_stream(rendered(target, web__dashboard="off"))
    assert "8780" not in text
    assert "8781" not in text
    assert "prometheus" not in text


def test_prometheus_asks_each_coordinator_for_the_members() -> None:
    made = WATCHING["monitoring"](Request(settings(cluster__coordinator="a:8790,b:8790", web__dashboard="0.0.0.0:99")))
    jobs = {one["job_name"]: one for one in yaml.safe_load(made["prometheus.yml"])["scrape_configs"]}
    assert jobs["paramserver"]["static_configs"][0]["targets"] == ["a:99", "b:99"]
    assert [one["url"] for one in jobs["paramserver-worker"]["http_sd_configs"]] == [
        "https://a:99/api/v1/targets?role=worker",
        "https://b:99/api/v1/targets?role=worker",
    ]
    names = {name: one["tls_config"]["server_name"] for name, one in jobs.items()}
    assert names == {
        "paramserver": server_name("coordinator"),
        "paramserver-server": server_name("server"),
        "paramserver-worker": server_name("worker"),
    }


def test_a_job_without_tls_is_scraped_without_secrets() -> None:
    made = WATCHING["monitoring"](Request(settings(security__insecure=True, security__certs="")))
    for one in yaml.safe_load(made["prometheus.yml"])["scrape_configs"]:
        assert one["scheme"] == "http"
        assert not {"authorization", "tls_config"} & one.keys()
