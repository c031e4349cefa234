"""The settings of a job: frozen values, read once from flags, environment and a TOML file.

Precedence: what the command line says, then ``PARAMSERVER_<SECTION>__<KEY>``, then the file, then the default. Every
name and every value is checked; whatever is wrong becomes one `errors.ConfigError` whose text names the setting, the
value, where it came from, and what is allowed.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from paramserver.errors import ConfigError

ENV_PREFIX = "PARAMSERVER_"
# The variable that names the configuration file; empty: read no file at all.
ENV_CONFIG = "PARAMSERVER_CONFIG"
# Variables that our own processes hand to each other begin with this; they are no settings.
ENV_INTERNAL_PREFIX = "PARAMSERVER_INTERNAL_"
DEFAULT_FILE = "paramserver.toml"

MAX_PROCESSES = 4096
MAX_CHUNK_BYTES = 4 << 20
CHUNK_ALIGNMENT_BYTES = 64
MIN_TOKEN_CHARS = 16
# Values of training.push_compression that keep what they leave out for the next step.
FEEDBACK = frozenset(("int8", "topk"))
DEFAULT_FLUSH_EVERY = 100
# Settings that may hold a secret. They go to the one process that needs them and are never shown in full.
SECRETS = ("cluster.store", "security.token", "security.admin_token")
# Of these, those that are nothing but a secret: flags are in sight of everybody, and a file is soon shared.
_ENVIRONMENT_ONLY = {"security.token": "security.token_file", "security.admin_token": "security.admin_token_file"}

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})")
_HOST = re.compile(r"[^\s/:,\[\]]+|\[?[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*\]?")
_DEVICE = re.compile(r"auto|cpu|mps|(?:cuda|xpu)(?::[0-9]+)?")
_PASSWORD_IN_AUTHORITY = re.compile(r"(://[^:/@]*):.*@")
_PASSWORD_IN_QUERY = re.compile(r"((?:^|[?&])password=)[^&]*")


@dataclass(frozen=True, slots=True)
class Must:
    """What a setting's value has to be, in words that complete the sentence "... but must be ..."."""

    be: str


def shown(key: str, value: object) -> object:
    """The value of a setting without its secrets."""
    if isinstance(value, SecretStr):
        return "***" if value else ""
    return hide_password(value) if key == "cluster.store" and isinstance(value, str) else value


def hide_password(url: str) -> str:
    """The URL with its password replaced by ``***``; safe to print and to log."""
    return _PASSWORD_IN_QUERY.sub(r"\1***", _PASSWORD_IN_AUTHORITY.sub(r"\1:***@", url))


