"""Writes docs/reliability.md out of the results."""

from __future__ import annotations

import math
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tests.support.faults import cases
from tests.support.faults.runs import Outcome, Recovery

_WHEN = ("first", "second", "middle", "last")


def line(outcome: Outcome) -> str:
    """One case, for the terminal."""
    totals = [recovery.total_s for recovery in outcome.recoveries if recovery.total_s is not None]
    recovery = f", recovery {max(totals):.2f} s" if totals else ""
    detail = f": {outcome.detail}" if outcome.detail else ""
    return f"{outcome.verdict:12} {outcome.name}  ({outcome.seconds:.1f} s{recovery}){detail}"


def document(former: str, outcomes: Mapping[str, Outcome]) -> str:
    """The whole page: what people have written at its beginning stays, the results after it are written anew."""
    written, heading, _ = former.partition(f"{_MEASURED}\n")
    if not heading:
        raise ValueError(f"the page has no heading {_MEASURED!r}: put it where the results are to stand")
    return written + text(outcomes)


def text(outcomes: Mapping[str, Outcome]) -> str:
    """The results."""
    campaign = [o for o in outcomes.values() if o.name.startswith("campaign")]
    kills = [o for o in outcomes.values() if o.name.startswith("kills")]
    matrix = [o for o in outcomes.values() if o not in campaign and o not in kills]
    return "\n".join([*_HEAD, *_matrix(matrix), *_campaigns(campaign), *_kills(kills), *_copies(kills)]).rstrip() + "\n"


def _with_replicas(outcome: Outcome) -> bool:
    return "replicas" in outcome.name


_MEASURED = "## Faults on purpose"
_HEAD = f"""\
{_MEASURED}

`make test-faults` writes the rest of this page, in about an hour. Its cases are tests of `tests/faults`. In parts:

```
python -m tests.faults.matrix matrix --range 0:40
python -m tests.faults.matrix campaign --seed 1 --faults 200
python -m tests.faults.matrix campaign --seed 1 --faults 200 --replicas 1
python -m tests.faults.matrix kills --kills 50
python -m tests.faults.matrix kills_of_copies --kills 50
python -m pytest -n 3 tests/faults              # all, three at a time
python -m tests.faults.matrix document
```

Every case is a run of real processes: two servers, two workers, twelve steps of four slices, a checkpoint every
three steps. A case is "ok" if all of these hold:

- The planned fault struck, and the run ended with exit code 0.
- Weights, optimizer state and buffers are bit-identical to those of a run without faults.
- Every contribution counts exactly once.
- No process and no temporary file is left.

Asynchronous runs train a ledger, a tensor to which every sample that counts adds exactly 1. So their results can be
compared as well. In runs with replicas, each shard has one backup, and each worker writes down every version that it
computes with. A checker of its own (`tests/support/faults/history.py`) then looks at what all workers saw. A case is
"ok" only if each version had one content, no worker went back on one timeline, and nothing was seen that did not count
in the end. Recovery is the time from the kill to the next published version, the longest of the cases in a row.
Three cases ran at a time on two cores, so these times say little about speed. The last table is about speed.
""".splitlines()


def _matrix(outcomes: Sequence[Outcome]) -> list[str]:
    lines = ["", "### The crash matrix", ""]
    if not outcomes:
        return [*lines, "Not run."]
    order = {case.name: number for number, case in enumerate(cases.matrix())}
    outcomes = sorted(outcomes, key=lambda outcome: order.get(outcome.name, len(order)))
    lines += [" ".join(_how_many(outcomes, order, replicas) for replicas in (False, True)), ""]
    lines += [
        "| who is killed | at | first step | second | middle | last | recovery |",
        "|---|---|---|---|---|---|---|",
    ]
    for (who, place), row in _grouped(outcomes).items():
        cells = [_cell([outcome for outcome in row if outcome.when.startswith(when)]) for when in _WHEN]
        lines.append(f"| {who} | `{place}` | {' | '.join(cells)} | {_longest(row)} |")
    return lines


def _how_many(outcomes: Sequence[Outcome], names: Iterable[str], replicas: bool) -> str:
    """How many of the cases with or without replicas have been run, and what came of them."""
    verdicts = Counter(outcome.verdict for outcome in outcomes if _with_replicas(outcome) is replicas)
    all_of_them = sum(name.endswith("replicas") is replicas for name in names)
    found = ", ".join(f"{n} {verdict}" for verdict, n in verdicts.most_common()) or "none"
    head = f"{'With' if replicas else 'Without'} replicas, {verdicts.total()} of {all_of_them} cases have been run"
    return f"{head}: {found}."


