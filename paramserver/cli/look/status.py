"""``paramserver status``: what a running job is doing, as a table or as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from paramserver.cli.target import NEAR, Target, Where, find_target
from paramserver.core.job.holders import Cover
from paramserver.core.job.status import WELL, took_over
from paramserver.errors import UnavailableError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from paramserver.v1.coordinator_pb2 import ProcessStatus, ShardStatus, StatusResponse

WATCH_INTERVAL_S = 1.0
UNHEALTHY_EXIT_CODE = 5
# Fields of messages that are shown under their own names.
_COUNTS = ("losses", "checkpoint", "rollbacks", "steps_redone", "store", "store_operations", "uptime_s")
_PROCESS = (
    *("role", "name", "pid", "address", "state", "reason", "gone"),
    *("version", "clock", "epoch", "samples", "slices", "waiting_for", "transport", "restart_command"),
)
_SERVER = (
    *("applied", "duplicate", "skipped", "refused"),
    *("bytes_pushed", "bytes_pulled", "max_clock_spread", "shard_bytes"),
)


def status(
    *,
    json_: Annotated[bool, Parameter(name="--json")] = False,
    watch: bool = False,
    check: bool = False,
    where: Where = NEAR,
) -> int:
    """Show a running job: its mode, and who is at which version or clock.

    Parameters
    ----------
    json_
        Print JSON; with --watch one line per second.
    watch
        Show it again every second until the job ends.
    check
        Exit with code 5 unless the job is training or done: not while it waits, is idle, degraded or stuck, nor if it
        has failed or was stopped.
    """
    target = find_target(where)
    if watch:
        return _watch(target, as_json=json_)
    facts = describe(target.status())
    if json_:
        print(json.dumps(facts, indent=2))
    else:
        from rich.console import Console

        # Off a terminal nothing is cut: a file has room for long lines.
        console = Console() if sys.stdout.isatty() else Console(width=160)
        console.print(render(facts))
    return UNHEALTHY_EXIT_CODE if check and facts["state"] not in WELL else 0


def describe(response: StatusResponse) -> dict[str, Any]:
    """The answer of the coordinator as plain values, in the words of the documents."""
    from paramserver.wire.blame import describe_blame

    view = response.view
    facts: dict[str, Any] = {name: getattr(response, name) for name in ("job", "state", "reason")}
    facts |= {**describe_consistency(view.consistency), "generation": view.generation, "term": response.term}
    facts |= {"security": response.security, "timeline": view.timeline, "slices_per_step": view.slices_per_step}
    facts |= {name: getattr(response, name) for name in ("steps_per_epoch", "expected_servers", "expected_workers")}
    facts |= {name: dict(sorted(getattr(response, name).items())) for name in ("troubles", "broken_promises")}
    facts |= {"poisoned_slices": list(response.poisoned), "lost": list(response.lost)}
    facts |= {name: getattr(response, name) for name in _COUNTS}
    facts["blame"] = describe_blame(response.blame)
    if response.holders:
        facts |= {"takeovers": response.takeovers, "repairs": response.repairs}
        facts["shards"] = [_describe_shard(shard) for shard in response.holders]
    return {**facts, "processes": [_describe_process(process) for process in response.processes]}


def describe_consistency(consistency: Any) -> dict[str, str | int | None]:
    """`mode`, and `staleness`: a number or "unbounded" in asynchronous mode, None in synchronous mode."""
    mode = _mode(consistency.mode)
    staleness: str | int | None = None
    if mode == "async":
        staleness = int(consistency.staleness) if consistency.HasField("staleness") else "unbounded"
    return {"mode": mode, "staleness": staleness}


def _describe_process(process: ProcessStatus) -> dict[str, Any]:
    facts: dict[str, Any] = {name: getattr(process, name) for name in _PROCESS}
    facts["metrics"] = dict(sorted(process.metrics.items()))
    if process.HasField("phases"):
        from paramserver.wire.blame import describe_phases

        facts |= {"phases": describe_phases(process.phases), "phase": process.phase, "phase_s": process.phase_s}
    if process.HasField("server"):
        facts["server"] = {name: getattr(process.server, name) for name in _SERVER}
    return facts


def _describe_shard(shard: ShardStatus) -> dict[str, Any]:
    facts: dict[str, Any] = {name: getattr(shard, name) for name in ("shard", "state", "primary")}
    facts["backups"] = [{name: getattr(one, name) for name in ("server", "whole", "share")} for one in shard.backups]
    return facts


def _mode(value: int) -> str | None:
    """MODE_SYNC is "sync"; None if unspecified or unknown to this version."""
    from paramserver.v1 import types_pb2

    known = types_pb2.Mode.DESCRIPTOR.values_by_number.get(value)
    return str(known.name).removeprefix("MODE_").lower() if known is not None and value else None


def headline(facts: dict[str, Any]) -> str:
    """Job, state and mode in one line, and why the job is in that state."""
    mode = facts["mode"] or "mode not known yet"
    if facts["staleness"] is not None:
        mode = f"{mode}, staleness {facts['staleness']}"
    line = f"{facts['job']}: {facts['state']} · {mode} · generation {facts['generation']}"
    return f"{line} · {facts['reason']}" if facts["reason"] else line


def render(facts: dict[str, Any]) -> RenderableType:
    """The status as a table."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in ("role", "name", "pid", "address", "state"):
        table.add_column(title, no_wrap=True)
    for title in ("epoch", "version", "clock", "samples"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("why")
    for process in facts["processes"]:
        cells = [process[key] for key in ("role", "name", "pid", "address", "state", "epoch", "version", "clock")]
        cells += [process["samples"], process["reason"]]
        table.add_row(*(Text(str(cell)) for cell in cells))
    lines: list[RenderableType] = [Text(headline(facts)), table]
    lines += [Text(facts["blame"][key]) for key in ("sentence", "chronic") if facts["blame"][key]]
    lines += [Text(f"wrong now: {sentence}") for sentence in facts["troubles"].values()]
    lines += [Text(f"broken promise: {sentence}") for sentence in facts["broken_promises"].values()]
    lines += [Text(f"skipped, since it kills the workers that compute it: {name}") for name in facts["poisoned_slices"]]
    lines += [Text(line) for line in _shards(facts.get("shards", ()))]
    if facts["lost"]:
        lines.append(Text(f"lost: {', '.join(facts['lost'])}"))
    if facts["losses"] > len(facts["lost"]):
        lines.append(Text(f"lost and replaced so far: {facts['losses'] - len(facts['lost'])}"))
    if facts.get("takeovers"):
        lines.append(Text(took_over(facts["takeovers"], facts["repairs"])))
    if facts["checkpoint"]:
        lines.append(Text(f"last checkpoint: {facts['checkpoint']}"))
    if facts["rollbacks"]:
        lines.append(Text(f"went back {facts['rollbacks']} times; {facts['steps_redone']} steps were done again"))
    return Group(*lines)


def _shards(shards: Sequence[dict[str, Any]]) -> list[str]:
    """Lines about the copies of shards: one for all, or one for the shards of a server in the same state."""
    if shards and all(shard["state"] == Cover.REPLICATED for shard in shards):
        return [f"shards: all {len(shards)} replicated"]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for shard in shards:
        groups.setdefault((shard["primary"], shard["state"]), []).append(shard)
    lines = []
    for (primary, state), group in sorted(groups.items()):
        numbers = ", ".join(str(shard["shard"]) for shard in group)
        behind = [one for shard in group for one in shard["backups"] if not one["whole"]]
        if state == Cover.CATCHING_UP and behind:
            share = sum(one["share"] for one in behind) / len(behind)
            state += f" {int(share * 100)} %, on {', '.join(sorted({one['server'] for one in behind}))}"
        lines.append(f"{'shard' if len(group) == 1 else 'shards'} {numbers} on {primary}: {state}")
    return lines


def _watch(target: Target, as_json: bool) -> int:
    """Show the status every second until the job ends. Raises UnavailableError if no coordinator ever answers."""
    facts = describe(target.status())
    if as_json:
        while True:
            print(json.dumps(facts), flush=True)
            time.sleep(WATCH_INTERVAL_S)
            try:
                facts = describe(target.status())
            except UnavailableError:
                return 0
    from rich.console import Console
    from rich.live import Live

    with Live(render(facts), console=Console(), auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_INTERVAL_S)
            try:
                facts = describe(target.status())
            except UnavailableError:
                break
            live.update(render(facts), refresh=True)
    print("The job has ended.", file=sys.stderr)
    return 0
