"""A report, or two side by side, as Markdown, short enough for a pull request.

Names of the run cannot become markup, links or mentions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from paramserver.core.records.sparkline import sparkline
from paramserver.report.data import Report
from paramserver.report.html import BADGES
from paramserver.report.text import count, number
from paramserver.report.view import NOTABLE, Table, ordered, view_of

_MAX_ROWS = 40
_MAX_CURVES = 24
_SPARKS = 32
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "#": "&#35;"}
_SPECIAL = re.compile(r"[\\`*\[\]|~$&<>@#]|(?<!\w)_|_(?!\w)")


def escape(text: str) -> str:
    """Text that Markdown shows as it is, in one line.

    >>> escape("a|b *c* <img> @all samples_per_s")
    'a\\\\|b \\\\*c\\\\* &lt;img&gt; &#64;all samples_per_s'
    """
    return _SPECIAL.sub(lambda found: _ENTITIES.get(found[0], f"\\{found[0]}"), " ".join(text.split()))


def markdown_of(report: Report) -> str:
    """The text. The same report gives the same text."""
    view = view_of(report)
    lines = [f"## {escape(view.title)}: {BADGES[view.kind]}", "", escape(view.sentence), "", escape(view.when)]
    lines += ["", f"Script: {escape(view.command)}"] if view.command else []
    lines += _list("Why", view.problems)
    for one in report.output:
        quoted = [line.replace("`", "'") for line in one.lines]
        lines += ["", f"### The last lines of {escape(one.name)}", "", "```text", *quoted, "```"]
    facts = Table(tuple(name for name, _ in view.facts), [tuple(value for _, value in view.facts)])
    lines += ["", *_table(facts)] if view.facts else []
    lines += _list("Faults and recoveries", view.story)
    notable = [row for row in view.events.rows if row[3] in NOTABLE]
    if notable:
        lines += ["", *_table(Table(view.events.headings, notable, view.events.numeric))]
    curves = {curve.name: _spark([point.value for point in curve.points]) for curve in ordered(report.curves)}
    if view.values.rows:
        rows = [(row[0], curves[row[0]], *row[1:]) for row in view.values.rows[:_MAX_CURVES]]
        headings = (view.values.headings[0], "curve", *view.values.headings[1:])
        lines += _section("Values", Table(headings, rows, frozenset(range(2, 7))))
    lines += _list("Where the time went", view.blame)
    if view.spent:
        lines += ["" if view.blame else "\n### Where the time went\n", *_table(view.spent_table)]
    lines += _section("The steps that waited longest", view.worst)
    lines += [*_list("Ledger", [view.counted]), "", *_table(view.ledger)] if view.ledger.rows else []
    lines += _section("Result", view.result)
    lines += _section("Settings that are not the default", view.changed)
    lines += _folded("Processes", view.processes)
    lines += _folded("Versions", view.versions)
    lines += _list("Missing", view.notes)
    return "\n".join(lines) + "\n"


def comparison_of(one: Report, other: Report, names: tuple[str, str]) -> str:
    """Two runs side by side: facts, values, bits, and the settings and versions that differ."""
    runs = (one, other)
    lines = [f"## {escape(names[0])} and {escape(names[1])}", ""]
    lines += [f"- {escape(name)}: {escape(run.outcome.sentence)}" for name, run in zip(names, runs, strict=True)]
    facts = [dict(view_of(run).facts) | _numbers(run) for run in runs]
    ordinary = [key for key in dict.fromkeys((*facts[0], *facts[1])) if key not in _last(one) | _last(other)]
    lines += _section("Facts", _beside("", ordinary, facts, names))
    points = [{curve.name: [point.value for point in curve.points] for curve in ordered(run.curves)} for run in runs]
    ends = [_last(run) for run in runs]
    rows = []
    for name in dict.fromkeys((*points[0], *points[1])):
        values = [each.get(name) for each in ends]
        change = number(values[1] - values[0]) if values[0] is not None and values[1] is not None else ""
        curves = (_spark(each[name]) if name in each else "" for each in points)
        rows.append((name, *curves, *map(number, values), change))
    headings = ("value", *(f"curve of {name}" for name in names), *(f"last of {name}" for name in names), "change")
    lines += _section("Values", Table(headings, rows, frozenset({3, 4, 5})))
    digests = [run.summary.get("weights_sha256") for run in runs]
    if all(digests):
        lines += _list("Result", [f"The weights {'have the same bits' if digests[0] == digests[1] else 'differ'}."])
    settings = [{setting.key: setting.value for setting in run.settings} for run in runs]
    lines += _section("Settings that differ", _differing("setting", settings, names))
    if not all(settings):
        lines += _list("Missing", ["Settings: a summary does not have them; run --report does."])
    lines += _section("Versions that differ", _differing("package", [one.versions, other.versions], names))
    return "\n".join(lines) + "\n"


def _numbers(run: Report) -> dict[str, str]:
    """Facts that matter beside another run, and go without saying in a report of one."""
    known = run.summary or run.status
    wanted = ("samples", "rollbacks", "steps_redone")
    return {key: number(known[key]) for key in wanted if known.get(key) is not None}


def _last(run: Report) -> dict[str, float]:
    return {curve.name: curve.points[-1].value for curve in ordered(run.curves)}


def _beside(title: str, keys: Iterable[str], pair: Sequence[Mapping[str, str]], names: tuple[str, str]) -> Table:
    return Table((title, *names), [(key, *(each.get(key, "") for each in pair)) for key in keys])


def _differing(title: str, pair: Sequence[Mapping[str, str]], names: tuple[str, str]) -> Table:
    one, other = pair
    keys = [key for key in dict.fromkeys((*one, *other)) if one.get(key) != other.get(key)] if one and other else []
    return _beside(title, keys, pair, names)


def _spark(values: Sequence[float]) -> str:
    if len(values) > _SPARKS:
        values = [values[round(place * (len(values) - 1) / (_SPARKS - 1))] for place in range(_SPARKS)]
    return sparkline(values)


def _list(title: str, sentences: Sequence[str]) -> list[str]:
    return ["", f"### {title}", "", *(f"- {escape(sentence)}" for sentence in sentences)] if sentences else []


def _section(title: str, table: Table) -> list[str]:
    return ["", f"### {title}", "", *_table(table)] if table.rows else []


def _folded(title: str, table: Table) -> list[str]:
    if not table.rows:
        return []
    return ["", f"<details><summary>{title}</summary>", "", *_table(table), "", "</details>"]


def _table(table: Table) -> list[str]:
    rules = ["--:" if place in table.numeric else "---" for place in range(len(table.headings))]
    lines = [_row(table.headings), f"| {' | '.join(rules)} |", *(_row(row) for row in table.rows[:_MAX_ROWS])]
    if len(table.rows) > _MAX_ROWS:
        lines += ["", f"… and {count(len(table.rows) - _MAX_ROWS, 'more row')}"]
    return lines


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(escape(cell) for cell in cells)} |"
