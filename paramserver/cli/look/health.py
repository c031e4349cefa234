"""``paramserver health``: the health check of containers and supervisors, as one line and an exit code."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Literal

from cyclopts import Parameter

from paramserver.cli.common import tell
from paramserver.logs import configure
from paramserver.machine.health import Health, check_health

UNHEALTHY_EXIT_CODE = 5


def health(
    *,
    role: Literal["coordinator", "server", "worker"] | None = None,
    ready: bool = False,
    json_: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Check the role processes of this machine or container: exit code 0 if all are well, 5 if not.

    A process is healthy if it runs, does not hang, and answers when called. Where a coordinator's job stands is shown,
    but does not count ("paramserver status --check" is for that).

    Parameters
    ----------
    role
        Look at the processes of this role only.
    ready
        Also ask for readiness: a server or worker that has joined, a coordinator that leads.
    json_
        Print JSON.
    """
    configure("error")
    found = check_health(role)
    well = bool(found) and all(one.healthy and (one.ready or not ready) for one in found)
    if json_:
        tell(json.dumps({"healthy": well, "processes": [asdict(one) for one in found]}, indent=2))
    else:
        tell(summarize(found, role, ready))
    return 0 if well else UNHEALTHY_EXIT_CODE


def summarize(found: list[Health], role: str | None = None, ready: bool = False) -> str:
    """One line: who is not well and why, or that all are."""
    if not found:
        return f"unhealthy: no {role or 'role'} process of this user runs here; start one with: paramserver start"
    unhealthy = [one for one in found if not one.healthy]
    if unhealthy:
        return "unhealthy: " + "; ".join(f"{_title(one)} {one.reason}" for one in unhealthy)
    waiting = [one for one in found if not one.ready]
    if ready and waiting:
        return "not ready: " + "; ".join(f"{_title(one)}: {one.reason}" for one in waiting)
    return "healthy: " + "; ".join(
        _title(one) + ("" if one.ready else f", {one.reason}") + (f", job {one.job}" if one.job else "")
        for one in found
    )


def _title(one: Health) -> str:
    return f"{one.name or one.role} (process {one.pid})"
