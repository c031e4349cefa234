"""Settings: precedence, origins, and one clear sentence for whatever is wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.config import ENV_CONFIG, FIELDS, Settings, env_name, hide_password, load_settings, must_be, secrets
from paramserver.config.refusals import written
from paramserver.errors import ConfigError
from paramserver.launcher.progress import where_it_stands
from paramserver.roles.reporting import in_force
from paramserver.v1 import coordinator_pb2


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No paramserver.toml or pyproject.toml lies about."""
    monkeypatch.chdir(tmp_path)


def load(
    overrides: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    toml: str | None = None,
) -> Settings:
    path = None
    if toml is not None:
        path = Path("job.toml")
        path.write_text(toml)
    return load_settings(path, overrides, environ or {})


def refusal(
    overrides: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    toml: str | None = None,
) -> str:
    with pytest.raises(ConfigError) as caught:
        load(overrides, environ, toml)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_those_of_the_design() -> None:
    settings = load()
    assert settings == Settings()
    assert (settings.cluster.servers, settings.cluster.workers) == (1, 2)
    assert (settings.consistency.mode, settings.consistency.staleness) == ("sync", 3)
    assert settings.cluster.store == "auto"
    assert set(settings.origins().values()) == {"default"}


def test_flag_over_environment_over_file_over_default() -> None:
    toml = "[training]\nseed = 1\nslices_per_step = 1\nthreads_per_worker = 2\n"
    environ = {"PARAMSERVER_TRAINING__SEED": "2", "PARAMSERVER_TRAINING__SLICES_PER_STEP": "2"}
    settings = load({"training.seed": 3, "training.device": None}, environ, toml)
    assert settings.training.seed == 3
    assert settings.training.slices_per_step == 2
    assert settings.training.threads_per_worker == 2
    assert settings.training.threads_per_server == 0
    origins = settings.origins()
    assert origins["training.seed"] == "flag"
    assert origins["training.slices_per_step"] == "env PARAMSERVER_TRAINING__SLICES_PER_STEP"
    assert origins["training.threads_per_worker"] == "file job.toml"
    assert origins["training.device"] == "default"


@pytest.mark.parametrize(("given_value", "expected"), [("unbounded", "unbounded"), (0, 0), ("7", 7)])
def test_staleness_is_a_number_or_unbounded(given_value: object, expected: int | str) -> None:
    assert load({"consistency.staleness": given_value}).consistency.staleness == expected


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("consistency.mode", "bsp", '"bsp"'),
        ("consistency.staleness", -1, "-1"),
        ("consistency.staleness", "-1", '"-1"'),
        ("consistency.staleness", "boundless", '"boundless"'),
        ("consistency.staleness", 1.5, "1.5"),
        ("consistency.staleness", True, "true"),
        ("cluster.workers", 0, "0"),
        ("cluster.servers", 4097, "4097"),
        ("cluster.workers", True, "true"),
        ("cluster.coordinator", "localhost", '"localhost"'),
        ("cluster.coordinator", "localhost:0", '"localhost:0"'),
        ("cluster.coordinator", "localhost:65536", '"localhost:65536"'),
        ("cluster.store", "http://h", '"http://h"'),
        ("cluster.job", "../etc", '"../etc"'),
        ("cluster.lease_s", 0, "0"),
        ("cluster.lease_s", "nan", '"nan"'),
        ("training.seed", -1, "-1"),
        ("training.slices_per_step", -4, "-4"),
        ("training.chunk_bytes", 100, "100"),
        ("training.nonfinite", "ignore", '"ignore"'),
        ("training.pull_precision", "int8", '"int8"'),
        ("training.push_compression", "zip", '"zip"'),
        ("training.topk_ratio", 0.0001, "0.0001"),
        ("training.topk_ratio", 2, "2"),
        ("training.threads_per_worker", 0, "0"),
        ("training.device", "gpu", '"gpu"'),
        ("run.args", "--epochs 2", '"--epochs 2"'),
        ("log.level", "chatty", '"chatty"'),
    ],
)
def test_bad_value_is_named_with_what_is_allowed(key: str, value: object, shown: str) -> None:
    assert refusal({key: value}) == f"{key} is {shown} (flag), but must be {must_be(key)}"


