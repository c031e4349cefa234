"""A report as one HTML file: no script, no address, every name escaped. Its data is in the file, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from paramserver.report import chart
from paramserver.report.data import Curve, CurvePoint, Report
from paramserver.report.text import count, number, seconds
from paramserver.report.view import Spent, Table, View, ordered, view_of

BADGES = {
    "done": "✔ done",
    "failed": "▲ failed",
    "stopped": "■ stopped",
    "interrupted": "■ interrupted",
    "running": "… running",
}
# Curves that are drawn, and processes that have a row in the drawing.
MAX_CHARTS = 24
MAX_LIVES = 24
_TABLE_ROWS = 20
# Of all curves together, so that the file stays small.
_POINTS = 10_000
_BEGIN, _END = '<script type="application/json" id="report">', "</script>"


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawn curve with its caption, and its points as a table."""

    title: str
    about: str
    svg: Markup
    table: Table


def html_of(report: Report) -> str:
    """The file. The same report gives the same text."""
    report = _small(report)
    view = view_of(report)
    charts = _charts(report, view)
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            view=view,
            report=report,
            badge=BADGES[view.kind],
            style=Markup(_style()),
            charts=charts,
            epochs=count(len(view.ledger.rows), "epoch"),
            defaults=count(len(view.defaults.rows), "setting with its default", "settings with their defaults"),
            drawn=len([one for one in charts if one.table.headings[0] == "step"]) == len(view.values.rows),
            lives=_lives(report, view),
            phases=_phases(view.spent),
            names=[name for name in chart_names(view.spent)],
            data=_embedded(report.model_dump(mode="json")),
        )
    )


def data_in(text: str) -> Any:
    """The data of a report that was written as HTML. Raises ValueError if it is none."""
    _, found, rest = text.partition(_BEGIN)
    if not found:
        raise ValueError("there is no report in it")
    return json.loads(rest.partition(_END)[0])


def _embedded(data: Any) -> Markup:
    """JSON that ends no element."""
    return Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026"))


@cache
def _environment() -> Environment:
    loader = PackageLoader("paramserver.report", ".")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


@cache
def _style() -> str:
    source, _, _ = PackageLoader("paramserver.report", ".").get_source(Environment(), "page.css")
    return source


def _small(report: Report) -> Report:
    """The report with fewer points if it has many curves."""
    drawn = ordered(report.curves)
    most = max(50, _POINTS // max(1, len(drawn)))
    return report.model_copy(update={"curves": [Curve(name=c.name, points=_some(c.points, most)) for c in drawn]})


def _some(points: list[CurvePoint], most: int) -> list[CurvePoint]:
    stride = -(-len(points) // most)
    return points[:1] + points[1:][(len(points) - 2) % stride :: stride] if len(points) > 2 else points


# ---- drawings


def _charts(report: Report, view: View) -> list[Chart]:
    charts = []
    by_step = [chart.Line(mark.event.version, str(mark.number), mark.event.text) for mark in view.marks]
    for one in ordered(report.curves)[:MAX_CHARTS]:
        points = [(float(point.step), point.value) for point in one.points]
        about = f"{number(points[0][1])} at step {number(one.points[0].step)}"
        about += f", {number(points[-1][1])} at step {number(one.points[-1].step)}"
        rows = [(number(point.step), number(point.value)) for point in _rows(one.points)]
        drawn = chart.curve(points, "step", by_step)
        if drawn:
            charts.append(Chart(one.name, about, drawn, Table(("step", one.name), rows, frozenset({0, 1}))))
    moments = report.moments
    if len(moments) > 2:
        by_time = [chart.Line(mark.event.at_s - view.begun_s, str(mark.number), mark.event.text) for mark in view.marks]
        drawn = chart.curve([(m.at_s - view.begun_s, m.samples_per_s) for m in moments], "seconds", by_time, zero=True)
        speeds = [
            (f"+{one.at_s - view.begun_s:.1f} s", number(one.version), number(round(one.samples_per_s)))
            for one in _rows(moments)
        ]
        table = Table(("time", "version", "samples/s"), speeds, frozenset({0, 1, 2}))
        fastest = max(one.samples_per_s for one in moments)
        about = f"over time, all workers together; at most {number(round(fastest))}"
        charts.append(Chart("samples per second", about, drawn, table))
    return charts


def _rows(points: Sequence[Any]) -> list[Any]:
    """Evenly spread, the first and the last one among them."""
    if len(points) <= _TABLE_ROWS:
        return list(points)
    return [points[round(place * (len(points) - 1) / (_TABLE_ROWS - 1))] for place in range(_TABLE_ROWS)]


def _lives(report: Report, view: View) -> Markup:
    """A row for each process: bars from its joins to its ends, and a cross where it was lost."""
    subjects = [event.subject for event in report.events if event.subject]
    known = [one["name"] for one in report.status.get("processes", []) if one["role"] != "coordinator"]
    names = sorted({*subjects, *known}, key=_by_role)
    eventful = sorted(names, key=lambda name: subjects.count(name) < 2)
    shown = [name for name in names if name in eventful[:MAX_LIVES]]
    end_s = report.made_at_s if report.outcome.kind == "running" else _last(report)
    numbers = {mark.event: str(mark.number) for mark in view.marks}
    rows = []
    for name in shown:
        bars: list[chart.Bar] = []
        crosses: list[chart.Line] = []
        since: float | None = None if name in subjects and _first_kind(report, name) == "joined" else 0.0
        for event in report.events:
            if event.subject != name:
                continue
            at = event.at_s - view.begun_s
            if event.kind == "joined":
                since = at
            elif event.kind in ("left", "lost"):
                if since is not None:
                    bars.append(chart.Bar(since, at, "alive", f"{name}: {seconds(at - since)}"))
                since = None
            if event.kind == "lost":
                crosses.append(chart.Line(at, numbers.get(event, ""), event.text))
        if since is not None:
            bars.append(chart.Bar(since, end_s - view.begun_s, "alive", name))
        rows.append(chart.Row(name, bars, crosses))
    return chart.bars(rows, end_s - view.begun_s, "s") if report.events else Markup("")


def _first_kind(report: Report, name: str) -> str:
    return next(event.kind for event in report.events if event.subject == name)


def _last(report: Report) -> float:
    known = [event.at_s for event in report.events] + [one.at_s for one in report.moments]
    return max(known, default=report.made_at_s)


def _by_role(name: str) -> tuple[str, int, str]:
    role, _, index = name.rpartition("-")
    return (role, int(index) if index.isdigit() else 0, name)


def chart_names(spent: Sequence[Spent]) -> list[str]:
    """The phases that some worker has, in the order of a step."""
    return list(dict.fromkeys(name for one in spent for name in one.phases))


def _phases(spent: Sequence[Spent]) -> Markup:
    rows = []
    for one in spent:
        bars, at = [], 0.0
        for name, taken in one.phases.items():
            bars.append(chart.Bar(at, at + taken, name, f"{one.worker}: {name} {seconds(taken)}"))
            at += taken
        rows.append(chart.Row(one.worker, bars))
    return chart.bars(rows, max((one.all for one in spent), default=0.0), "s")
