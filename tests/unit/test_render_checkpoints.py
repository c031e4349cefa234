"""`paramserver render`: the place of the checkpoints is mounted and writable for the coordinator and every server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paramserver.config import load_settings
from paramserver.errors import ConfigError
from paramserver.render.request import Files, Request
from paramserver.render.targets import TARGETS
from tests.support.rendered import objects, pods

EXAMPLE = Path(__file__).parents[2] / "configs" / "cluster.toml"
PODS = ("k8s", "jobset")
CONTAINERS = ("compose", *PODS)
KEEPERS = ("coordinator", "server")
URL = "s3://bucket/run"


def rendered(target: str, place: str | None = None, options: Mapping[str, Any] | None = None, **values: Any) -> Files:
    """``place``: checkpoint.dir; None: it is not given."""
    overrides = {key.replace("__", "."): value for key, value in values.items()} | {"checkpoint.dir": place}
    return TARGETS[target](Request(load_settings(EXAMPLE, overrides, environ={}), **(options or {})))


def refusal(target: str, place: str) -> str:
    with pytest.raises(ConfigError) as caught:
        rendered(target, place)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def services(files: Files) -> dict[str, dict[str, Any]]:
    (document,) = objects(files)
    found: dict[str, dict[str, Any]] = document["services"]
    return found


def checkpoint_dir(target: str, files: Files) -> str:
    """The value that the coordinator reads."""
    if target == "compose":
        return str(services(files)["coordinator"]["environment"]["PARAMSERVER_CHECKPOINT__DIR"])
    if target == "systemd":
        text = files["cluster.toml"]
    else:
        (text,) = (one["data"]["cluster.toml"] for one in objects(files) if "cluster.toml" in one.get("data", {}))
    Path("cluster.toml").write_text(text)
    return load_settings(Path("cluster.toml"), environ={}).checkpoint.dir


def mounts(pod: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By path in the container: the volume, with "readOnly" if the container cannot write there."""
    by_name = {volume["name"]: volume for volume in pod["volumes"]}
    return {
        mount["mountPath"]: {**by_name.get(mount["name"], {}), "readOnly": mount.get("readOnly", False)}
        for mount in pod["containers"][0]["volumeMounts"]
    }


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ---- a directory, which is the default


@pytest.mark.parametrize("target", TARGETS)
def test_checkpoints_are_on_by_default(target: str) -> None:
    wanted = "/var/lib/paramserver/checkpoints/paramserver" if target == "systemd" else "/data/checkpoints"
    assert checkpoint_dir(target, rendered(target)) == wanted
    assert checkpoint_dir(target, rendered(target, "runs/a")) == wanted.partition("checkpoints")[0] + "runs/a"


@pytest.mark.parametrize("place", [None, "runs/a", "/data/runs/a"])
@pytest.mark.parametrize("target", CONTAINERS)
def test_coordinator_and_servers_write_to_one_volume(target: str, place: str | None) -> None:
    files = rendered(target, place)
    # Checkpoints that are set aside are moved to a directory beside it, so that has to be in the volume, too.
    assert checkpoint_dir(target, files).count("/") >= 2
    if target == "compose":
        for role in KEEPERS:
            assert "data:/data" in services(files)[role]["volumes"]
        assert not [mount for mount in services(files)["worker"]["volumes"] if mount.startswith("data:")]
        return
    found = pods(files)
    for role in KEEPERS:
        assert mounts(found[role])["/data"] == {
            "name": "data",
            "persistentVolumeClaim": {"claimName": "paramserver-data"},
            "readOnly": False,
        }
        assert found[role]["securityContext"]["fsGroup"] == found[role]["securityContext"]["runAsUser"]
    assert "/data" not in mounts(found["worker"])
    (claim,) = (one for one in objects(files) if one["kind"] == "PersistentVolumeClaim")
    assert claim["metadata"]["name"] == "paramserver-data"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert "storageClassName" not in claim["spec"]


@pytest.mark.parametrize("target", PODS)
def test_the_claim_says_what_it_needs_and_what_to_do_without(target: str) -> None:
    files = rendered(target, options={"storage_class": "nfs"})
    (claim,) = (one for one in objects(files) if one["kind"] == "PersistentVolumeClaim")
    assert claim["spec"]["storageClassName"] == "nfs"
    for words in ("ReadWriteMany", "stays Pending", URL, '"none"'):
        assert words in files["data.yaml"]


@pytest.mark.parametrize("place", ["/mnt/run", "/data", ".", "../run", "a/../../b", "/data/../x", "/database/x"])
@pytest.mark.parametrize("target", CONTAINERS)
def test_a_directory_that_no_container_has(target: str, place: str) -> None:
    text = refusal(target, place)
    assert "checkpoint.dir is" in text
    assert "URL" in text or "must be below" in text