def is_address(text: str) -> bool:
    """Whether `text` is ``host:port`` with a port between 1 and 65535 (an IPv6 host stands in brackets)."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 1 <= int(match.group(1)) <= 65535


def is_job_name(text: str) -> bool:
    """Whether `text` may name a job: up to 64 letters, digits, ".", "_" and "-", not beginning with a sign."""
    return _JOB_NAME.fullmatch(text) is not None


def _refuse_bool(value: object) -> object:
    # pydantic takes True for 1, and a TOML file may well say `workers = true`.
    if isinstance(value, bool):
        raise ValueError("a truth value is not a number")
    return value


def split_addresses(text: str) -> list[str]:
    """The addresses in a list such as "a:8790, b:8790"; empty for empty text."""
    return [part.strip() for part in text.split(",")] if text else []


def _addresses_or_empty(value: str) -> str:
    if not all(is_address(part) for part in split_addresses(value)):
        raise ValueError("not addresses")
    return value


def _listen_or_empty(value: str) -> str:
    if value and not (_HOST.fullmatch(value) or is_address(value) or is_address(re.sub(":0$", ":1", value))):
        raise ValueError("nothing to listen on")
    return value


def _long_enough(value: SecretStr) -> SecretStr:
    if value and len(value.get_secret_value()) < MIN_TOKEN_CHARS:
        raise ValueError("too short")
    return value


def _host_or_empty(value: str) -> str:
    if value and not _HOST.fullmatch(value):
        raise ValueError("not a host")
    return value


def _job_name_or_empty(value: str) -> str:
    if value and not is_job_name(value):
        raise ValueError("not a job name")
    return value


def _store_url(value: str) -> str:
    if value not in ("auto", "memory") and not re.match(r"(?:rediss?|unix)://.", value):
        raise ValueError("not a store")
    return value


def _device_name(value: str) -> str:
    if not _DEVICE.fullmatch(value):
        raise ValueError("not a device")
    return value


def _chunk_size(value: int) -> int:
    if value % CHUNK_ALIGNMENT_BYTES:
        raise ValueError("not aligned")
    return value


def _json_list(value: object) -> object:
    # A list from the environment or from --set is written as JSON.
    return json.loads(value) if isinstance(value, str) else value


_Processes = Annotated[
    int, BeforeValidator(_refuse_bool), Field(ge=1, le=MAX_PROCESSES), Must(f"an integer from 1 to {MAX_PROCESSES}")
]
_Threads = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=1, le=1024), Must("an integer from 1 to 1024")]
_ChosenThreads = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=0, le=1024), Must("an integer from 0 to 1024")]
_Seconds = Annotated[
    float, BeforeValidator(_refuse_bool), Field(gt=0, le=1e7, allow_inf_nan=False), Must("a number of seconds above 0")
]
_SecondsOrNone = Annotated[
    float, BeforeValidator(_refuse_bool), Field(ge=0, le=1e7, allow_inf_nan=False), Must("a number of seconds, or 0")
]
_Count = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=0, lt=2**32), Must("an integer from 0 to 4294967295")]
_Seed = Annotated[
    int, BeforeValidator(_refuse_bool), Field(ge=0, lt=2**63), Must("an integer of 0 or more, below 2 to the power 63")
]
_Staleness = Annotated[
    Annotated[int, Field(ge=0, lt=2**32)] | Literal["unbounded"],
    BeforeValidator(_refuse_bool),
    Must('an integer of 0 or more, or "unbounded"'),
]


_Token = Annotated[
    SecretStr, AfterValidator(_long_enough), Must(f"a text of {MIN_TOKEN_CHARS} characters or more, or empty")
]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Cluster(_Section):
    """Who takes part and where they meet."""

    coordinator: Annotated[
        str, AfterValidator(_addresses_or_empty), Must('"host:port", several of them with commas between, or empty')
    ] = Field(
        default="",
        description="Address of the coordinator, and of those that stand by for it. Empty: `run` takes a free port, "
        "a script trains alone.",
    )
    listen: Annotated[str, AfterValidator(_listen_or_empty), Must('"host", "host:port" (port 0: any), or empty')] = (
        Field(
            default="",
            description="Where this process listens. Empty: the coordinator at its own address, a server at this "
            "machine's address on the route to the coordinator, with a free port.",
        )
    )
    advertise_host: Annotated[str, AfterValidator(_host_or_empty), Must("a host name or address, or empty")] = Field(
        default="", description="Under which name others reach this process. Empty: the address that it listens on."
    )
    servers: _Processes = Field(default=1, description="Servers that share the model.")
    servers_per_host: Annotated[
        int, BeforeValidator(_refuse_bool), Field(ge=1, le=64), Must("an integer from 1 to 64")
    ] = Field(
        default=1,
        description="Server processes that `start server` starts on its host; each counts as one of cluster.servers.",
    )
    placement: Annotated[Literal["auto", "balanced", "split"], Must('"auto", "balanced" or "split"')] = Field(
        default="auto",
        description="How much of the model each server takes. balanced: all as much. split: servers beside workers "
        "less than the others, as is best for the links. auto: whichever the cost model says is faster.",
    )
    link_mbps: Annotated[
        float, BeforeValidator(_refuse_bool), Field(gt=0, le=1e6, allow_inf_nan=False), Must("a number above 0")
    ] = Field(
        default=1000.0,
        description="How fast a host's link is, in Mb/s. Chunks are chosen by it where servers are on other hosts.",
    )
    beside_worker: Annotated[bool, Must("true or false")] = Field(
        default=False, description="This server is on the host of a worker; see cluster.placement."
    )
    workers: _Processes = Field(
        default=2, description="Workers the job starts with. A script without a cluster is one worker."
    )
    store: Annotated[
        str,
        AfterValidator(_store_url),
        Must('"auto", "memory", or an address that begins with "redis://", "rediss://" or "unix://"'),
    ] = Field(default="auto", description="Where the coordinator keeps its state. auto: a private server of its own.")
    store_password_file: Annotated[str, Must("a path")] = Field(
        default="", description="File with the store's password, in place of one in cluster.store. Empty: none."
    )
    job: Annotated[
        str,
        AfterValidator(_job_name_or_empty),
        Must('up to 64 letters, digits, ".", "_" and "-" (a letter or digit first), or empty'),
    ] = Field(default="", description="Name of the job. Empty: `run` makes one up.")
    join_timeout_s: _Seconds = Field(default=180.0, description="How long a process waits for the others to arrive.")
    lease_s: _Seconds = Field(default=5.0, description="After this silence a member is taken for lost.")
    stall_s: _SecondsOrNone = Field(
        default=8.0,
        description="After this time without a slice, or four times what slices usually take if that is longer, the "
        "slices of a worker that lives go to others. 0: never.",
    )
    wait_timeout_s: _Seconds = Field(
        default=600.0, description="How long a worker waits for the others' slices of a step."
    )
    max_idle_s: _Seconds = Field(
        default=600.0, description="How long a job waits when a server, or every worker, is gone."
    )
    transport: Annotated[Literal["auto", "grpc", "shm"], Must('"auto", "grpc" or "shm"')] = Field(
        default="auto",
        description="How weights and gradients travel. auto: in shared memory between a worker and a server on one "
        "host, else over gRPC. shm: in shared memory, or not at all.",
    )
    channels_per_server: Annotated[
        int, BeforeValidator(_refuse_bool), Field(ge=0, le=16), Must("an integer from 0 to 16")
    ] = Field(default=0, description="Connections from a worker to each server. 0: chosen.")
    max_restarts: _Count = Field(
        default=3,
        description="How often in a row `run` starts a process again while the job gets no further. 0: never.",
    )
    when_done: Annotated[Literal["exit", "stay"], Must('"exit" or "stay"')] = Field(
        default="exit", description="What coordinator and servers do when the job is done."
    )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, hide_password(value) if name == "store" else value


class Consistency(_Section):
    """How strictly workers wait for each other."""

    mode: Annotated[Literal["sync", "async"], Must('"sync" or "async"')] = Field(
        default="sync",
        description="sync: a step is one update made of all its slices. async: every slice is an update.",
    )
    staleness: _Staleness = Field(
        default=3, description="async only: how many slices the fastest worker may be ahead of the slowest."
    )


class Training(_Section):
    """What decides the numbers that come out."""

    seed: _Seed = Field(default=0, description="Seed of the data order, dropout and augmentation.")
    slices_per_step: _Count = Field(
        default=0, description="sync only: slices in a step. 0: as many as workers at the start."
    )
    chunk_bytes: Annotated[
        int,
        BeforeValidator(_refuse_bool),
        Field(ge=0, le=MAX_CHUNK_BYTES),
        AfterValidator(_chunk_size),
        Must(f"0, or a multiple of {CHUNK_ALIGNMENT_BYTES} up to {MAX_CHUNK_BYTES}"),
    ] = Field(default=0, description="Size of a chunk. 0: chosen from the size of the model and the links.")
    nonfinite: Annotated[Literal["skip", "reject", "fail"], Must('"skip", "reject" or "fail"')] = Field(
        default="skip",
        description="A NaN or infinite gradient: skip the step, reject the contribution, or fail the run.",
    )
    pull_precision: Annotated[Literal["fp32", "bf16", "fp16"], Must('"fp32", "bf16" or "fp16"')] = Field(
        default="fp32",
        description="What weights are rounded to on their way to workers. Servers, checkpoints, results keep fp32.",
    )
    push_compression: Annotated[
        Literal["none", "bf16", "fp16", "int8", "topk"], Must('"none", "bf16", "fp16", "int8" or "topk"')
    ] = Field(
        default="none",
        description="How gradients are made smaller on their way to servers. int8 and topk keep what they leave out "
        "for the next step; see docs/compression.md.",
    )
    topk_ratio: Annotated[
        float, BeforeValidator(_refuse_bool), Field(ge=0.001, le=1, allow_inf_nan=False), Must("from 0.001 to 1")
    ] = Field(default=0.01, description="topk only: which part of the numbers of a gradient is sent.")
    residual_flush_every: _Count = Field(
        default=0,
        description="int8 and topk only: at versions that are multiples of this nothing is left out, which is where "
        "checkpoints can be taken. 0: checkpoint.every, or 100 without.",
    )
    threads_per_worker: _Threads = Field(
        default=1, description="Threads a worker computes with; other numbers change bits."
    )
    threads_per_server: _ChosenThreads = Field(
        default=0,
        description="Threads a server applies updates with; bits do not depend on it. 0: its share of the machine's "
        "processors, 8 at most.",
    )
    device: Annotated[str, AfterValidator(_device_name), Must('"auto", "cpu", "mps", "cuda", or "cuda:N"')] = Field(
        default="auto", description="Where a worker computes. auto: a GPU if torch sees one."
    )


class Checkpoint(_Section):
    """What outlives the death of a server, and of everybody."""

    dir: Annotated[str, Must("a directory or a URL")] = Field(
        default="",
        description="Directory, or URL such as s3://bucket/path, that all servers and coordinators reach. Empty: `run` "
        "keeps checkpoints as long as it runs; elsewhere the death of a server ends the job.",
    )
    every: _Count = Field(
        default=0,
        description="Steps (async: slices) from one checkpoint to the next. 0: only the first and the last version.",
    )
    keep: Annotated[int, BeforeValidator(_refuse_bool), Field(ge=1, le=1_000_000), Must("an integer of 1 or more")] = (
        Field(default=3, description="How many checkpoints are kept; older ones are removed.")
    )
    resume: Annotated[str, Must("a directory, a checkpoint in one, or a URL")] = Field(
        default="", description="Go on from this checkpoint, or from the newest in this directory. Empty: begin anew."
    )


class Run(_Section):
    """What `paramserver run` starts and writes."""

    script: Annotated[str, Must("a path")] = Field(
        default="", description="Training script, relative to where you are."
    )
    args: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_json_list), Must("a list of strings")] = Field(
        default=(), description="Arguments of the script. In the environment: a JSON list."
    )
    summary: Annotated[str, Must("a path")] = Field(default="", description="JSON file for the summary. Empty: none.")
    save: Annotated[str, Must("a path")] = Field(
        default="", description="safetensors file for the weights. Empty: none."
    )


class Log(_Section):
    """What the processes say while they work."""

    level: Annotated[Literal["debug", "info", "warning", "error"], Must('"debug", "info", "warning" or "error"')] = (
        Field(default="info", description="The least important messages to show.")
    )
    interval_s: _Seconds = Field(
        default=5.0, description="Seconds between two lines of progress where there is no terminal."
    )


class Security(_Section):
    """Who may take part, and how members talk to each other."""

    certs: Annotated[str, Must("a path")] = Field(
        default="", description="Directory made by `paramserver certs init`. Empty: no TLS."
    )
    token_file: Annotated[str, Must("a path")] = Field(
        default="", description="File with the token of all members. Empty: join.token in security.certs, if there."
    )
    admin_token_file: Annotated[str, Must("a path")] = Field(
        default="", description="File with the operators' token. Empty: admin.token in security.certs, if there."
    )
    token: _Token = Field(default=SecretStr(""), description="The token of all members, from the environment only.")
    admin_token: _Token = Field(default=SecretStr(""), description="The operators' token, from the environment only.")
    insecure: Annotated[bool, Must("true or false")] = Field(
        default=False, description="Allow other machines without TLS: everybody on the network can read and interfere."
    )


class Settings(BaseSettings):
    """All settings of one job. A plain value: only `load_settings` looks at files and at the environment."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        title="paramserver.toml",
    )

    cluster: Cluster = Cluster()
    consistency: Consistency = Consistency()
    training: Training = Training()
    checkpoint: Checkpoint = Checkpoint()
    run: Run = Run()
    log: Log = Log()
    security: Security = Security()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _checkpoints_without_residuals(self) -> Self:
        training, every = self.training, self.checkpoint.every
        flush = training.residual_flush_every
        if training.push_compression in FEEDBACK and flush and every % flush:
            raise ValueError(
                f"checkpoint.every is {every} and training.residual_flush_every is {flush}, but a checkpoint can be "
                "taken only where nothing is left out: make checkpoint.every a multiple of it"
            )
        return self

    @property
    def flush_every(self) -> int:
        """Nothing is left out of contributions to versions that are multiples of this."""
        return self.training.residual_flush_every or self.checkpoint.every or DEFAULT_FLUSH_EVERY

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # `Settings(...)` is made of its arguments alone; load_settings merges the layers and knows their origins.
        return (init_settings,)

    def values(self) -> dict[str, Any]:
        """Every setting by its dotted name, in the order of the sections; see SECRETS."""
        return {key: getattr(getattr(self, _section(key)), _leaf(key)) for key in FIELDS}

    def origins(self) -> dict[str, str]:
        """Where each value came from: "flag", "env NAME", "file PATH" or "default", by dotted name."""
        return {key: self._origins.get(key, "default") for key in FIELDS}

    def as_environment(self) -> dict[str, str]:
        """Variables with which a child process loads the same settings, except the secrets.

        A child that gets them reads no configuration file.
        """
        environment = {ENV_CONFIG: ""}
        for key, value in self.values().items():
            if key not in SECRETS:
                environment[env_name(key)] = json.dumps(value) if isinstance(value, tuple) else str(value)
        return environment

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self.values() == other.values()

    def __hash__(self) -> int:
        return hash(tuple(self.values().values()))


