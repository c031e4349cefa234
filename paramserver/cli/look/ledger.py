"""``paramserver ledger``: which samples have counted how often, epoch by epoch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paramserver.cli.target import NEAR, Where, find_target

if TYPE_CHECKING:
    from paramserver.v1.coordinator_pb2 import AccountsResponse

_CALL_S = 60.0
_UNHEALTHY = 5


def ledger(
    checkpoints: str | None = None,
    /,
    *,
    slices: bool = False,
    json_: Annotated[bool, Parameter(name="--json")] = False,
    where: Where = NEAR,
) -> int:
    """Show how often the samples of each epoch have counted: once, twice, never; and how much each worker computed.

    Reads a running job, or the newest checkpoint in a directory. Ends with exit code 5 if a sample counted twice.

    Parameters
    ----------
    checkpoints
        Directory of checkpoints, or one checkpoint, in place of a running job.
    slices
        Also show, slice by slice, which workers computed it.
    json_
        Print JSON.
    """
    from paramserver.v1 import coordinator_pb2

    if checkpoints is not None:
        from paramserver.resume.checkpointing import ledger_of

        found = ledger_of(checkpoints, slices)
    else:
        request = coordinator_pb2.AccountsRequest(slices=slices)
        reply = find_target(where).call("Coordinator.Ledger", request, _CALL_S)
        assert isinstance(reply, coordinator_pb2.AccountsResponse)
        found = reply
    print(_as_json(found) if json_ else "\n".join(_lines(found, slices)))
    if any(epoch.twice for epoch in found.epochs):
        print("paramserver: a sample has counted more than once: please report this", file=sys.stderr)
        return _UNHEALTHY
    return 0


def _lines(found: AccountsResponse, slices: bool) -> list[str]:
    last = max((epoch.epoch for epoch in found.epochs), default=0)
    lines = [f"{'epoch':>5}  {'samples':>9}  {'once':>9}  {'twice':>6}  {'never':>9}  slices by worker"]
    for epoch in found.epochs:
        who = ", ".join(f"{name} {count}" for name, count in sorted(epoch.workers.items()))
        lines.append(
            f"{epoch.epoch + 1:>5}  {epoch.samples:>9}  {epoch.once:>9}  {epoch.twice:>6}  {epoch.never:>9}  {who}"
            + ("  (not yet)" if epoch.never and epoch.epoch == last else "")
            + (f"  ({epoch.skipped} skipped: their slices kill the workers that compute them)" if epoch.skipped else "")
        )
        if slices:
            lines += [f"       slice {one.index}: {', '.join(one.workers)}" for one in epoch.slices]
    if not found.epochs:
        lines.append("nothing has counted yet")
    return [*lines, f"version {found.version}, timeline {found.timeline}"]


def _as_json(found: AccountsResponse) -> str:
    from paramserver.web.facts import ledger_of as model_of

    return model_of(found).model_dump_json(indent=2)
