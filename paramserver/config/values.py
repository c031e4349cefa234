"""The allowed values of settings: limits, checks, and words for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

MAX_PROCESSES = 4096
MAX_CHUNK_BYTES = 8 << 20
CHUNK_ALIGNMENT_BYTES = 64
MIN_TOKEN_CHARS = 16

_WEB_URL = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?(/[A-Za-z0-9._~/-]*)?")
_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})")
_HOST = re.compile(r"[^\s/:,\[\]]+|\[?[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*\]?")
STORE = re.compile(r"(?:auto|memory)$|(?:rediss?|unix)://.")
OPTIMIZER = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", re.ASCII)
DEVICE = re.compile(r"auto|cpu|mps|(?:cuda|xpu)(?::[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Must:
    """The allowed values of a setting, in words that complete the sentence "... but must be ..."."""

    be: str


def is_address(text: str) -> bool:
    """Whether `text` is ``host:port`` with a port between 1 and 65535 (an IPv6 host stands in brackets)."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 1 <= int(match.group(1)) <= 65535


def is_job_name(text: str) -> bool:
    """Whether `text` may name a job: up to 64 letters, digits, ".", "_" and "-", not beginning with a sign."""
    return _JOB_NAME.fullmatch(text) is not None


def is_metric(text: str) -> bool:
    """Whether ``text`` may be a name of logged values; empty text, too."""
    return len(text) <= 100 and text.isprintable()


def refuse_bool(value: object) -> object:
    """Any value but a truth value. Raises ValueError, as all checks here do."""
    # pydantic takes True for 1, and a TOML file may well say `workers = true`.
    if isinstance(value, bool):
        raise ValueError("a truth value is not a number")
    return value


def split_addresses(text: str) -> list[str]:
    """The addresses in a list such as "a:8790, b:8790"; empty for empty text."""
    return [part.strip() for part in text.split(",")] if text else []


def is_web_url(text: str) -> bool:
    """Whether ``text`` is a URL of the web without a user or a query."""
    return _WEB_URL.fullmatch(text) is not None


def is_host(text: str) -> bool:
    """Whether ``text`` is the name or the address of a host."""
    return _HOST.fullmatch(text) is not None


def can_listen(text: str) -> bool:
    """Whether ``text`` is a host, or an address whose port may be 0."""
    return is_host(text) or can_listen_with_port(text)


def can_listen_with_port(text: str) -> bool:
    """Whether ``text`` is an address whose port may be 0."""
    return is_address(text) or is_address(re.sub(":0$", ":1", text))


def only_if(right: Callable[[Any], object]) -> AfterValidator:
    """Refuses values for which ``right`` is false. The setting's :class:`Must` says which values are allowed."""

    def check(value: Any) -> Any:
        if not right(value):
            raise ValueError("not allowed")
        return value

    return AfterValidator(check)


def empty_or(right: Callable[[str], object]) -> AfterValidator:
    """Allows empty text, and text for which ``right`` is true."""
    return only_if(lambda text: not text or right(text))


def json_list(value: object) -> object:
    """A list: from the environment or from --set it is written as JSON."""
    return json.loads(value) if isinstance(value, str) else value


Processes = Annotated[
    int, BeforeValidator(refuse_bool), Field(ge=1, le=MAX_PROCESSES), Must(f"an integer from 1 to {MAX_PROCESSES}")
]
Threads = Annotated[int, BeforeValidator(refuse_bool), Field(ge=1, le=1024), Must("an integer from 1 to 1024")]
ChosenThreads = Annotated[int, BeforeValidator(refuse_bool), Field(ge=0, le=1024), Must("an integer from 0 to 1024")]
Seconds = Annotated[
    float, BeforeValidator(refuse_bool), Field(gt=0, le=1e7, allow_inf_nan=False), Must("a number of seconds above 0")
]
SecondsOrNone = Annotated[
    float, BeforeValidator(refuse_bool), Field(ge=0, le=1e7, allow_inf_nan=False), Must("a number of seconds, or 0")
]
Count = Annotated[int, BeforeValidator(refuse_bool), Field(ge=0, lt=2**32), Must("an integer from 0 to 4294967295")]
Seed = Annotated[
    int, BeforeValidator(refuse_bool), Field(ge=0, lt=2**63), Must("an integer of 0 or more, below 2 to the power 63")
]
Staleness = Annotated[
    Annotated[int, Field(ge=0, lt=2**32)] | Literal["unbounded"],
    BeforeValidator(refuse_bool),
    Must('an integer of 0 or more, or "unbounded"'),
]
ProcessesPerHost = Annotated[int, BeforeValidator(refuse_bool), Field(ge=1, le=64), Must("an integer from 1 to 64")]
Mbps = Annotated[
    float, BeforeValidator(refuse_bool), Field(gt=0, le=1e6, allow_inf_nan=False), Must("a number above 0")
]
Replicas = Annotated[
    Annotated[int, Field(ge=0, le=8)] | Literal["auto"],
    BeforeValidator(refuse_bool),
    Must('an integer from 0 to 8, or "auto"'),
]
MbpsOrNone = Annotated[
    float, BeforeValidator(refuse_bool), Field(ge=0, le=1e6, allow_inf_nan=False), Must("a number of 0 or more")
]
ModelBytes = Annotated[int, BeforeValidator(refuse_bool), Field(ge=1, le=1 << 50), Must("an integer from 1 to 2**50")]
Port = Annotated[int, BeforeValidator(refuse_bool), Field(ge=0, le=65535), Must("an integer from 0 to 65535")]
OneOrMore = Annotated[int, BeforeValidator(refuse_bool), Field(ge=1, lt=2**32), Must("an integer of 1 or more")]
Ratio = Annotated[
    float, BeforeValidator(refuse_bool), Field(ge=0.001, le=1, allow_inf_nan=False), Must("from 0.001 to 1")
]
Share = Annotated[float, BeforeValidator(refuse_bool), Field(ge=0, le=1, allow_inf_nan=False), Must("from 0 to 1")]
ChunkBytes = Annotated[
    int,
    BeforeValidator(refuse_bool),
    Field(ge=0, le=MAX_CHUNK_BYTES),
    only_if(lambda size: size % CHUNK_ALIGNMENT_BYTES == 0),
    Must(f"0, or a multiple of {CHUNK_ALIGNMENT_BYTES} up to {MAX_CHUNK_BYTES}"),
]
PathText = Annotated[str, Must("a path")]
Token = Annotated[
    SecretStr,
    only_if(lambda token: not token or len(token.get_secret_value()) >= MIN_TOKEN_CHARS),
    Must(f"a text of {MIN_TOKEN_CHARS} characters or more, or empty"),
]