def test_checkpoints_are_taken_where_nothing_is_left_out() -> None:
    given = {"training.push_compression": "int8", "checkpoint.every": 30, "training.residual_flush_every": 20}
    assert refusal(given) == (
        "checkpoint.every is 30 and training.residual_flush_every is 20, but a checkpoint can be taken only where "
        "nothing is left out: make checkpoint.every a multiple of it"
    )
    assert load({**given, "training.push_compression": "bf16"}).flush_every == 20
    assert load({**given, "training.residual_flush_every": 15}).flush_every == 15
    assert load({**given, "training.residual_flush_every": 0}).flush_every == 30
    assert load({}).flush_every == 100


def test_statistics_over_a_step_need_all_of_its_slices() -> None:
    on = {"training.sync_batchnorm": True}
    assert refusal({**on, "consistency.mode": "async"}) == (
        "training.sync_batchnorm is true and consistency.mode is async, where a step has no slices to take statistics "
        "over: set consistency.mode to sync, or training.sync_batchnorm to false"
    )
    assert refusal({**on, "training.poison": "skip"}) == (
        "training.sync_batchnorm is true and training.poison is skip, but the other slices of a step need the "
        "statistics of a slice that is skipped: set training.poison to fail, or training.sync_batchnorm to false"
    )
    assert load({"training.sync_batchnorm": "True"}).training.sync_batchnorm, "as a coordinator tells it"


def test_bad_value_says_where_it_stands() -> None:
    assert "(env PARAMSERVER_CLUSTER__WORKERS)" in refusal(environ={"PARAMSERVER_CLUSTER__WORKERS": "none"})
    assert "(file job.toml)" in refusal(toml="[cluster]\nworkers = 0\n")


def test_everything_wrong_is_listed_at_once() -> None:
    text = refusal({"cluster.workers": 0}, {"PARAMSERVER_LOG__LEVL": "info"}, '[consistency]\nmode = "x"\n')
    assert len(text.split("; ")) == 4  # the unknown name brings its hint
    assert all(word in text for word in ("cluster.workers", "PARAMSERVER_LOG__LEVEL", "consistency.mode"))


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("PARAMSERVER_CONSISTENCI__MODE", "PARAMSERVER_CONSISTENCY__MODE"),
        ("PARAMSERVER_CLUSTER__WORKER", "PARAMSERVER_CLUSTER__WORKERS"),
        ("PARAMSERVER_TRAINING__STALENESS", "PARAMSERVER_CONSISTENCY__STALENESS"),
        ("PARAMSERVER_CONFG", "PARAMSERVER_CONFIG"),
        ("PARAMSERVER_CLUSTER_WORKERS", "PARAMSERVER_CLUSTER__WORKERS"),
        ("PARAMSERVER_WORKERS", "PARAMSERVER_CLUSTER__WORKERS"),
        ("PARAMSERVER_TRAINING_SEDE", "PARAMSERVER_TRAINING__SEED"),
        ("PARAMSERVER_BULK_PORT", "PARAMSERVER_CLUSTER__BULK_PORT"),
        ("PARAMSERVER_CLUSTR__BULK_PORT", "PARAMSERVER_CLUSTER__BULK_PORT"),
    ],
)
def test_unknown_variable_suggests_the_nearest(name: str, nearest: str) -> None:
    assert refusal(environ={name: "1"}) == f'"{name}" is not a setting; did you mean "{nearest}"?'


def test_far_off_variable_points_to_the_list() -> None:
    assert refusal(environ={"PARAMSERVER_XYZZY__XYZZY": "1"}).endswith('"paramserver config show" lists what there is')


def test_internal_variables_are_no_settings() -> None:
    assert load(environ={"PARAMSERVER_INTERNAL_TOKEN": "x", "PATH": "/bin"}) == Settings()


def test_unknown_names_in_the_file_suggest_the_nearest() -> None:
    text = refusal(toml="[consistency]\nmod = 'sync'\n[trainin]\nseed = 1\n")
    assert '"consistency.mod" is not a setting; did you mean "consistency.mode"? (in job.toml)' in text
    assert '"trainin" is not a section; did you mean "training"? (in job.toml)' in text


def test_unknown_override_suggests_the_nearest() -> None:
    assert refusal({"training.staleness": 3}).endswith('did you mean "consistency.staleness"?')


