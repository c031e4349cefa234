"""``paramserver dashboard``: the address of the page of a running job, and the token with which it takes commands."""

from __future__ import annotations

from paramserver.cli.target import NEAR, Where, find_target
from paramserver.errors import ConfigError


def dashboard(*, token: bool = False, where: Where = NEAR) -> int:
    """Print the address of the page of a running job, for a browser.

    Parameters
    ----------
    token
        Print the admin token instead, with which the page takes commands. Keep the token secret: it can stop the job.
    """
    target = find_target(where)
    if token:
        shown = target.security.admin.first()
        if not shown:
            raise ConfigError("no admin token is known here: say where the certificates and tokens are with --certs")
        print(shown)
        return 0
    address = target.status().dashboard
    if not address:
        raise ConfigError(
            "this job has no dashboard: it was started with --dashboard off, or without the extra packages"
        )
    print(address)
    return 0
