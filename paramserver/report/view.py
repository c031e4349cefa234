"""The contents of a report as texts and tables, which HTML and Markdown show alike. Pure functions."""

from __future__ import annotations

import ast
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paramserver.core.job.status import took_over
from paramserver.report.data import Curve, Report
from paramserver.report.text import count, moment, number, seconds, size, times
from paramserver.web.models import Event, LedgerEpoch

# Kinds of events that something out of the ordinary is behind; they are marked in the curves.
NOTABLE = ("lost", "takeover", "went back", "taken over", "mode")
_PHASES = ("data", "compute", "send", "wait", "receive", "other")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts below headings. ``numeric``: the columns with numbers."""

    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numeric: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Mark:
    """A notable event. ``number``: counted from 1, as curves and the table of events show it."""

    number: int
    event: Event


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of a worker by phase."""

    worker: str
    phases: dict[str, float]

    @property
    def all(self) -> float:
        """All phases together."""
        return sum(self.phases.values())


@dataclass(frozen=True, slots=True)
class View:
    """The report for people, in the order in which it is read."""

    title: str
    kind: str
    sentence: str
    when: str
    # The script and its arguments.
    command: str
    facts: list[tuple[str, str]]
    # Why the run is not as it should be: broken promises, troubles, the reason of a failure.
    problems: list[str]
    story: list[str]
    begun_s: float
    marks: list[Mark]
    events: Table
    values: Table
    spent: list[Spent]
    spent_table: Table
    blame: list[str]
    worst: Table
    processes: Table
    ledger: Table
    # The ledger in one sentence.
    counted: str
    result: Table
    changed: Table
    defaults: Table
    versions: Table
    notes: list[str] = field(default_factory=list)


def view_of(report: Report) -> View:
    """The report for people."""
    status, summary = report.status, report.summary
    begun_s = _begun(report)
    notable = [event for event in report.events if event.kind in NOTABLE]
    if notable and notable[0].kind == "mode" and notable[0].version == 0 and notable[0] is report.events[0]:
        notable = notable[1:]
    marks = [Mark(place + 1, event) for place, event in enumerate(notable)]
    spent = _spent(status)
    return View(
        title=f"Job {report.job}",
        kind=report.outcome.kind,
        sentence=report.outcome.sentence,
        when=_when(report, begun_s),
        command=_command(report),
        facts=_facts(report),
        problems=_problems(report),
        story=story(report, begun_s),
        begun_s=begun_s,
        marks=marks,
        events=_events(report.events, begun_s, marks),
        values=_values(report.curves),
        spent=spent,
        spent_table=_spent_table(spent),
        blame=list(status.get("blame", [])),
        worst=_worst(status, begun_s),
        processes=_processes(status),
        ledger=_ledger(report),
        counted=_counted(report),
        result=_result(summary, status),
        changed=_settings(report, lambda origin: origin != "default"),
        defaults=_settings(report, lambda origin: origin == "default"),
        versions=Table(("what", "version"), [*sorted(report.versions.items()), *_hosts(report)]),
        notes=list(report.missing),
    )


def _begun(report: Report) -> float:
    first = [event.at_s for event in report.events[:1]] + [one.at_s for one in report.moments[:1]]
    return min(first, default=report.made_at_s)


def _when(report: Report, begun_s: float) -> str:
    where = f" on {report.host}" if report.host else ""
    if not (report.events or report.moments):
        return f"reported {moment(report.made_at_s)}{where}"
    until = "until now" if report.outcome.kind == "running" else "to"
    return f"{moment(begun_s)} {until} {moment(report.made_at_s)}{where}"


def _facts(report: Report) -> list[tuple[str, str]]:
    status, summary = report.status, report.summary
    facts = []
    if mode := summary.get("mode") or status.get("mode"):
        staleness = summary.get("staleness") if summary else status.get("staleness")
        facts.append(("mode", "synchronous" if mode == "sync" else f"asynchronous, staleness {staleness}"))
    servers = summary.get("servers", status.get("expected_servers", 0))
    workers = summary.get("workers", status.get("expected_workers", 0))
    if servers:
        facts.append(("processes", f"{count(servers, 'server')}, {count(workers, 'worker')}"))
    if summary or status:
        facts.append(("steps", number(summary.get("steps", status.get("version", 0)))))
    planned = summary.get("epochs_planned", status.get("epochs", 0))
    if planned:
        done = summary.get("epochs", status.get("epoch", 0))
        facts.append(("epochs", f"{done} of {planned}"))
    taken_s = summary.get("seconds") or (report.made_at_s - _begun(report) if report.moments else 0.0)
    if taken_s:
        facts.append(("time", seconds(taken_s)))
    speed = summary.get("samples_per_s") or status.get("samples_per_s")
    if speed:
        facts.append(("speed", f"{number(round(speed))} samples/s"))
    for curve in ordered(report.curves)[:3]:
        facts.append((curve.name, _from_to(curve)))
    if status or summary:
        facts.append(("faults", count(_int(summary or status, "losses"), "process lost", "processes lost")))
    return facts


