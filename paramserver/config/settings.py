"""All settings of a job as one frozen value, and the facts of each setting by its dotted name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, get_args, get_origin

from pydantic import PrivateAttr, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from paramserver.config.secrets import SECRETS
from paramserver.config.sections import Checkpoint, Cluster, Consistency, Log, Run, Section, Security, Training, Web
from paramserver.config.values import Must
from paramserver.errors import ConfigError

ENV_PREFIX = "PARAMSERVER_"
# The variable that names the configuration file; empty: read no file at all.
ENV_CONFIG = "PARAMSERVER_CONFIG"
# The variable with the command that starts this process again, for people. Set by what starts the process.
ENV_RESTART_COMMAND = "PARAMSERVER_RESTART_COMMAND"
# Values of training.push_compression that keep what they leave out for the next step.
FEEDBACK = frozenset(("int8", "topk"))
DEFAULT_FLUSH_EVERY = 100


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
    web: Web = Web()

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

    @model_validator(mode="after")
    def _statistics_of_whole_steps(self) -> Self:
        if not self.training.sync_batchnorm:
            return self
        if self.consistency.mode == "async":
            raise ValueError(
                "training.sync_batchnorm is true and consistency.mode is async, where a step has no slices to take "
                "statistics over: set consistency.mode to sync, or training.sync_batchnorm to false"
            )
        if self.training.poison == "skip":
            raise ValueError(
                "training.sync_batchnorm is true and training.poison is skip, but the other slices of a step need the "
                "statistics of a slice that is skipped: set training.poison to fail, or training.sync_batchnorm to "
                "false"
            )
        return self

    @model_validator(mode="after")
    def _slices_of_steps(self) -> Self:
        if self.training.audit and self.consistency.mode == "async":
            raise ValueError(
                f"training.audit is {self.training.audit:g} and consistency.mode is async, where no two workers "
                "compute a slice on the same weights: set consistency.mode to sync, or training.audit to 0"
            )
        return self

    def replicas(self, launched: bool) -> int:
        """How many backups each shard is to have. ``launched``: `paramserver run` starts the servers.

        Raises ConfigError if there are not enough servers.
        """
        wanted, servers = self.cluster.replicas, self.cluster.servers
        if wanted == "auto":
            return int(servers > 1 and not launched)
        if wanted >= servers:
            raise ConfigError(
                f"cluster.replicas is {wanted}, so each part of the model is to be on {wanted + 1} servers, but "
                f"cluster.servers is {servers}: set cluster.servers to {wanted + 1} or more, or cluster.replicas lower"
            )
        return wanted

    @property
    def flush_every(self) -> int:
        """Nothing is left out of contributions to versions that are multiples of this."""
        return self.training.residual_flush_every or self.checkpoint.every or DEFAULT_FLUSH_EVERY

    @property
    def lr_rule(self) -> tuple[str, int]:
        """``training.lr_scaling`` and ``lr_base_slices`` without "auto", which depends on how the job begins."""
        if self.training.lr_scaling != "auto":
            return self.training.lr_scaling, self.training.lr_base_slices
        return ("linear", 0) if self.consistency.mode == "sync" else ("none", 1)

    @property
    def shares_pulls(self) -> bool:
        """Whether workers of one host pull once."""
        return self.cluster.host_tier == "auto" and self.cluster.transport in ("auto", "bulk")

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
        return {key: getattr(getattr(self, section_of(key)), leaf_of(key)) for key in FIELDS}

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

    def given_as_environment(self) -> dict[str, str]:
        """Like `as_environment`, with the settings that are given here only, and without those of a run.

        A process of the same job takes all others from the coordinator.
        """
        said = [key for key, origin in self.origins().items() if origin != "default" and not key.startswith("run.")]
        wanted = {ENV_CONFIG, *map(env_name, said)}
        return {name: value for name, value in self.as_environment().items() if name in wanted}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self.values() == other.values()

    def __hash__(self) -> int:
        return hash(tuple(self.values().values()))


def section_of(key: str) -> str:
    """The section of a setting: "consistency" of "consistency.mode"."""
    return key.partition(".")[0]


def leaf_of(key: str) -> str:
    """The name of a setting within its section."""
    return key.partition(".")[2]


def _fields() -> dict[str, FieldInfo]:
    sections = {name: field.annotation for name, field in Settings.model_fields.items()}
    return {
        f"{section}.{name}": field
        for section, model in sections.items()
        if isinstance(model, type) and issubclass(model, Section)
        for name, field in model.model_fields.items()
    }


# Every setting by its dotted name.
FIELDS: Mapping[str, FieldInfo] = _fields()
SECTIONS: Sequence[str] = tuple(Settings.model_fields)


def env_name(key: str) -> str:
    """The environment variable of the setting `key`, such as "consistency.mode"."""
    return ENV_PREFIX + key.upper().replace(".", "__")


def must_be(key: str) -> str:
    """The allowed values of the setting `key`, in words."""
    field = FIELDS[key]
    if field.annotation is bool:
        return "true or false"
    if choices := get_args(field.annotation) if get_origin(field.annotation) is Literal else ():
        *others, last = (f'"{choice}"' for choice in choices)
        return f"{', '.join(others)} or {last}"
    return next(item.be for item in field.metadata if isinstance(item, Must))