def _section(key: str) -> str:
    return key.partition(".")[0]


def _leaf(key: str) -> str:
    return key.partition(".")[2]


def _fields() -> dict[str, FieldInfo]:
    sections = {name: field.annotation for name, field in Settings.model_fields.items()}
    return {
        f"{section}.{name}": field
        for section, model in sections.items()
        if isinstance(model, type) and issubclass(model, _Section)
        for name, field in model.model_fields.items()
    }


# Every setting by its dotted name.
FIELDS: Mapping[str, FieldInfo] = _fields()
SECTIONS: Sequence[str] = tuple(Settings.model_fields)


def env_name(key: str) -> str:
    """The environment variable of the setting `key`, such as "consistency.mode"."""
    return ENV_PREFIX + key.upper().replace(".", "__")


def must_be(key: str) -> str:
    """What the value of the setting `key` has to be, in words."""
    return next(item.be for item in FIELDS[key].metadata if isinstance(item, Must))


@dataclass(frozen=True, slots=True)
class _Layer:
    """One source of values: dotted name to value, and dotted name to the words for where it stands."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]


def load_settings(
    file: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Merge overrides, environment, file and defaults, in this precedence.

    `overrides` has dotted names, as in ``{"consistency.mode": "async"}``; None means "not given". `file` is a TOML
    file (of a pyproject.toml the table ``[tool.paramserver]`` counts); without it PARAMSERVER_CONFIG names one, else
    ./paramserver.toml and ./pyproject.toml are looked at. `environ` is the process's own environment if None.
    Raises ConfigError, which lists everything that is wrong.
    """
    environ = os.environ if environ is None else environ
    problems: list[str] = []
    layers = [
        _flag_layer(overrides or {}, problems),
        _environment_layer(environ, problems),
        _file_layer(_choose_file(file, environ), problems),
    ]
    values: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    for layer in reversed(layers):
        for key, value in layer.values.items():
            values.setdefault(_section(key), {})[_leaf(key)] = value
            origins[key] = layer.origins[key]
    try:
        settings = Settings(**values)  # type: ignore[arg-type]  # sections as plain dicts, which pydantic validates
    except ValidationError as error:
        problems += _explain(error, origins)
    problems += [
        f"{key} comes from the environment only ({env_name(key)}); or write it to a file of its own and name it "
        f"in {instead}"
        for key, instead in _ENVIRONMENT_ONLY.items()
        if values.get(_section(key), {}).get(_leaf(key)) and not origins[key].startswith("env")
    ]
    if problems:
        raise ConfigError("; ".join(problems))
    settings._origins.update(origins)
    return settings


