"""What the values of settings may be: limits, checks, and the words that say so."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

MAX_PROCESSES = 4096
MAX_CHUNK_BYTES = 4 << 20
CHUNK_ALIGNMENT_BYTES = 64
MIN_TOKEN_CHARS = 16

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})")
_HOST = re.compile(r"[^\s/:,\[\]]+|\[?[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*\]?")
_DEVICE = re.compile(r"auto|cpu|mps|(?:cuda|xpu)(?::[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Must:
    """What a setting's value has to be, in words that complete the sentence "... but must be ..."."""

    be: str


def is_address(text: str) -> bool:
    """Whether `text` is ``host:port`` with a port between 1 and 65535 (an IPv6 host stands in brackets)."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 1 <= int(match.group(1)) <= 65535


def is_job_name(text: str) -> bool:
    """Whether `text` may name a job: up to 64 letters, digits, ".", "_" and "-", not beginning with a sign."""
    return _JOB_NAME.fullmatch(text) is not None


def refuse_bool(value: object) -> object:
    """Any value but a truth value. Raises ValueError, as all checks here do."""
    # pydantic takes True for 1, and a TOML file may well say `workers = true`.
    if isinstance(value, bool):
        raise ValueError("a truth value is not a number")
    return value


def split_addresses(text: str) -> list[str]:
    """The addresses in a list such as "a:8790, b:8790"; empty for empty text."""
    return [part.strip() for part in text.split(",")] if text else []


def addresses_or_empty(value: str) -> str:
    """A list of addresses, or nothing."""
    if not all(is_address(part) for part in split_addresses(value)):
        raise ValueError("not addresses")
    return value


def listen_or_empty(value: str) -> str:
    """Where to listen, or nothing."""
    if value and not (_HOST.fullmatch(value) or is_address(value) or is_address(re.sub(":0$", ":1", value))):
        raise ValueError("nothing to listen on")
    return value


def _long_enough(value: SecretStr) -> SecretStr:
    if value and len(value.get_secret_value()) < MIN_TOKEN_CHARS:
        raise ValueError("too short")
    return value


def host_or_empty(value: str) -> str:
    """The name of a host, or nothing."""
    if value and not _HOST.fullmatch(value):
        raise ValueError("not a host")
    return value


def job_name_or_empty(value: str) -> str:
    """The name of a job, or nothing."""
    if value and not is_job_name(value):
        raise ValueError("not a job name")
    return value


def store_url(value: str) -> str:
    """Where a store is."""
    if value not in ("auto", "memory") and not re.match(r"(?:rediss?|unix)://.", value):
        raise ValueError("not a store")
    return value


def device_name(value: str) -> str:
    """Where to compute."""
    if not _DEVICE.fullmatch(value):
        raise ValueError("not a device")
    return value


def chunk_size(value: int) -> int:
    """A number of bytes that keeps chunks aligned."""
    if value % CHUNK_ALIGNMENT_BYTES:
        raise ValueError("not aligned")
    return value


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


Token = Annotated[
    SecretStr, AfterValidator(_long_enough), Must(f"a text of {MIN_TOKEN_CHARS} characters or more, or empty")
]
