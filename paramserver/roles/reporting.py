"""The report of a job that a coordinator leads without a launcher, and the settings that reports show."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from paramserver import errors
from paramserver.config import Settings
from paramserver.report.data import Outcome, Report
from paramserver.report.keeper import Keeper
from paramserver.report.secrets import secrets_of, without
from paramserver.report.writing import write_report
from paramserver.roles.dashboard import settings_of
from paramserver.v1 import coordinator_pb2


def in_force(settings: Settings) -> list[coordinator_pb2.SettingInForce]:
    """All settings in force without their secrets, and where each came from."""
    return [
        coordinator_pb2.SettingInForce(key=one.key, value=one.value, origin=one.origin) for one in settings_of(settings)
    ]


class _Told(Protocol):
    async def status(self, request: coordinator_pb2.StatusRequest) -> coordinator_pb2.StatusResponse: ...


class _Counted(Protocol):
    async def ledger(self, request: coordinator_pb2.AccountsRequest) -> coordinator_pb2.AccountsResponse: ...


async def write_own(
    endpoint: _Told, service: _Counted, settings: Settings, how: Outcome, summary: Mapping[str, Any] | None = None
) -> str:
    """Write what ``run.report`` asks for. Returns a line for people; "" if no report is wanted. Raises UserError."""
    if not settings.run.report:
        return ""
    keeper, path = Keeper(), Path(settings.run.report)
    keeper.hear(await endpoint.status(keeper.request(whole=True)))
    with suppress(errors.UnavailableError):  # nothing has been counted
        keeper.hear_ledger(await service.ledger(coordinator_pb2.AccountsRequest()))
    empty = Report(job=settings.cluster.job, made_at_s=time.time(), outcome=how, summary=dict(summary or {}))
    # In a thread: meanwhile members hear that their leases go on.
    await asyncio.to_thread(write_report, path, without(keeper.report(empty), secrets_of(settings)))
    return f"report {path}"