def _flag_layer(overrides: Mapping[str, object], problems: list[str]) -> _Layer:
    given = {key: value for key, value in overrides.items() if value is not None}
    problems += [_unknown(key, FIELDS) for key in given if key not in FIELDS]
    known = {key: value for key, value in given.items() if key in FIELDS}
    return _Layer(known, dict.fromkeys(known, "flag"))


def _environment_layer(environ: Mapping[str, str], problems: list[str]) -> _Layer:
    names = {env_name(key): key for key in FIELDS}
    ours = [name for name in environ if name.startswith(ENV_PREFIX)]
    for name in ours:
        if name not in names and name != ENV_CONFIG and not name.startswith(ENV_INTERNAL_PREFIX):
            problems.append(_unknown(name, (*names, ENV_CONFIG)))
    source = EnvSettingsSource(Settings)
    source.env_vars = {name.lower(): environ[name] for name in ours if name in names}
    values = _flatten(source())
    return _Layer(values, {key: f"env {env_name(key)}" for key in values})


def _choose_file(file: Path | None, environ: Mapping[str, str]) -> Path | None:
    if file is not None:
        if not file.is_file():
            raise ConfigError(f'configuration file "{file}" does not exist; give the path of a TOML file')
        return file
    if ENV_CONFIG in environ:
        name = environ[ENV_CONFIG]
        if name and not Path(name).is_file():
            raise ConfigError(
                f'configuration file "{name}" ({ENV_CONFIG}) does not exist; correct or unset {ENV_CONFIG}'
            )
        return Path(name) if name else None
    return next((path for path in (Path(DEFAULT_FILE), Path("pyproject.toml")) if path.is_file()), None)


