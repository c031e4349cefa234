"""``paramserver ledger``: which samples have counted how often, epoch by epoch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paramserver.cli.common import tell
from paramserver.cli.target import NEAR, Where, find_target
from paramserver.errors import UserError

if TYPE_CHECKING:
    from paramserver.v1.coordinator_pb2 import AccountsResponse, SliceAccount

_CALL_S = 60.0
_UNHEALTHY = 5


def ledger(
    checkpoints: str | None = None,
    /,
    *,
    slices: bool = False,
    epoch: int | None = None,
    json_: Annotated[bool, Parameter(name="--json")] = False,
    where: Where = NEAR,
) -> int:
    """Show how often the samples of each epoch have counted: once, twice, never; and how much each worker computed.

    Reads a running job, or the newest checkpoint in a directory. Ends with exit code 5 if a sample counted twice.
    Shows at most 500 epochs: the newest, and those of which samples counted twice or not at all. If there are more, the
    first line is about all epochs together.

    Parameters
    ----------
    checkpoints
        Directory of checkpoints, or one checkpoint, in place of a running job.
    slices
        Also show, slice by slice, which workers computed it.
    epoch
        Show epochs from this one on. Epochs count from 1.
    json_
        Print JSON.
    """
    from paramserver.v1 import coordinator_pb2

    if epoch is not None and epoch < 1:
        raise UserError(f"--epoch is {epoch}, but epochs count from 1")
    request = coordinator_pb2.AccountsRequest(slices=slices, epoch=None if epoch is None else epoch - 1)
    if checkpoints is not None:
        from paramserver.resume.checkpointing import ledger_of

        found = ledger_of(checkpoints, request)
    else:
        reply = find_target(where).call("Coordinator.Ledger", request, _CALL_S)
        assert isinstance(reply, coordinator_pb2.AccountsResponse)
        found = reply
    tell(_as_json(found) if json_ else "\n".join(_lines(found, slices)))
    if found.total.twice:
        tell("paramserver: a sample has counted more than once: please report this", file=sys.stderr)
        return _UNHEALTHY
    return 0


def _lines(found: AccountsResponse, slices: bool) -> list[str]:
    last = found.total.epoch
    lines = [f"{'epoch':>5}  {'samples':>9}  {'once':>9}  {'twice':>6}  {'never':>9}  slices by worker"]
    shown = list(found.epochs)
    if found.begun > len(shown):
        lines.append(f"{found.begun} epochs in all, of which {len(shown)} are shown; see --epoch for others")
        shown.insert(0, found.total)
    for number, epoch in enumerate(shown):
        name = "all" if number == 0 and len(shown) > len(found.epochs) else epoch.epoch + 1
        who = ", ".join(f"{worker} {count}" for worker, count in sorted(epoch.workers.items()))
        lines.append(
            f"{name:>5}  {epoch.samples:>9}  {epoch.once:>9}  {epoch.twice:>6}  {epoch.never:>9}  {who}"
            + ("  (not yet)" if epoch.never and epoch.epoch == last else "")
            + (f"  ({epoch.skipped} skipped: their slices kill the workers that compute them)" if epoch.skipped else "")
        )
        if slices:
            lines += [f"       {_which(one)}: {', '.join(one.workers)}" for one in epoch.slices]
    if not found.begun:
        lines.append("nothing has counted yet")
    return [*lines, f"version {found.version}, timeline {found.timeline}"]


def _which(one: SliceAccount) -> str:
    if one.slices < 2:
        return f"slice {one.index}"
    return f"slices {one.index} to {one.index + one.slices - 1}"


def _as_json(found: AccountsResponse) -> str:
    from paramserver.web.facts import ledger_of as model_of

    return model_of(found).model_dump_json(indent=2)
