"""Settings of flags, environment and file, in this precedence. No other module reads files or the environment."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource

from paramserver.config.refusals import explain, unknown, written
from paramserver.config.secrets import ENVIRONMENT_ONLY
from paramserver.config.settings import (
    ENV_CONFIG,
    ENV_PREFIX,
    ENV_RESTART_COMMAND,
    FIELDS,
    SECTIONS,
    Settings,
    env_name,
    leaf_of,
    section_of,
)
from paramserver.errors import ConfigError

# Prefix of variables that our own processes hand to each other; they are no settings.
ENV_INTERNAL_PREFIX = "PARAMSERVER_INTERNAL_"
# Variables that Kubernetes sets for a Service, and Docker for a link.
_OF_A_SERVICE = re.compile(
    r"_SERVICE_HOST=|_SERVICE_PORT(_\w+)?=|_PORT=(tcp|udp|sctp)://|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?="
)
# Names that have less in common are no typing errors.
_SIMILAR = 0.75
DEFAULT_FILE = "paramserver.toml"


# Dotted name of a setting to its value, and to the words for the place where the value stands.
_Layer = dict[str, tuple[Any, str]]


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
    flags = _flag_layer(overrides or {}, problems)
    variables = _environment_layer(environ, problems)
    found = {**_file_layer(_choose_file(file, environ), problems), **variables, **flags}
    values: dict[str, dict[str, Any]] = {}
    for key, (value, _) in found.items():
        values.setdefault(section_of(key), {})[leaf_of(key)] = value
    origins = {key: origin for key, (_, origin) in found.items()}
    problems += [
        f"{key} is {value!r} ({origin}), which is not text in UTF-8: use another name, or set LC_ALL=C.UTF-8 if it is"
        for key, (value, origin) in found.items()
        if isinstance(value, str) and not _is_text(value)
    ]
    try:
        settings = Settings(**values)  # type: ignore[arg-type]  # sections as plain dicts, which pydantic validates
    except ValidationError as error:
        problems += explain(error, origins)
    problems += [
        f"{key} comes from the environment only ({env_name(key)}); or write it to a file of its own and name it "
        f"in {instead}"
        for key, instead in ENVIRONMENT_ONLY.items()
        if values.get(section_of(key), {}).get(leaf_of(key)) and not origins[key].startswith("env")
    ]
    if problems:
        raise ConfigError("; ".join(problems))
    settings._origins.update(origins)
    return settings


def _is_text(value: str) -> bool:
    """False for bytes of the command line or the environment that the encoding of this process does not know."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _flag_layer(overrides: Mapping[str, object], problems: list[str]) -> _Layer:
    given = {key: value for key, value in overrides.items() if value is not None}
    problems += [unknown(key, FIELDS) for key in given if key not in FIELDS]
    return {key: (value, "flag") for key, value in given.items() if key in FIELDS}


def _could_be_meant(name: str, value: str, known: Iterable[str]) -> bool:
    """Whether a variable that is no setting could be meant as one of the ``known`` ones.

    Kubernetes sets variables for each Service of a namespace in every pod, such as PARAMSERVER_STORE_SERVICE_HOST.
    """
    if name.startswith(ENV_INTERNAL_PREFIX) or _OF_A_SERVICE.search(f"{name}={value}"):
        return False
    word = name.removeprefix(ENV_PREFIX)
    words = [one.removeprefix(ENV_PREFIX) for one in known]
    leaves = [one.rpartition("__")[2] for one in words]
    return "__" in word or bool(difflib.get_close_matches(word.upper(), [*words, *leaves], 1, _SIMILAR))


def _environment_layer(environ: Mapping[str, str], problems: list[str]) -> _Layer:
    names = {env_name(key): key for key in FIELDS}
    others = (ENV_CONFIG, ENV_RESTART_COMMAND)
    ours = [name for name in environ if name.startswith(ENV_PREFIX)]
    for name in ours:
        if name not in names and name not in others and _could_be_meant(name, environ[name], (*names, *others)):
            problems.append(unknown(name, (*names, *others)))
    source = EnvSettingsSource(Settings)
    source.env_vars = {name.lower(): environ[name] for name in ours if name in names}
    given = {f"{section}.{name}": value for section, table in source().items() for name, value in table.items()}
    return {key: (value, f"env {env_name(key)}") for key, value in given.items()}


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
        return {}
    try:
        tables: Any = tomllib.loads(path.read_bytes().decode("utf-8-sig"))  # with a byte-order mark, as Windows writes
    except UnicodeDecodeError as error:
        raise ConfigError(f'configuration file "{path}" is not text in UTF-8: save it as UTF-8') from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f'configuration file "{path}" is not valid TOML: {error}') from error
    except OSError as error:
        raise ConfigError(f'configuration file "{path}" cannot be read: {error.strerror}') from error
    if path.name == "pyproject.toml":
        tables = tables.get("tool", {}).get("paramserver", {})
    values: dict[str, Any] = {}
    for section, table in tables.items():
        if section not in SECTIONS:
            problems.append(f"{unknown(section, SECTIONS, kind='section')} (in {path})")
        elif not isinstance(table, dict):
            problems.append(f"{section} is {written(section, table)} in {path}, but must be a table [{section}]")
        else:
            values |= {f"{section}.{key}": value for key, value in table.items()}
    problems += [f"{unknown(key, FIELDS)} (in {path})" for key in values if key not in FIELDS]
    return {key: (value, f"file {path}") for key, value in values.items() if key in FIELDS}
