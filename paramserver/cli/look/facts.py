"""The status of a job as plain values, in the words of the documents, and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paramserver.core.job.holders import Cover
from paramserver.core.job.status import took_over

if TYPE_CHECKING:
    from rich.console import RenderableType

    from paramserver.v1.coordinator_pb2 import StatusResponse

# The columns of the table, before the reason.
_TEXTS = ("role", "name", "pid", "address", "state")
_NUMBERS = ("epoch", "version", "clock", "samples")
# A line names so many workers, and counts more of them.
_NAMED = 4


def describe(response: StatusResponse) -> dict[str, Any]:
    """The answer of the coordinator as plain values: the same model as `/api/v1/status`."""
    from paramserver.web.facts import status_of

    return status_of(response).model_dump(mode="json")


def headline(facts: dict[str, Any]) -> str:
    """Job, state and mode in one line, and why the job is in that state."""
    mode = facts["mode"] or "mode not known yet"
    if facts["staleness"] is not None:
        mode = f"{mode}, staleness {facts['staleness']}"
    line = f"{facts['job']}: {facts['state']} · {mode} · generation {facts['generation']}"
    return f"{line} · {facts['reason']}" if facts["reason"] else line


def render(facts: dict[str, Any], cut: bool = False) -> RenderableType:
    """The status as a table. ``cut``: each process has one row, and a long reason is cut."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in _TEXTS:
        table.add_column(title, no_wrap=True)
    for title in _NUMBERS:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("why", no_wrap=cut, overflow="ellipsis" if cut else "fold")
    for process in facts["processes"]:
        table.add_row(
            *(Text(str(process[key]) if _applies(process, key) else "") for key in (*_TEXTS, *_NUMBERS, "reason"))
        )
    lines: list[RenderableType] = [Text(headline(facts)), table]
    lines += [Text(sentence, style="bold") for sentence in facts["blame"]]
    lines += [Text(f"wrong now: {sentence}") for sentence in facts["troubles"].values()]
    lines += [Text(f"broken promise: {sentence}") for sentence in facts["broken_promises"].values()]
    lines += [Text(f"skipped, since it kills the workers that compute it: {name}") for name in facts["poisoned_slices"]]
    lines += [Text(line) for line in [*_shards(facts.get("shards", ())), *_transports(facts["processes"])]]
    if facts["lost"]:
        lines.append(Text(f"lost: {', '.join(facts['lost'])}"))
    if batch := _batch(facts):
        lines.append(Text(batch))
    if facts["losses"] > len(facts["lost"]):
        lines.append(Text(f"lost and replaced so far: {facts['losses'] - len(facts['lost'])}"))
    if facts.get("takeovers"):
        lines.append(Text(took_over(facts["takeovers"], facts["repairs"])))
    if facts["checkpoint"]:
        lines.append(Text(f"last checkpoint: {facts['checkpoint']}"))
    if facts["rollbacks"]:
        lines.append(Text(f"went back {facts['rollbacks']} times; {facts['steps_redone']} steps were done again"))
    return Group(*lines)


def _applies(process: dict[str, Any], key: str) -> bool:
    """Whether a process of this role has such a fact: servers are in no epoch, and coordinators hold no weights."""
    if key == "pid":
        return bool(process[key])
    return key not in _NUMBERS or process["role"] in (("server", "worker") if key == "version" else ("worker",))


def _batch(facts: dict[str, Any]) -> str:
    """The samples in an update, and what learning rates are multiplied by; empty: not known."""
    now, whole = facts["lr_factor"], facts["lr_factor_whole"]
    said = [f"effective batch: {facts['effective_batch']} samples"] if facts["effective_batch"] else []
    if now not in (0.0, 1.0) or whole not in (0.0, 1.0):
        rest = "" if now == whole else f", {whole:g} after the warm-up"
        said.append(f"learning rates times {now:g}{rest}")
    return "; ".join(said)


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


def _transports(processes: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each way in which workers talk to servers, with the reason why it is not shared memory."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for process in processes:
        if process["role"] == "worker" and process["transport"] and not process["gone"]:
            how = process["transport"], process["transport_reason"], process["host_tier"]
            groups.setdefault(how, []).append(process["name"])
    lines = []
    for (transport, reason, tier), names in groups.items():
        who = ", ".join(names) if len(names) <= _NAMED else f"{len(names)} workers"
        without = f"; no shared memory ({reason})" if reason else ""
        lines.append(f"transport of {who}: {transport}{without}" + (f"; {tier}" if tier else ""))
    return lines