def test_variables_that_could_be_no_setting_are_not_judged() -> None:
    """Those of the Services of a namespace are in every pod, whoever the Services belong to."""
    services: dict[str, str] = {}
    for service in (
        "PARAMSERVER",
        "PARAMSERVER_COORDINATOR",
        "PARAMSERVER_STORE",
        "PARAMSERVER_WEB",
        "PARAMSERVER_RUN",
    ):
        services |= {
            f"{service}_SERVICE_HOST": "10.43.1.7",
            f"{service}_SERVICE_PORT": "8790",
            f"{service}_SERVICE_PORT_DASHBOARD": "8780",
            f"{service}_PORT": "tcp://10.43.1.7:8790",
            f"{service}_PORT_8790_TCP": "tcp://10.43.1.7:8790",
            f"{service}_PORT_8790_TCP_PROTO": "tcp",
            f"{service}_PORT_8790_TCP_PORT": "8790",
            f"{service}_PORT_8790_TCP_ADDR": "10.43.1.7",
        }
    assert load(environ=services) == Settings()
    assert (
        load(environ={"PARAMSERVER_IMAGE": "x", "PARAMSERVER_HOME": "/opt", "PARAMSERVER_VERSION": "2"}) == Settings()
    )


def test_a_file_with_a_byte_order_mark_and_one_that_is_not_utf8() -> None:
    Path("job.toml").write_bytes(b"\xef\xbb\xbf[training]\nseed = 7\n")
    assert load_settings(Path("job.toml"), environ={}).training.seed == 7
    for text in ("[training]\nseed = 7\n".encode("utf-16"), '[cluster]\njob = "b\xe9b\xe9"\n'.encode("latin-1")):
        Path("job.toml").write_bytes(text)
        with pytest.raises(ConfigError, match=r'"job.toml" is not text in UTF-8: save it as UTF-8'):
            load_settings(Path("job.toml"), environ={})


def test_a_name_that_is_not_text_is_refused() -> None:
    """Bytes of the command line that are not UTF-8, or any beyond ASCII where the locale says so."""
    assert "run.script is 'caf\\udce9.py' (flag), which is not text in UTF-8" in refusal({"run.script": "caf\udce9.py"})
    assert "(env PARAMSERVER_RUN__SAVE)" in refusal(environ={"PARAMSERVER_RUN__SAVE": "\udce9"})
    assert load({"run.script": "café.py"}).run.script == "café.py"


def test_section_must_be_a_table() -> None:
    assert refusal(toml="cluster = 3\n") == "cluster is 3 in job.toml, but must be a table [cluster]"


def test_broken_toml_says_where() -> None:
    assert re.search(r'"job.toml" is not valid TOML: .*line 1', refusal(toml="[cluster\n"))


def test_missing_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_settings(Path("absent.toml"), environ={})
    with pytest.raises(ConfigError, match=r"\(PARAMSERVER_CONFIG\) does not exist"):
        load_settings(environ={"PARAMSERVER_CONFIG": "absent.toml"})


def test_default_files_in_their_order() -> None:
    Path("pyproject.toml").write_text("[project]\nname = 'x'\n[tool.paramserver.training]\nseed = 1\n")
    assert load_settings(environ={}).training.seed == 1
    Path("paramserver.toml").write_text("[training]\nseed = 2\n")
    assert load_settings(environ={}).training.seed == 2
    Path("other.toml").write_text("[training]\nseed = 3\n")
    assert load_settings(environ={"PARAMSERVER_CONFIG": "other.toml"}).training.seed == 3
    assert load_settings(Path("paramserver.toml"), environ={"PARAMSERVER_CONFIG": "other.toml"}).training.seed == 2
    assert load_settings(environ={"PARAMSERVER_CONFIG": ""}).training.seed == 0


def test_pyproject_without_our_table_is_fine() -> None:
    Path("pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert load_settings(environ={}) == Settings()


def test_settings_are_frozen() -> None:
    settings: Any = load()
    with pytest.raises(ValueError, match="frozen"):
        settings.consistency.mode = "async"
    with pytest.raises(ValueError, match="frozen"):
        settings.cluster = None


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@host:6379/0", "redis://:***@host:6379/0"),
        ("rediss://user:se@cret@host/0", "rediss://user:***@host/0"),
        ("unix:///run/x.sock?db=0&password=secret", "unix:///run/x.sock?db=0&password=***"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("auto", "auto"),
    ],
)
def test_password_of_the_store_is_hidden(url: str, shown: str) -> None:
    assert hide_password(url) == shown
    settings = load({"cluster.store": url})
    assert settings.cluster.store == url
    assert shown in repr(settings)
    assert "cret" not in repr(settings).replace("SecretStr", "")
    assert "cret" not in str(settings.cluster)