def ordered(curves: Sequence[Curve]) -> list[Curve]:
    """Curves with points; the loss comes first, then other losses, then the rest by name."""
    rank = {name: place for place, name in enumerate(("loss", "train/loss", "train_loss"))}
    return sorted(
        (curve for curve in curves if curve.points),
        key=lambda curve: (rank.get(curve.name, 3 if "loss" in curve.name else 4), curve.name),
    )


def _from_to(curve: Curve) -> str:
    first, last = curve.points[0].value, curve.points[-1].value
    return number(last) if len(curve.points) == 1 else f"{number(first)} → {number(last)}"


def _problems(report: Report) -> list[str]:
    status, summary = report.status, report.summary
    found: list[str] = []
    if report.outcome.kind in ("failed", "stopped", "interrupted") and status.get("reason"):
        found.append(status["reason"])
    found += [f"Promise broken: {sentence}" for sentence in summary.get("broken_promises", [])]
    if not summary:
        found += [f"Promise broken: {sentence}" for sentence in status.get("broken_promises", {}).values()]
        found += status.get("troubles", {}).values()
    for process in status.get("processes", []):
        if process["state"] in ("failed", "stuck") and process.get("reason"):
            found.append(f"{process['name']}: {process['reason']}")
    said = report.outcome.sentence
    return [sentence for place, sentence in enumerate(found) if sentence not in found[:place] and sentence != said]


def story(report: Report, begun_s: float) -> list[str]:
    """Faults and recoveries, in sentences."""
    status, summary = report.status, report.summary
    if not status and not summary:
        return []
    told = []
    for place, event in enumerate(report.events):
        if event.kind != "lost":
            continue
        back = next((e for e in report.events[place:] if e.kind == "joined" and e.subject == event.subject), None)
        after = f"; it was back after {seconds(back.at_s - event.at_s)}" if back else "; nobody took its place"
        told.append(f"{event.text.rstrip('.')} ({seconds(event.at_s - begun_s)} after the begin){after}.")
    told += [
        f"Another coordinator took the job over {seconds(event.at_s - begun_s)} after the begin."
        for event in report.events
        if event.kind == "taken over"
    ]
    known = summary or status
    restarts = {name: many for name, many in summary.get("restarts", {}).items() if many}
    if restarts:
        who = ", ".join(f"{name} {times(many)}" for name, many in sorted(restarts.items()))
        told.append(f"Started again: {who}.")
    if takeovers := _int(known, "takeovers"):
        said = took_over(takeovers, _int(known, "repairs"))
        told.append(f"{said[0].upper()}{said[1:]}.")
    rollbacks, redone = _int(known, "rollbacks"), _int(known, "steps_redone")
    if rollbacks:
        again = count(redone, "step was", "steps were")
        told.append(f"The job went back to a checkpoint {times(rollbacks)}; {again} done again.")
    elif told:
        told.append("No step was done again.")
    if not told and not _int(known, "losses"):
        told.append("No process was lost, and no step was done again.")
    return told


def _int(known: dict[str, Any], name: str) -> int:
    value = known.get(name)
    return value if isinstance(value, int) else 0


def _events(events: Sequence[Event], begun_s: float, marks: Sequence[Mark]) -> Table:
    numbers = {mark.event: str(mark.number) for mark in marks}
    rows = [
        (numbers.get(event, ""), f"+{event.at_s - begun_s:.1f} s", number(event.version), event.kind, event.text)
        for event in events
    ]
    return Table(("mark", "time", "version", "kind", "what happened"), rows, frozenset({0, 1, 2}))


def _values(curves: Sequence[Curve]) -> Table:
    rows = []
    for curve in ordered(curves):
        values = [point.value for point in curve.points]
        finite = [value for value in values if math.isfinite(value)]
        low, high = (number(min(finite)), number(max(finite))) if finite else ("", "")
        rows.append((curve.name, number(values[0]), number(values[-1]), low, high, number(curve.points[-1].step)))
    return Table(("value", "first", "last", "lowest", "highest", "last step"), rows, frozenset({1, 2, 3, 4, 5}))


def _spent(status: dict[str, Any]) -> list[Spent]:
    found = []
    for process in status.get("processes", []):
        phases = process.get("phases") or {}
        kept = {name: float(phases[name]) for name in _PHASES if phases.get(name)}
        if kept:
            found.append(Spent(process["name"], kept))
    return found


def _spent_table(spent: Sequence[Spent]) -> Table:
    rows = [
        (one.worker, *(f"{one.phases.get(name, 0.0):.1f} s" for name in _PHASES), f"{one.all:.1f} s") for one in spent
    ]
    return Table(("worker", *_PHASES, "all"), rows, frozenset(range(1, 8)))


