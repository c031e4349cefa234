"""``paramserver status``: what a running job is doing, as a table or as JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

from cyclopts import Parameter

from paramserver.cli.common import tell
from paramserver.cli.look.facts import describe, render
from paramserver.cli.look.top import top
from paramserver.cli.target import NEAR, Target, Where, find_target
from paramserver.core.job.status import WELL
from paramserver.errors import ConfigError, UnavailableError

WATCH_INTERVAL_S = 1.0
UNHEALTHY_EXIT_CODE = 5


def status(
    *,
    json_: Annotated[bool, Parameter(name="--json")] = False,
    watch: bool = False,
    check: bool = False,
    where: Where = NEAR,
) -> int:
    """Show a running job: its mode, and who is at which version or clock.

    Parameters
    ----------
    json_
        Print JSON; with --watch one line per second, until the job ends.
    watch
        Show it on the whole terminal, as "paramserver top" does.
    check
        Exit with code 5 unless the job is training or done: not while it waits, is idle, degraded or stuck, nor if it
        has failed or was stopped.
    """
    if watch and check:
        raise ConfigError("--check looks once, and --watch goes on; give one of them")
    if watch and not json_:
        return top(where=where)
    target = find_target(where)
    if watch:
        return _print_until_the_end(target)
    facts = describe(target.status())
    if json_:
        tell(json.dumps(facts, indent=2))
    else:
        from rich.console import Console

        # Off a terminal nothing is cut: a file has room for long lines.
        console = Console() if sys.stdout.isatty() else Console(width=160)
        console.print(render(facts))
    return UNHEALTHY_EXIT_CODE if check and facts["state"] not in WELL else 0


def _print_until_the_end(target: Target) -> int:
    """Print a line of JSON every second until the job ends. Raises UnavailableError if no coordinator ever answers."""
    facts = describe(target.status())
    while True:
        tell(json.dumps(facts), flush=True)
        time.sleep(WATCH_INTERVAL_S)
        try:
            facts = describe(target.status())
        except UnavailableError:
            return 0
