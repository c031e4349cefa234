"""A report as Markdown, short enough for a pull request. Names of the run cannot become markup, links or mentions."""

from __future__ import annotations

import re
from collections.abc import Sequence

from paramserver.core.records.sparkline import sparkline
from paramserver.report.data import Report
from paramserver.report.html import BADGES
from paramserver.report.text import count
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
