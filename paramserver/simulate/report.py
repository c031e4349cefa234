"""Outcomes as a short table, and as JSON."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict
from itertools import pairwise
from statistics import median
from typing import Any

from paramserver.simulate.compare import by_formula
from paramserver.simulate.costs import Costs
from paramserver.simulate.formulas import byteps_shares
from paramserver.simulate.machinery.blame import NOTHING, Part, between, largest
from paramserver.simulate.scenario import Outcome, Record, Scenario
from paramserver.simulate.suggest import Suggestion
from paramserver.simulate.units import short

_BAR = 30
# Rows of a histogram; neighbouring numbers share a row if there are more.
_ROWS = 12
_WIDTH = 22
# A difference that is smaller than this part does not count.
_WORTH_IT = 0.05


def table(scenario: Scenario, outcome: Outcome, batch: int = 0) -> list[str]:
    """The printed lines. ``batch``: samples in a slice; 0: not known."""
    lines = [_headline(scenario), ""]
    step = 1000 / outcome.steps_per_s
    name = "step" if scenario.sync else f"{scenario.slices} slices"
    lines.append(_row("steps/s" if scenario.sync else f"{scenario.slices} slices, per s", f"{outcome.steps_per_s:.4g}"))
    lines.append(_row("slices/s", f"{outcome.slices_per_s:.4g}"))
    if batch:
        lines.append(_row("samples/s", f"{outcome.slices_per_s * batch:.4g}"))
    parts = sorted(outcome.step_parts.items(), key=lambda item: -item[1])
    spent = ", ".join(f"{part} {_figure(1000 * seconds)}" for part, seconds in parts if 1000 * seconds >= 0.001 * step)
    lines.append(_row(f"{name}, ms", f"{_figure(step)}: {spent}"))
    lines.append(_row("what limits", f"{outcome.limit} ({_percent(outcome.step_parts[outcome.limit] * 1000 / step)})"))
    if scenario.sync:
        steps = sorted(outcome.limits.items(), key=lambda item: -item[1])
        lines.append(_row("steps limited by", ", ".join(f"{part} {_percent(share)}" for part, share in steps)))
    if scenario.sync and scenario.stragglers:
        worker, share = max(outcome.waited_for.items(), key=lambda item: item[1])
        lines.append(_row("came last", f"worker-{worker} in {_percent(share)} of the steps"))
    lines.append(_row("workers wait", f"{_percent(outcome.waiting)} of the time"))
    if scenario.sync and (outcome.moved or outcome.repeated):
        moved, repeated = _percent(outcome.moved), _percent(outcome.repeated)
        lines.append(_row("slices", f"{moved} computed by others than their owners, {repeated} twice"))
    if not scenario.sync:
        lines.append(_row("clocks apart", f"{outcome.max_clock_spread} slices at most"))
        lines += _histogram(outcome)
    return lines


def host_tier(outcome: Outcome, apart: Outcome) -> str:
    """Whether one push and one pull per host are faster. ``apart``: the outcome of pushes and pulls by each worker."""
    ratio = outcome.steps_per_s / apart.steps_per_s
    said = f"{apart.steps_per_s:.4g} steps/s if each worker pushed and pulled by itself"
    if ratio >= 1 + _WORTH_IT:
        return _row("once per host", f"{ratio:.2g} times as fast: {said}")
    how = "no faster" if ratio > 1 - _WORTH_IT else "slower"
    return _row("once per host", f'{how}: {said} (cluster.host_tier = "off")')


def events(record: Record) -> list[str]:
    """A table of the events at servers, with the time that workers waited for a version then."""
    usual = median(after - before for before, after in pairwise([0.0, *record.published_at]))
    lines = ["", f"{'at, s':>9}  event"]
    for one in record.happened:
        waited = wait_at(record, one.at_s) if one.event else None
        longer = f": {_figure(1000 * waited)} ms between two versions, mostly {_figure(1000 * usual)}" if waited else ""
        lines.append(f"{one.at_s:>9.2f}  {one.text}{longer}")
    lines.append(f"{record.again} contributions to shards were brought again to other servers")
    return lines


def wait_at(record: Record, at_s: float) -> float | None:
    """Seconds from the last version before this moment to the first version after it. None: no later version."""
    after = bisect_right(record.published_at, at_s)
    if after == len(record.published_at):
        return None
    return record.published_at[after] - (record.published_at[after - 1] if after else 0.0)


def suggestion(scenario: Scenario, found: Suggestion) -> list[str]:
    """Outcomes by number of servers, and the formulas for communication alone."""
    best = max(outcome.steps_per_s for outcome in found.outcomes.values())
    lines = ["", f"{'servers':>7}  {'beside workers':>14}  {'steps/s':>9}  {'of best':>7}  what limits"]
    for tried, outcome in found.outcomes.items():
        mark = "  <- enough" if tried == found.enough else ""
        of_best = _percent(outcome.steps_per_s / best)
        lines.append(
            f"{tried.alone:>7}  {tried.beside or '-':>14}  {outcome.steps_per_s:>9.4g}  {of_best:>7}  "
            f"{outcome.limit}{mark}"
        )
    schemes = by_formula(scenario).items()
    if scenario.hosts == 1 or not schemes:
        return lines
    lines += ["", "Communication alone, by formula, ms per step:"]
    lines += [f"  {_figure(1000 * seconds):>9}  {scheme}" for scheme, seconds in schemes]
    if scenario.workers > 1 and scenario.alone <= scenario.workers:
        server, worker = byteps_shares(scenario.workers, scenario.alone)
        lines.append(
            f"With the BytePS split a server alone would hold {_percent(server)} of the model, a worker's host "
            f"{_percent(worker)}."
        )
    return lines


def costs_table(costs: Costs) -> list[str]:
    """Costs as they are shown after a calibration."""
    lines = [
        _row("a call", f"{1000 * costs.call_s:.3g} ms, of which the server {1000 * costs.serve_s:.3g} ms"),
        _row("pushing", f"{costs.push_bytes_s / 1e9:.3g} GB/s"),
        _row("pulling", f"{costs.pull_bytes_s / 1e9:.3g} GB/s"),
        _row("taking in a gradient", f"{costs.sum_ns:.3g} ns per parameter"),
    ]
    return lines + [_row(f"applying {name}", f"{ns:.3g} ns per parameter") for name, ns in costs.apply_ns.items()]


def as_json(scenario: Scenario, outcome: Outcome, record: Record, found: Suggestion | None) -> dict[str, Any]:
    """The scenario, the outcome, each version, and the numbers of servers if they were asked for."""
    said = asdict(scenario)
    said["consistency"] = str(scenario.consistency)
    said["stragglers"] = [one.text for one in scenario.stragglers]
    chains = [NOTHING, *record.chains]
    versions = [
        {
            "at_s": at,
            "limited_by": _key(largest(between(before, after))),
            "last_worker": worker,
            **{f"{_key(part)}_s": between(before, after)[part] for part in Part},
        }
        for at, worker, before, after in zip(
            record.published_at, record.last_worker, chains[:-1], chains[1:], strict=True
        )
    ]
    result: dict[str, Any] = {"scenario": said, "outcome": _outcome(outcome), "versions": versions}
    result["events"] = [
        {"at_s": one.at_s, "text": one.text, "waited_s": wait_at(record, one.at_s) if one.event else None}
        for one in record.happened
    ]
    result["brought_again"] = record.again
    if found is not None:
        result["servers"] = [
            {"alone": tried.alone, "beside_workers": tried.beside, **_outcome(one)}
            for tried, one in found.outcomes.items()
        ]
        result["suggested"] = {"alone": found.enough.alone, "beside_workers": found.enough.beside}
        result["by_formula_s"] = by_formula(scenario)
    return result


def _outcome(outcome: Outcome) -> dict[str, Any]:
    said = asdict(outcome)
    for name in ("step_parts", "limits"):
        said[name] = {_key(part): value for part, value in said[name].items()}
    return {**said, "limit": _key(outcome.limit)}


def _key(part: Part) -> str:
    return part.name.lower()


def _headline(scenario: Scenario) -> str:
    many = f"{scenario.workers} workers, {scenario.servers} server{'s' if scenario.servers > 1 else ''}"
    size = f"{short(scenario.params)} parameters ({short(scenario.nbytes)}B)"
    many += (
        f", {scenario.replicas} backup{'s' if scenario.replicas > 1 else ''} of each shard" if scenario.replicas else ""
    )
    slices = f", {scenario.slices} slices per step" if scenario.sync else ""
    odd = "".join(f", {one.text}" for one in scenario.stragglers)
    return f"{many}, {size}, {_where(scenario)}, {scenario.consistency}{slices}{odd}"


def _where(scenario: Scenario) -> str:
    """The machines and their links."""
    beside = "a server beside each worker, " if scenario.with_server else ""
    cores = f" with {scenario.cores:g} cores" if scenario.cores else ""
    if scenario.hosts == 1:
        return f"one host{cores}, {'grpc' if scenario.transport == 'grpc' else 'shm'}"
    hosts = f"{scenario.hosts} hosts{cores}, " if scenario.hosts else f"hosts{cores}, " if cores else ""
    if scenario.workers_per_host > 1:
        hosts = f"{scenario.workers_per_host} workers per host{cores}, "
    return f"{beside}{hosts}{short(8 * scenario.bandwidth)}b/s"


def _histogram(outcome: Outcome) -> list[str]:
    """A histogram: updates of other workers between a slice's weights and its own update."""
    lines = ["", "updates of others between a slice's weights and its own update:"]
    numbers = sorted(outcome.behind)
    width = max(1, -(-(numbers[-1] - numbers[0] + 1) // _ROWS)) if numbers else 1
    rows: dict[int, float] = {}
    for number, share in outcome.behind.items():
        low = numbers[0] + (number - numbers[0]) // width * width
        rows[low] = rows.get(low, 0.0) + share
    most = max(rows.values(), default=1.0)
    for low, share in sorted(rows.items()):
        label = f"{low}" if width == 1 else f"{low}-{low + width - 1}"
        lines.append(f"{label:>9}  {_percent(share):>6}  {'#' * max(1, round(_BAR * share / most))}")
    return lines


def _row(name: str, value: str) -> str:
    return f"{name:<{_WIDTH}}{value}"


def _figure(value: float) -> str:
    """Three figures, or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"