def test_units_may_write_where_checkpoints_are() -> None:
    files = rendered("systemd", "/mnt/shared/runs/a")
    inside = rendered("systemd")
    for role in ("coordinator", "server@"):
        unit = files[f"paramserver-{role}.service"]
        assert "\nReadWritePaths=/mnt/shared/runs\n" in unit
        assert "\nRequiresMountsFor=/mnt/shared/runs/a\n" in unit
        unit = inside[f"paramserver-{role}.service"]
        assert "ReadWritePaths" not in unit, "it lies in the state directory"
        assert "\nRequiresMountsFor=/var/lib/paramserver/checkpoints/paramserver\n" in unit
        assert "#   install -d -o paramserver -g paramserver -m 700 /var/lib/paramserver/checkpoints\n" in unit
    assert "shared" not in files["paramserver-worker@.service"]
    both = rendered("systemd", "/mnt/a/run", run__save="/srv/out/m.safetensors")["paramserver-coordinator.service"]
    assert "\nReadWritePaths=/mnt/a /srv/out\n" in both
    assert "digits" in checkpoint_dir("systemd", rendered("systemd", cluster__job="digits")), "two jobs may share it"


# ---- a URL


@pytest.mark.parametrize("target", PODS)
def test_keys_of_an_object_store_come_from_a_secret(target: str) -> None:
    files = rendered(target, URL)
    assert checkpoint_dir(target, files) == URL
    found = pods(files)
    wanted = [{"secretRef": {"name": "paramserver-storage", "optional": True}}]
    assert [found[role]["containers"][0].get("envFrom") for role in (*KEEPERS, "worker")] == [wanted, wanted, None]
    assert "kubectl create secret generic paramserver-storage --from-env-file=storage.env" in files["config.yaml"]
    assert mounts(found["coordinator"])["/data"]["emptyDir"] == {}
    assert "/data" not in mounts(found["server"])
    assert "data.yaml" not in files


@pytest.mark.parametrize(("standby", "mode"), [(False, "ReadWriteOnce"), (True, "ReadWriteMany")])
def test_results_alone_need_no_shared_volume(standby: bool, mode: str) -> None:
    files = rendered("k8s", URL, {"standby": standby}, run__summary="s.json")
    (claim,) = (one for one in objects(files) if one["kind"] == "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == [mode]


def test_keys_of_an_object_store_come_from_a_file() -> None:
    found = services(rendered("compose", URL))
    assert [found[role].get("env_file") for role in (*KEEPERS, "worker")] == [["storage.env"], ["storage.env"], None]
    assert "data:/data" not in found["server"]["volumes"]
    assert "chmod 600 storage.env" in rendered("compose", URL)["docker-compose.yml"]
    units = rendered("systemd", URL)
    assert checkpoint_dir("systemd", units) == URL
    for role, there in (("coordinator", True), ("server@", True), ("worker@", False)):
        unit = units[f"paramserver-{role}.service"]
        assert ("\nEnvironmentFile=-/etc/paramserver/storage.env\n" in unit) == there
        assert "RequiresMountsFor" not in unit


@pytest.mark.parametrize("target", TARGETS)
def test_urls_that_are_refused(target: str) -> None:
    text = refusal(target, "s3://key:CANARY@bucket/run")
    assert "CANARY" not in text
    assert "holds a key" in text
    assert "the memory of one process" in refusal(target, "memory://run")
    assert '"~"' in refusal(target, "~/run")


# ---- none


@pytest.mark.parametrize("target", TARGETS)
def test_none_is_said_expressly(target: str) -> None:
    files = rendered(target, "none")
    assert checkpoint_dir(target, files) == "none"
    if target == "compose":
        assert "data:/data" not in services(files)["server"]["volumes"]
    elif target in PODS:
        assert "/data" not in mounts(pods(files)["server"])
        assert mounts(pods(files)["coordinator"])["/data"]["emptyDir"] == {}
    else:
        assert "the death of all servers that hold a shard ends the job" in files["paramserver-server@.service"]
        files = rendered(target, "none", cluster__replicas=0)
        assert "the death of a server ends the job" in files["paramserver-server@.service"]


def test_a_server_may_be_evicted_if_there_are_checkpoints_or_replicas() -> None:
    def budget(place: str | None, replicas: int) -> int:
        files = rendered("k8s", place, cluster__replicas=replicas)
        (found,) = (one for one in objects(files) if one["kind"] == "PodDisruptionBudget")
        return int(found["spec"]["maxUnavailable"])

    assert [budget(place, 0) for place in (None, URL, "none")] == [1, 1, 0]
    assert [budget(place, 1) for place in (None, URL, "none")] == [1, 1, 1]


@pytest.mark.parametrize("target", TARGETS)
def test_more_replicas_than_other_servers_are_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=r"set cluster\.servers to 3 or more"):
        rendered(target, cluster__servers=2, cluster__replicas=2)


# ---- the workers' data


def test_workers_see_their_data_and_cannot_change_it() -> None:
    assert "./images:/dataset:ro" in services(rendered("compose", options={"dataset": "./images"}))["worker"]["volumes"]
    for target in PODS:
        found = pods(rendered(target, options={"dataset": "images"}))
        assert mounts(found["worker"])["/dataset"] == {
            "name": "dataset",
            "persistentVolumeClaim": {"claimName": "images", "readOnly": True},
            "readOnly": True,
        }
        assert not [role for role in KEEPERS if "/dataset" in mounts(found[role])]
