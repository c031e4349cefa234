"""Whether the role processes of this machine, or container, are well: alive, fresh, and answering calls.

`presence` lists the processes. Coordinators and servers are called over gRPC as any member would call them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paramserver import errors
from paramserver.machine.presence import STALE_S, Sign, list_signs

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from paramserver.transport.security.access import Security

# How long a process has to answer, seconds.
CALL_S = 3.0
# A process that listens on all addresses of the machine is called at one of them.
_ANY = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]", "": "127.0.0.1"}


@dataclass(frozen=True, slots=True)
class Health:
    """The health of one process. `reason` is empty if it is healthy and ready.

    `job`: for a coordinator that leads, the state of its job ("degraded: server-1 is lost; ..."). The state does not
    count, since to start a coordinator again mends no job.
    """

    role: str
    name: str
    pid: int
    healthy: bool
    ready: bool
    reason: str = ""
    job: str = ""


def check_health(role: str | None = None, timeout_s: float = CALL_S) -> list[Health]:
    """The health of every role process of this user, or of one role. Blocking, for about ``timeout_s`` at most.

    Raises ConfigError if the runtime directory is open to others.
    """
    signs = [sign for sign in list_signs() if role in (None, sign.role)]
    return asyncio.run(_all(signs, timeout_s)) if signs else []


async def _all(signs: Sequence[Sign], timeout_s: float) -> list[Health]:
    now = time.monotonic()
    return list(await asyncio.gather(*(_one(sign, now, timeout_s) for sign in signs)))


async def _one(sign: Sign, now: float, timeout_s: float) -> Health:
    job = ""

    def verdict(healthy: bool, ready: bool, reason: str) -> Health:
        return Health(sign.role, sign.name, sign.pid, healthy, ready, reason, job)

    if not sign.alive:
        return verdict(False, False, "has ended without leaving")
    if sign.silence(now) > STALE_S:
        return verdict(False, False, f"hangs: nothing heard of it for {sign.silence(now):.0f} s")
    leads = True
    if sign.address:
        try:
            leads, job = await _answers(sign, timeout_s)
        except errors.ParamServerError as error:
            return verdict(False, False, f"does not answer: {error}")
    if not leads:
        return verdict(True, False, "stands by for another coordinator")
    if not sign.ready:
        return verdict(True, False, sign.state or "is not ready yet")
    return verdict(True, True, "")


async def _answers(sign: Sign, timeout_s: float) -> tuple[bool, str]:
    """Call the process: (False if it is a coordinator that stands by, where the job of one that leads stands).

    Raises what the call raises.
    """
    from paramserver.transport.grpc import connect
    from paramserver.v1.coordinator_pb2 import StatusRequest, StatusResponse
    from paramserver.v1.shard_pb2 import StatsRequest

    method: str
    request: Message
    if sign.role == "coordinator":
        method, request = "Coordinator.Status", StatusRequest()
    else:
        method, request = "Shard.Stats", StatsRequest(job=sign.job)
    channel = connect(callable_address(sign.address), security_of(sign), sign.role)
    try:
        answer: Message = await channel.call(method, request, timeout=timeout_s)
    except errors.NotLeaderError:
        return False, ""
    except errors.StaleViewError:
        return True, ""  # it knows the job by another name, but it answers
    finally:
        await channel.close()
    if not isinstance(answer, StatusResponse):
        return True, ""
    if not answer.term:
        return False, ""
    return True, f"{answer.state}: {answer.reason}" if answer.reason else answer.state


def security_of(sign: Sign) -> Security:
    """The credentials of a process, which it accepts from itself, too. Raises ConfigError if they are unusable.

    Tokens come from the process's files, or from the environment, which a process and the check of its container share.
    """
    from paramserver.config import load_settings
    from paramserver.pki.security import load_security

    facts = {
        "security.certs": sign.certs,
        "security.token_file": sign.token_file if os.path.exists(sign.token_file) else None,
        "security.insecure": sign.insecure,
    }
    return load_security(load_settings(overrides=facts), sign.role)


def callable_address(address: str) -> str:
    """The address at which to call a process that listens at ``address``: "0.0.0.0:8790" cannot be called."""
    host, _, port = address.rpartition(":")
    return f"{_ANY.get(host, host)}:{port}"
