"""``paramserver doctor``: one line per check, with its remedy."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paramserver.cli.common import Address, Directory, Sets, merge_overrides, parse_assignments, tell
from paramserver.doctor import Finding, Level, Request, diagnose
from paramserver.logs import configure

if TYPE_CHECKING:
    from rich.console import RenderableType

_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARN: "yellow", Level.FAIL: "bold red"}


def doctor(
    *,
    json_: Annotated[bool, Parameter(name="--json")] = False,
    config: Path | None = None,
    coordinator: Address = None,
    certs: Directory = None,
    insecure: bool | None = None,
    set_: Sets = None,
) -> int:
    """Check this machine: software, settings, limits, certificates, and the ways to the coordinator and back.

    Exit code 0 if all is well, 1 if there is a warning or a failure. Notes do not count.

    Parameters
    ----------
    json_
        Print JSON: a list of check, level (ok, note, warn, fail), value, remedy.
    config
        The TOML file to read; otherwise PARAMSERVER_CONFIG, paramserver.toml or pyproject.toml.
    coordinator
        Address of the coordinator to ask, host:port.
    certs
        Directory with this machine's certificates and tokens.
    insecure
        Ask a coordinator on another machine without TLS.
    set_
        Any setting: section.key=value. May be repeated.
    """
    environ = dict(os.environ)  # before gRPC's own settings are added
    flags = {"cluster.coordinator": coordinator, "security.certs": certs, "security.insecure": insecure}
    overrides = merge_overrides(flags, parse_assignments(set_ or []))
    configure("error")
    findings = diagnose(Request(config, overrides, environ))
    if json_:
        tell(json.dumps([asdict(finding) for finding in findings], indent=2))
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(render(findings))
    else:
        tell("\n".join(lines(findings)))
    return 0 if all(finding.level.well for finding in findings) else 1


def lines(findings: Sequence[Finding]) -> list[str]:
    """The report for files and pipes: a line per check, a table below its line."""
    width = max((len(finding.check) for finding in findings), default=0)
    found = []
    for finding in findings:
        first, *others = finding.value.splitlines() or [""]
        remedy = f"  → {finding.remedy}" if finding.remedy else ""
        found.append(f"{finding.level:4}  {finding.check.ljust(width)}  {first}{remedy}")
        found += [" " * (width + 8) + other for other in others]
    return [*found, verdict(findings)]


def verdict(findings: Sequence[Finding]) -> str:
    """The last line."""
    failed, warned = (sum(finding.level is level for finding in findings) for level in (Level.FAIL, Level.WARN))
    if failed or warned:
        return f"{failed} failed, {warned} to be looked at, of {len(findings)} checks"
    return f"all is well: {len(findings)} checks"


def render(findings: Sequence[Finding]) -> RenderableType:
    """The report for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in ("", "check", "found", "what to do"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        level = Text(str(finding.level), style=_STYLES[finding.level])
        table.add_row(level, Text(finding.check), Text(finding.value), Text(finding.remedy))
    return Group(table, Text(verdict(findings)))
