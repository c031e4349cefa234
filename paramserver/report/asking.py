"""Asks the coordinator of a job for everything that a report shows."""

from __future__ import annotations

from typing import cast

from paramserver import errors
from paramserver.report.keeper import Keeper
from paramserver.transport.base import Channel
from paramserver.v1 import coordinator_pb2


async def ask_all(channel: Channel, keeper: Keeper, timeout_s: float) -> None:
    """Have ``keeper`` hear everything. Raises UnavailableError, DeadlineError; the ledger may be missing."""
    reply = await channel.call("Coordinator.Status", keeper.request(whole=True), timeout=timeout_s)
    status = cast(coordinator_pb2.StatusResponse, reply)
    if not status.term:
        raise errors.UnavailableError(f"no coordinator leads job {status.job}: {status.reason}")
    keeper.hear(status)
    accounts = await channel.call("Coordinator.Ledger", coordinator_pb2.AccountsRequest(), timeout=timeout_s)
    keeper.hear_ledger(cast(coordinator_pb2.AccountsResponse, accounts))