def test_password_is_hidden_in_the_error_too() -> None:
    text = refusal({"cluster.store": "http://user:secret@host"})
    assert "secret" not in text
    assert "http://user:***@host" in text


@pytest.mark.parametrize("key", [key for key, field in FIELDS.items() if field.annotation is str])
def test_a_password_in_any_address_is_hidden(key: str) -> None:
    """Wherever settings are shown: `config show`, the API, reports, errors."""
    url = "s3://user:cret@host/run"
    assert secrets.shown(key, url) == "s3://user:***@host/run"
    assert "cret@" not in written(key, url)


def test_the_place_of_checkpoints_is_shown_without_its_password() -> None:
    settings = load({"checkpoint.dir": "s3://user:cret@host/run"})
    assert "s3://user:***@host/run" in repr(settings)
    assert "cret@" not in repr(settings)
    status = coordinator_pb2.StatusResponse(checkpoint="step-00000004-t1")
    assert "--resume 's3://user:***@host/run'" in where_it_stands(status, settings.checkpoint.dir)
    assert [one.value for one in in_force(settings) if one.key == "checkpoint.dir"] == ["s3://user:***@host/run"]


def test_environment_recreates_the_settings_without_the_store() -> None:
    Path("paramserver.toml").write_text("[training]\nseed = 5\n")
    settings = load(
        {
            "cluster.store": "redis://:secret@h/0",
            "run.args": ["--epochs", "2", 'a "quoted" one'],
            "consistency.staleness": "unbounded",
            "cluster.lease_s": 0.25,
            "cluster.job": "42",
        }
    )
    environment = settings.as_environment()
    assert not any("secret" in value for value in environment.values())
    child = load_settings(environ=environment)
    assert child.values() == {**settings.values(), "cluster.store": "auto"}
    assert child != settings


def test_equality_ignores_where_values_came_from() -> None:
    assert load({"training.seed": 4}) == load(environ={"PARAMSERVER_TRAINING__SEED": "4"})
    assert hash(load({"training.seed": 4})) == hash(load(toml="[training]\nseed = 4\n"))


def test_every_setting_is_described_and_says_what_it_must_be() -> None:
    schema = Settings.model_json_schema()
    assert set(schema["properties"]) == {key.partition(".")[0] for key in FIELDS}
    for key, field in FIELDS.items():
        assert field.description, key
        assert must_be(key), key
        assert re.fullmatch(r"PARAMSERVER_[A-Z]+__[A-Z_]+", env_name(key))


@given(st.text(max_size=20), st.sampled_from(sorted(FIELDS)))
def test_any_text_is_a_value_or_a_config_error(text: str, key: str) -> None:
    """Nothing but ConfigError comes out, whatever stands in a variable."""
    complaint, origin = "", ""
    try:
        origin = load_settings(environ={env_name(key): text, "PARAMSERVER_CONFIG": ""}).origins()[key]
    except ConfigError as error:
        complaint = str(error)
    assert key in complaint or origin == f"env {env_name(key)}"


def test_tokens_come_from_the_environment_only_and_are_never_shown(tmp_path: Path) -> None:
    token = "correct horse battery"
    settings = load_settings(environ={"PARAMSERVER_SECURITY__TOKEN": token, ENV_CONFIG: ""})
    assert settings.security.token.get_secret_value() == token
    assert token not in repr(settings) + str(settings.values())
    assert token not in str(settings.as_environment())
    file = tmp_path / "a.toml"
    file.write_text(f'[security]\ntoken = "{token}"\n')
    for overrides, path in (({"security.token": token}, None), ({}, file)):
        with pytest.raises(ConfigError) as caught:
            load_settings(path, overrides, {ENV_CONFIG: ""})
        assert "security.token_file" in str(caught.value)
        assert token not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load_settings(environ={"PARAMSERVER_SECURITY__TOKEN": "short one", ENV_CONFIG: ""})
    assert "short one" not in str(caught.value)
