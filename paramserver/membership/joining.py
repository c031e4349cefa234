"""Joining a job: the facts that a process tells the coordinator, and trying until a coordinator answers."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import re
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import structlog
from google.protobuf.message import Message

from paramserver import errors
from paramserver.config import ENV_RESTART_COMMAND
from paramserver.core.versions.consistency import Consistency
from paramserver.transport.base import Channel
from paramserver.v1 import types_pb2

log = structlog.get_logger("paramserver.session")

# Seconds between two attempts to reach a coordinator; the last one is repeated.
RETRY_S = (0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """Facts about a process, sent when it joins. ``consistency`` None: it takes the setting of the job.

    ``shard``, of a server: (layout, timeline) of the shard it holds. ``term``: the highest that it knows of elsewhere.
    ``metrics_url``: where this process serves metrics about itself; empty: nowhere.
    ``replaces``: pids of the processes in whose place this one was started. ``drop``, of a server: drops its shards.
    """

    role: types_pb2.Role = types_pb2.ROLE_WORKER
    job: str = ""
    consistency: Consistency | None = None
    slices_per_step: int = 0
    seed: int | None = None
    index: int | None = None
    pid: int = 0
    address: str = ""
    join_timeout_s: float = 180.0
    log_interval_s: float = 5.0
    shard: Callable[[], tuple[str, int]] = lambda: ("", 0)
    term: Callable[[], int] = lambda: 0
    metrics_url: Callable[[], str] = lambda: ""
    replaces: Sequence[int] = ()
    # A server that shares its link with a worker.
    beside_worker: bool = False
    # Of a worker: a word that is equal on one host; empty: the hosts of workers make no difference.
    host: str = ""
    drop: Callable[[], Awaitable[None]] | None = None
    # Of a server: what the coordinator is to show in its calls.
    key: bytes = field(default=b"", repr=False)


async def persist(
    attempt: Callable[[], Coroutine[Any, Any, Message]], channel: Channel, timeout_s: float, log_interval_s: float
) -> Message:
    """Try until a coordinator answers, saying now and then that none does; UnavailableError after ``timeout_s``."""
    started = said = time.monotonic()
    for number in itertools.count():
        try:
            return await attempt()
        except (errors.UnavailableError, errors.OverloadedError) as error:
            now = time.monotonic()
            if now - started >= timeout_s:
                raise errors.UnavailableError(
                    f"no coordinator answered at {channel.address} within {timeout_s:g} s: "
                    f"start one there, or correct cluster.coordinator ({error})"
                ) from error
            if now - said >= log_interval_s:
                said = now
                log.info(f"waiting for the coordinator at {channel.address} ({now - started:.0f} s): {error}")
            await asyncio.sleep(RETRY_S[min(number, len(RETRY_S) - 1)])
    raise AssertionError("unreachable")


def restart_command() -> str:
    """The command that starts this process again, as the environment has it, with this host's name in it."""
    return os.environ.get(ENV_RESTART_COMMAND, "").replace("$HOSTNAME", socket.gethostname())


def shown_command(told: str) -> str:
    """The command that a newcomer has told, if people may be told to type it; else an empty text.

    People type what they are told by the job, so the words are those of this process's own environment, in which
    $HOSTNAME stands for one plain name. A newcomer adds nothing but that name.
    """
    before, host, after = os.environ.get(ENV_RESTART_COMMAND, "").partition("$HOSTNAME")
    pattern = re.escape(before) + (r"[A-Za-z0-9][A-Za-z0-9._-]*" if host else "") + re.escape(after)
    return told if re.fullmatch(pattern, told) else ""


@functools.cache
def versions() -> Mapping[str, str]:
    """Versions of the packages that this process runs, by name. They are compared when a member joins.

    They are read once: this takes milliseconds, and a coordinator compares them with those of each member that joins.
    """
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("paramserver", "torch", "numpy", "grpcio", "protobuf"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    return MappingProxyType(found)
