"""``paramserver report``: what happened in a run, as one file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from paramserver.cli.common import tell
from paramserver.cli.target import NEAR, Where, find_target
from paramserver.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from paramserver.report.data import Report

_CALL_S = 30.0


def report(
    *files: Path,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    format: Literal["html", "md", "json"] | None = None,
    where: Where = NEAR,
) -> int:
    """Tell what happened in a run: curves, where the time went, faults, ledger, digests, settings, versions.

    Without files: of a running job. "paramserver run --report FILE" writes the report at the end by itself. Two
    reports, or two summaries: compare the runs.

    Parameters
    ----------
    files
        Files of a run that has ended: an earlier report, or the summary and the records. Reports (.html, .json) or
        summaries of two runs: a comparison, as Markdown.
    output
        Write to this file: .html (one page to read offline), .md (for a pull request) or .json. Print it otherwise.
    format
        What to print without --output: "md" if not given.
    """
    from paramserver.report.writing import check_report, rendered, write_report

    if output is not None:
        if format is not None:
            raise ConfigError("--output has a suffix that says the format: leave --format out")
        check_report(output, "--output")
    if files and where != NEAR:
        raise ConfigError("files and a running job are both named; give one of them")
    if files:
        from paramserver.report.files import read_files, read_two

        if (two := read_two(files)) is not None:
            return _compare(two, files, output, format)
        found = read_files(files)
    else:
        found = _ask(where)
    if output is None:
        tell(rendered(found, format or "md"), end="")
        return 0
    write_report(output, found, "--output")
    tell(f"report {output}")
    return 0


def _compare(two: tuple[Report, Report], files: Sequence[Path], output: Path | None, format: str | None) -> int:
    """Print or write a comparison of two runs. Raises ConfigError for a format other than Markdown."""
    from paramserver.report.writing import compared, format_of, write_text

    if (format or "md") != "md" or (output is not None and format_of(output, "--output") != "md"):
        raise ConfigError("two runs are compared as Markdown: leave --format out, or name a file that ends with .md")
    names = [one.job for one in two]
    if names[0] == names[1]:
        names = [str(file) for file in files]
    text = compared(*two, (names[0], names[1]))
    if output is None:
        tell(text, end="")
        return 0
    write_text(output, text, "--output")
    tell(f"report {output}")
    return 0


def _ask(where: Where) -> Report:
    """The report of a running job. Raises UnavailableError if no coordinator leads it."""
    from paramserver.report import outcome
    from paramserver.report.data import Outcome, Report
    from paramserver.report.keeper import Keeper
    from paramserver.v1 import coordinator_pb2

    target, keeper = find_target(where), Keeper()
    status = target.call("Coordinator.Status", keeper.request(whole=True), _CALL_S)
    assert isinstance(status, coordinator_pb2.StatusResponse)
    if not status.term:
        raise UnavailableError(f"no coordinator leads job {status.job}: {status.reason}")
    keeper.hear(status)
    with suppress(UnavailableError):  # nothing has been counted
        accounts = target.call("Coordinator.Ledger", coordinator_pb2.AccountsRequest(), _CALL_S)
        assert isinstance(accounts, coordinator_pb2.AccountsResponse)
        keeper.hear_ledger(accounts)
    found = keeper.report(Report(job="", made_at_s=time.time(), outcome=Outcome(kind="running", sentence="")))
    how = outcome.finished(found.summary) if found.summary else outcome.running(found.status)
    return found.model_copy(update={"outcome": how})
