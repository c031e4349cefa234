"""A report from files of a run that has ended: an earlier report, its summary, its records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paramserver import errors
from paramserver.records import file as records
from paramserver.report import outcome
from paramserver.report.data import FORMAT, Curve, CurvePoint, Report
from paramserver.report.html import data_in

_KINDS = "a report, a summary (run --summary) or a file of records (run --records)"


def read_two(paths: Sequence[Path]) -> tuple[Report, Report] | None:
    """Two runs to compare: two reports, or two summaries. None: the files are those of one run. Raises UserError."""
    if len(paths) != 2:
        return None
    found = [_read(path) for path in paths]
    if not all(isinstance(one, Report) for one in found) and not all(isinstance(one, dict) for one in found):
        return None
    return read_files(paths[:1]), read_files(paths[1:])


def read_files(paths: Sequence[Path]) -> Report:
    """One report of all files. Raises UserError for a file that is none of the three kinds, or a second of its kind."""
    summary: dict[str, Any] | None = None
    curves: list[Curve] | None = None
    for path in paths:
        found = _read(path)
        if isinstance(found, Report):
            if len(paths) > 1:
                raise errors.UserError(f"{path} is a whole report: give it alone, or two reports to compare two runs")
            return found
        if isinstance(found, dict):
            if summary is not None:
                raise errors.UserError(f"{path} is a second summary: give one")
            summary = found
        else:
            if curves is not None:
                raise errors.UserError(f"{path} is a second file of records: give one")
            curves = found
    if summary is None:
        raise errors.UserError(f"a file of records does not say how the run ended: give its summary, too ({_KINDS})")
    missing = ["Processes, events, ledger and settings: summary and records do not have them; run --report does."]
    if curves is None:
        missing.append("Curves: no file of records was given.")
    return Report(
        job=summary["job"],
        made_at_s=max(path.stat().st_mtime for path in paths),
        outcome=outcome.finished(summary),
        summary=summary,
        curves=curves or [],
        missing=missing,
    )


def _read(path: Path) -> Report | dict[str, Any] | list[Curve]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise errors.UserError(f"{path} cannot be read: {reason}") from error
    if text.startswith('{"paramserver": "records '):
        return _curves(path)
    try:
        data = json.loads(text) if text.lstrip().startswith("{") else data_in(text)
    except ValueError as error:
        raise errors.UserError(f"{path} is neither {_KINDS}") from error
    if isinstance(data, dict) and "weights_sha256" in data and "broken_promises" in data:
        return data
    try:
        return Report.model_validate(data)
    except ValidationError as error:
        if isinstance(data, dict) and str(data.get("paramserver", "")).startswith(FORMAT[:-1]):
            raise errors.UserError(f"{path} was written by another version of paramserver: use that version") from error
        raise errors.UserError(f"{path} is neither {_KINDS}") from error


def _curves(path: Path) -> list[Curve]:
    found: dict[str, list[CurvePoint]] = {}
    for step in records.read(path):
        for name, value in step.values.items():
            found.setdefault(name, []).append(CurvePoint(step=step.step, at_s=0.0, value=value))
    return [Curve(name=name, points=points) for name, points in sorted(found.items())]