def _worst(status: dict[str, Any], begun_s: float) -> Table:
    worst = (status.get("waits") or {}).get("worst", [])
    rows = [
        (
            number(one["step"]),
            seconds(one["waited_s"]),
            one["member"] or "not known",
            one["cause"],
            one["sentence"],
            f"+{one['at_s'] - begun_s:.1f} s" if one.get("at_s") else "",
        )
        for one in worst[:10]
    ]
    return Table(("step", "waited", "for", "cause", "in words", "time"), rows, frozenset({0, 1, 5}))


def _processes(status: dict[str, Any]) -> Table:
    rows = []
    for one in status.get("processes", []):
        worker, server = one["role"] == "worker", one.get("server")
        rows.append(
            (
                one["name"],
                one["state"] + (" (gone)" if one.get("gone") else ""),
                number(one["version"]) if one["role"] != "coordinator" else "",
                number(one["slices"]) if worker else "",
                number(one["samples"]) if worker else "",
                f"{size(server['bytes_pushed'])} in, {size(server['bytes_pulled'])} out" if server else "",
                one["address"],
                one["reason"],
            )
        )
    headings = ("name", "state", "version", "slices", "samples", "bytes", "address", "why")
    return Table(headings, rows, frozenset({2, 3, 4, 5}))


def _ledger(report: Report) -> Table:
    rows = []
    for name, epoch in _epochs(report):
        who = ", ".join(f"{name} {number(slices)}" for name, slices in sorted(epoch.workers.items()))
        counts = (epoch.samples, epoch.once, epoch.twice, epoch.never, epoch.skipped)
        rows.append((name, *map(number, counts), who))
    headings = ("epoch", "samples", "once", "twice", "never", "skipped", "slices by worker")
    return Table(headings, rows, frozenset(range(6)))


def _epochs(report: Report) -> list[tuple[str, LedgerEpoch]]:
    """The rows of the ledger: all epochs together, if not each has a row; then the epochs."""
    ledger = report.ledger
    if ledger is None:
        return []
    total = [("all", ledger.total)] if ledger.total and ledger.begun > len(ledger.epochs) else []
    return total + [(number(epoch.epoch + 1), epoch) for epoch in ledger.epochs]


def _counted(report: Report) -> str:
    ledger = report.ledger
    epochs = ([ledger.total] if ledger.total else ledger.epochs) if ledger else []
    twice, never = sum(epoch.twice for epoch in epochs), sum(epoch.never for epoch in epochs)
    if twice:
        return f"{count(twice, 'sample')} counted more than once: please report this."
    if never:
        return f"No sample counted twice in an epoch; {count(never, 'sample has', 'samples have')} not counted yet."
    return "Every sample counted exactly once in each epoch."


def _command(report: Report) -> str:
    values = {one.key: one.value for one in report.settings}
    try:
        args = ast.literal_eval(values.get("run.args") or "()")
        return shlex.join([values["run.script"], *args]) if values.get("run.script") else ""
    except (ValueError, SyntaxError, TypeError):
        return values.get("run.script", "")


def _result(summary: dict[str, Any], status: dict[str, Any]) -> Table:
    rows = []
    for name, title in (
        ("weights_sha256", "weights, sha256"),
        ("buffers_sha256", "buffers, sha256"),
        ("optimizer_sha256", "optimizer state, sha256"),
    ):
        if summary.get(name):
            rows.append((title, summary[name]))
    if checkpoint := summary.get("checkpoint") or status.get("checkpoint"):
        rows.append(("last checkpoint", checkpoint))
    if summary:
        rows.append(("samples that counted", number(summary.get("samples"))))
        rows.append(("contributions that counted", number(summary.get("contributions_applied"))))
        missed = summary.get("contributions_not_counted") or {}
        rows.append(("not counted", ", ".join(f"{number(many)} {why}" for why, many in missed.items()) or "0"))
        rows.append(("gradients pushed", size(summary.get("bytes_pushed", 0))))
        rows.append(("weights pulled", size(summary.get("bytes_pulled", 0))))
        if skipped := summary.get("steps_skipped"):
            rows.append(("steps skipped, not finite", number(skipped)))
    return Table(("what", "value"), rows)


def _settings(report: Report, wanted: Any) -> Table:
    rows = [(one.key, one.value, one.origin) for one in report.settings if wanted(one.origin)]
    return Table(("setting", "value", "from"), rows)


def _hosts(report: Report) -> list[tuple[str, str]]:
    hosts = [report.host] if report.host else []
    for process in report.status.get("processes", []):
        host = str(process.get("address", "")).rpartition(":")[0] or str(process.get("address", ""))
        if host and host not in hosts:
            hosts.append(host)
    return [("hosts", ", ".join(hosts))] if hosts else []