def _grouped(outcomes: Iterable[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    rows: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        who = f"{outcome.who}, with replicas" if _with_replicas(outcome) else outcome.who
        rows.setdefault((who, outcome.place), []).append(outcome)
    return rows


def _cell(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return "–"
    bad = [outcome.verdict for outcome in outcomes if outcome.verdict != "ok"]
    text = ", ".join(sorted(set(bad))) or "ok"
    return f"{text} ({len(outcomes)})" if len(outcomes) > 1 else text


def _longest(outcomes: Iterable[Outcome]) -> str:
    totals = [r.total_s for outcome in outcomes for r in outcome.recoveries if r.total_s is not None]
    return f"{max(totals):.2f} s" if totals else "–"


def _campaigns(outcomes: Sequence[Outcome]) -> list[str]:
    lines = ["", "### Random campaigns", ""]
    if not outcomes:
        return [*lines, "Not run."]
    without = [outcome for outcome in outcomes if not _with_replicas(outcome)]
    copies = [outcome for outcome in outcomes if _with_replicas(outcome)]
    lines += _campaign("Without replicas", without) if without else []
    return [*lines, *([""] if without and copies else []), *(_campaign("With replicas", copies) if copies else [])]


def _campaign(which: str, outcomes: Sequence[Outcome]) -> list[str]:
    lines = []
    good = [outcome for outcome in outcomes if outcome.verdict == "ok"]
    lines.append(
        f"{which}: {len(outcomes)} runs, {sum(o.struck for o in outcomes)} faults that struck (kills, stops, delays, "
        "errors, and messages dropped, duplicated, delayed, reordered, cut): "
        f"{len(good)} runs ok, {len(outcomes) - len(good)} not. "
        f"{sum(o.duplicate for o in outcomes)} contributions arrived once more and changed nothing."
    )
    for outcome in outcomes:
        if outcome.verdict != "ok":
            lines.append(f"- {outcome.name}: {outcome.verdict}, {outcome.detail}")
    return lines


def _kills(outcomes: Sequence[Outcome]) -> list[str]:
    lines = ["", "### Recovery times", ""]
    outcomes = [outcome for outcome in outcomes if not _with_replicas(outcome)]
    if not outcomes:
        return [*lines, "Not run."]
    lines += [
        "Processes are killed again and again in a run of three workers whose slices take 20 ms, on "
        f"{os.cpu_count()} cores ({platform.machine()}). Detection is the time from the kill to the moment the "
        "coordinator acts on it. Repair is the time from there to the next published version. Total is the time from "
        "the kill to that version. Other workers take the slices of a lost worker as soon as they have nothing else to "
        "compute, often before the loss is noticed. Then repair is 0. A lost server is started again, which takes most "
        "of its time, and all processes go back to the last checkpoint.",
        "",
        "| killed | kills | | p50 | p95 | max |",
        "|---|---|---|---|---|---|",
    ]
    for role in ("worker", "server"):
        found = [r for o in outcomes if o.who == role for r in o.recoveries]
        lines += _rows(role, found)
    bad = [outcome for outcome in outcomes if outcome.verdict != "ok"]
    return [*lines, *(f"\n{outcome.name}: {outcome.verdict}, {outcome.detail}" for outcome in bad)]


def _copies(outcomes: Sequence[Outcome]) -> list[str]:
    lines = ["", "### Servers with replicas", ""]
    outcomes = [outcome for outcome in outcomes if _with_replicas(outcome)]
    if not outcomes:
        return [*lines, "Not run."]
    lines += [
        "Servers are killed at random moments in runs of two servers with one backup for each shard, three workers "
        "whose slices take 20 ms, and no checkpoints, so that there is nothing to go back to. A server is killed as "
        "soon as all shards have backups again. Detection is the time from the kill to the moment the coordinator "
        "decides that backups take the place of the server. Promotion is the time from there until a worker has a "
        "version, of all shards, that no worker had by then. Total is both. It contains the time in which that version "
        f"is computed, two slices of 20 ms. Measured on {os.cpu_count()} cores ({platform.machine()}).",
        "",
        "| mode | kills | | p50 | p95 | max |",
        "|---|---|---|---|---|---|",
    ]
    for mode in ("sync", "async"):
        runs = [outcome for outcome in outcomes if outcome.who.endswith(f", {mode}")]
        rows = _rows(mode, [recovery for outcome in runs for recovery in outcome.recoveries])
        lines += [row.replace("| repair |", "| promotion |") for row in rows]
    redone = sum(outcome.steps_redone for outcome in outcomes)
    back = sum(outcome.rollbacks for outcome in outcomes)
    struck = sum(outcome.struck for outcome in outcomes)
    good = sum(outcome.verdict == "ok" for outcome in outcomes)
    lines += [
        "",
        f"{len(outcomes)} runs with {struck} kills: {good} runs ok. The jobs went back {back} times, and {redone} "
        "steps were done again.",
    ]
    bad = [outcome for outcome in outcomes if outcome.verdict != "ok"]
    return [*lines, *(f"\n{outcome.name}: {outcome.verdict}, {outcome.detail}" for outcome in bad)]


def _rows(role: str, found: Sequence[Recovery]) -> list[str]:
    rows = []
    for what in ("detection_s", "repair_s", "total_s"):
        values = sorted(value for recovery in found if (value := getattr(recovery, what)) is not None)
        if values:
            cells = " | ".join(f"{_quantile(values, q):.2f} s" for q in (0.5, 0.95, 1.0))
            rows.append(f"| {role} | {len(values)} | {what.removesuffix('_s')} | {cells} |")
    return rows


def _quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not below this share of them."""
    return values[max(0, math.ceil(share * len(values)) - 1)]
