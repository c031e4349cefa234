"""Doctor on settings, variables, proxies and what security they add up to."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramserver.config import load_settings
from paramserver.doctor.configuration import (
    Request,
    check_proxies,
    check_security,
    check_variables,
    read_settings,
)
from paramserver.doctor.finding import Level


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_settings_and_where_they_come_from() -> None:
    Path("paramserver.toml").write_text("[cluster]\nworkers = 3\n")
    request = Request(None, {"log.level": "debug"}, {"PARAMSERVER_TRAINING__SEED": "7"})
    settings, (variables, configuration) = read_settings(request)
    assert (settings.cluster.workers, settings.training.seed, settings.log.level) == (3, 7, "debug")
    assert (variables.level, configuration.level) == (Level.OK, Level.OK)
    assert configuration.value == "paramserver.toml; environment; flags"
    assert read_settings(Request())[1][1].value == "paramserver.toml"
    Path("paramserver.toml").unlink()
    assert read_settings(Request())[1][1].value == "defaults only"


def test_wrong_settings_are_told_and_replaced_by_flags_and_defaults() -> None:
    request = Request(None, {"cluster.coordinator": "h:1"}, {"PARAMSERVER_CLUSTER__WORKERS": "many"})
    settings, (_, configuration) = read_settings(request)
    assert configuration.level is Level.FAIL
    assert 'cluster.workers is "many" (env PARAMSERVER_CLUSTER__WORKERS)' in configuration.value
    assert configuration.remedy
    assert (settings.cluster.coordinator, settings.cluster.workers) == ("h:1", 2)
    settings, (_, configuration) = read_settings(Request(None, {"cluster.coordinator": "nowhere"}, {}))
    assert configuration.level is Level.FAIL
    assert settings.cluster.coordinator == ""


def test_more_replicas_than_other_servers_are_told() -> None:
    request = Request(None, {"cluster.servers": 2, "cluster.replicas": 2})
    _, (_, configuration) = read_settings(request)
    assert configuration.level is Level.FAIL
    assert "set cluster.servers to 3 or more, or cluster.replicas lower" in configuration.value


def test_variables_of_the_compose_file_are_known() -> None:
    environ = {"PARAMSERVER_RESTART_COMMAND": "docker start $HOSTNAME", "PARAMSERVER_CLUSTER__MEETING_DIR": "/meeting"}
    settings, (variables, _) = read_settings(Request(environ=environ))
    assert variables.level is Level.OK
    assert settings.cluster.meeting_dir == "/meeting"


def test_unknown_variables_are_told_with_the_right_name_and_disturb_nothing_else() -> None:
    environ = {
        "PARAMSERVER_CONSISTENCI__MODE": "hunter2-in-the-wrong-place",
        "PARAMSERVER_CONSISTENCY__MODE": "async",
        "PARAMSERVER_INTERNAL_X": "1",
        "PARAMSERVER_CONFIG": "",
    }
    settings, (variables, configuration) = read_settings(Request(None, {}, environ))
    assert (variables.level, configuration.level) == (Level.FAIL, Level.OK)
    assert variables.value == "unknown: PARAMSERVER_CONSISTENCI__MODE"
    assert 'did you mean "PARAMSERVER_CONSISTENCY__MODE"?' in variables.remedy
    assert "hunter2" not in str(variables)
    assert settings.consistency.mode == "async"
    assert check_variables({"PARAMSERVER_CONSISTENCY__MODE": "async"}).level is Level.OK


def test_a_password_in_a_wrong_setting_is_not_shown() -> None:
    environ = {"PARAMSERVER_CLUSTER__STORE": "http://:hunter2@h/0", "PARAMSERVER_SECURITY__TOKEN": "hunter2"}
    _, (_, configuration) = read_settings(Request(None, {}, environ))
    assert configuration.level is Level.FAIL
    assert "cluster.store" in configuration.value
    assert "security.token" in configuration.value
    assert "hunter2" not in configuration.value


def test_proxies_are_named_without_their_addresses() -> None:
    assert check_proxies({"PATH": "/bin", "http_proxy": ""}).level is Level.OK
    found = check_proxies({"http_proxy": "http://me:hunter2@proxy:3128", "GRPC_PROXY": "p:1", "no_proxy": "*"})
    assert found.level is Level.NOTE
    assert found.value == "GRPC_PROXY, http_proxy: ignored between members of a cluster"


@pytest.mark.parametrize(
    ("overrides", "level", "says"),
    [
        ({}, Level.OK, "this machine only"),
        ({"cluster.coordinator": "127.0.0.1:8790,localhost:8791"}, Level.OK, "this machine only"),
        ({"cluster.coordinator": "h:8790", "security.certs": "certs"}, Level.OK, "TLS"),
        ({"cluster.coordinator": "h:8790"}, Level.FAIL, "other machines (h)"),
        ({"cluster.listen": "0.0.0.0:8790"}, Level.FAIL, "other machines (0.0.0.0)"),
        ({"cluster.listen": "[::1]:8790"}, Level.OK, "this machine only"),
        ({"cluster.listen": "::"}, Level.FAIL, "other machines (::)"),
        ({"cluster.coordinator": "10.0.0.5:8790", "security.insecure": True}, Level.WARN, "everybody on the network"),
        ({"security.certs": "certs", "security.insecure": True}, Level.NOTE, "security.insecure is set as well"),
    ],
)
def test_security_off_this_machine(overrides: dict[str, object], level: Level, says: str) -> None:
    found = check_security(load_settings(overrides=overrides, environ={}))
    assert found.level is level
    assert says in found.value
    if not level.well:
        assert "paramserver certs init" in found.remedy