def _file_layer(path: Path | None, problems: list[str]) -> _Layer:
    if path is None:
        return _Layer({}, {})
    try:
        tables: Any = TomlConfigSettingsSource(Settings, path).toml_data
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f'configuration file "{path}" is not valid TOML: {error}') from error
    except OSError as error:
        raise ConfigError(f'configuration file "{path}" cannot be read: {error.strerror}') from error
    if path.name == "pyproject.toml":
        tables = tables.get("tool", {}).get("paramserver", {})
    values: dict[str, Any] = {}
    for section, table in tables.items():
        if section not in SECTIONS:
            problems.append(f"{_unknown(section, SECTIONS, kind='section')} (in {path})")
        elif not isinstance(table, dict):
            problems.append(f"{section} is {_show(section, table)} in {path}, but must be a table [{section}]")
        else:
            values |= {f"{section}.{key}": value for key, value in table.items()}
    problems += [f"{_unknown(key, FIELDS)} (in {path})" for key in values if key not in FIELDS]
    known = {key: value for key, value in values.items() if key in FIELDS}
    return _Layer(known, dict.fromkeys(known, f"file {path}"))


def _flatten(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{section}.{name}": value for section, table in sections.items() for name, value in table.items()}


def _unknown(name: str, known: Sequence[str] | Mapping[str, Any], kind: str = "setting") -> str:
    # The right key in the wrong section ("training.staleness") is nearer than a similar spelling.
    near = [key for key in known if kind == "setting" and _key_part(key) == _key_part(name)]
    if not near:
        bare = {key.removeprefix(ENV_PREFIX): key for key in known}
        near = [bare[key] for key in difflib.get_close_matches(name.removeprefix(ENV_PREFIX), bare, n=1)]
    hint = f'did you mean "{near[0]}"?' if near else '"paramserver config show" lists what there is'
    return f'"{name}" is not a {kind}; {hint}'


def _key_part(name: str) -> str:
    return re.split(r"\.|__", name)[-1]


def _explain(error: ValidationError, origins: Mapping[str, str]) -> list[str]:
    """One sentence per wrong setting; a union reports the same setting once per member."""
    texts: dict[str, str] = {}
    for item in error.errors(include_url=False):
        if not item["loc"]:  # about several settings, and named in the text
            texts[item["msg"]] = item["msg"].removeprefix("Value error, ")
            continue
        key = ".".join(str(part) for part in item["loc"][:2])
        assert key in FIELDS, f"a section cannot be wrong as a whole, since only known keys get here: {item}"
        verb = "holds" if key == "run.args" and len(item["loc"]) > 2 else "is"
        where = origins.get(key, "default")
        texts.setdefault(key, f"{key} {verb} {_show(key, item['input'])} ({where}), but must be {must_be(key)}")
    return list(texts.values())


def _show(key: str, value: object) -> str:
    if key in _ENVIRONMENT_ONLY:
        return "what it is"
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    if key == "cluster.store":
        text = hide_password(text)
    return text if len(text) <= 80 else text[:77] + "..."
