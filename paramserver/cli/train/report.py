"""``paramserver report``: what happened in a run, as one file."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

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

    Without files: of a running job. "paramserver run --report FILE" writes the report at the end by itself.

    Parameters
    ----------
    files
        Files of a run that has ended: an earlier report, or the summary and the records.
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
        from paramserver.report.files import read_files

        found = read_files(files)
    else:
        found = _ask(where)
    if output is None:
        print(rendered(found, format or "md"), end="")
        return 0
    write_report(output, found, "--output")
    print(f"report {output}")
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
