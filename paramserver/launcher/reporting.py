"""The report of a run: what the launcher hears is kept, and written at the end, however the run ends."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paramserver import errors
from paramserver.config import Settings
from paramserver.core.job.status import result_of
from paramserver.machine.past import PastRun, keep_run
from paramserver.membership.joining import versions
from paramserver.processes.lines import plain
from paramserver.processes.logfiles import Reader
from paramserver.report import outcome
from paramserver.report.asking import ask_all
from paramserver.report.data import Outcome, Output, Report
from paramserver.report.keeper import Keeper
from paramserver.report.secrets import hidden, secrets_of, without
from paramserver.report.writing import write_report
from paramserver.transport.base import Channel
from paramserver.v1 import coordinator_pb2

_CALL_S = 10.0
# Exit codes of runs that somebody has ended.
_STOPPED = (129, 130, 143)
# Of a process that failed.
_LINES = 30


class Reporting:
    """Does nothing if no report is wanted. ``secrets``: texts that it hides, beside those of the settings."""

    def __init__(self, settings: Settings, secrets: Iterable[str] = ()) -> None:
        self.path = Path(settings.run.report) if settings.run.report else None
        self._job = settings.cluster.job
        self._secrets = [*secrets_of(settings), *secrets]
        self._keeper = Keeper()
        self._began_s = time.time()
        # The report was written, or cannot be written.
        self._over = False

    @property
    def wanted(self) -> bool:
        """Whether a report is still to be written."""
        return self.path is not None and not self._over

    def request(self) -> coordinator_pb2.StatusRequest:
        """The question to the coordinator whose answers are to be heard."""
        return self._keeper.request() if self.path is not None else coordinator_pb2.StatusRequest()

    def hear(self, status: coordinator_pb2.StatusResponse) -> None:
        """The answer of a coordinator that leads."""
        if self.path is not None:
            self._keeper.hear(status)

    async def finished(self, summary: Mapping[str, Any], code: int, channel: Channel) -> str:
        """The result was gathered. Returns a line for people; "" if no report is wanted. Raises UserError."""
        return await self._write(outcome.finished(summary, code), channel, _CALL_S, summary)

    async def untrained(self, broken: Sequence[str], channel: Channel) -> str:
        """The script has ended without training. ``broken``: promises. Otherwise as :meth:`finished`."""
        return await self._write(outcome.without_training(broken), channel, _CALL_S)

    async def broken_off(
        self, code: int, why: str, channel: Channel | None, logs: Path, failed: Iterable[str], hurry_s: float = _CALL_S
    ) -> str:
        """The run ends without a result. ``failed``: processes whose last lines in ``logs`` say why.

        Returns a line for people. Raises UserError.
        """
        output = [Output(name=name, lines=lines) for name in failed if (lines := _last_lines(logs, name))]
        return await self._write(outcome.broken_off(code, why), channel, hurry_s, output=output)

    async def tell(self, code: int, lines: Sequence[str], channel: Channel | None, timeout_s: float) -> None:
        """Say how the run has ended: to the page, by way of the coordinator, and to the list of past runs."""
        stopped = code in _STOPPED or (not code and bool(lines) and lines[0].startswith("stopped: "))
        state = "stopped" if stopped else "failed" if code else "done"
        if channel is not None:
            with suppress(errors.ParamServerError):
                request = coordinator_pb2.StopRequest(state=state, said=lines)
                await channel.call("Coordinator.Stop", request, timeout=timeout_s)
        with suppress(OSError):  # somebody has removed the working directory
            command, result = hidden([shlex.join(["paramserver", *sys.argv[1:]]), result_of(lines)], self._secrets)
            run = PastRun(
                name=self._job,
                began_s=self._began_s,
                ended_s=time.time(),
                command=command,
                directory=os.getcwd(),
                code=code,
                result=f"{state}: {result}" if result else state,
                report=str(self.path.absolute()) if self.path is not None and self.path.is_file() else "",
            )
            keep_run(run)

    async def _write(
        self,
        how: Outcome,
        channel: Channel | None,
        timeout_s: float,
        summary: Mapping[str, Any] | None = None,
        output: Iterable[Output] = (),
    ) -> str:
        if self.path is None or self._over:
            return ""
        self._over = True
        if channel is not None:
            with suppress(errors.ParamServerError):  # then the report has what was heard before
                await ask_all(channel, self._keeper, timeout_s)
        found = self._keeper.report(
            Report(job=self._job, made_at_s=time.time(), outcome=how, summary=dict(summary or {}), output=list(output))
        )
        if not found.status:
            changes = {"versions": dict(versions()), "missing": ["Everything else: no coordinator has ever answered."]}
            found = found.model_copy(update=changes)
        write_report(self.path, without(found, self._secrets))
        return f"report {self.path}"


def _last_lines(logs: Path, name: str) -> list[str]:
    reader = Reader(logs, name)
    try:
        return [plain(line.text) for line in reader.lines()][-_LINES:]
    finally:
        reader.close()
