"""``paramserver dashboard``: the address of the page of a running job, and the token with which it takes commands."""

from __future__ import annotations

from paramserver.cli.common import tell
from paramserver.cli.target import NEAR, Where, find_target
from paramserver.errors import ConfigError, UnavailableError
from paramserver.machine.past import past_runs, told
from paramserver.web.tickets import page_link


def dashboard(*, token: bool = False, where: Where = NEAR) -> int:
    """Print a link to the page of a running job, for a browser. If reading takes a token, the link opens it once.

    Where no job runs, print the past runs of this machine instead: when, how each ended, and where its report is.

    Parameters
    ----------
    token
        Print the admin token instead, with which the page takes commands. Keep the token secret: it can stop the job.
    """
    try:
        target = find_target(where)
    except UnavailableError:
        runs = [] if token else past_runs(where.job)
        if not runs:
            raise
        job = f"job {where.job}" if where.job else "job"
        tell(f"No {job} runs on this machine now. Past runs, the newest first:")
        tell("\n".join(line for run in runs for line in told(run)))
        return 0
    if token:
        shown = target.security.admin.first()
        if not shown:
            raise ConfigError("no admin token is known here: say where the certificates and tokens are with --certs")
        tell(shown)
        return 0
    address = target.status().dashboard
    if not address:
        raise ConfigError(
            "this job has no dashboard: it was started with --dashboard off, or without the extra packages"
        )
    tell(page_link(address, target.security.join))
    return 0
