"""``paramserver certs``: make, renew and show the certificates of a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from paramserver.cli.common import shows, tell
from paramserver.cli.examples import example

app = App(name="certs", help="Make, renew and show the certificates and tokens of a cluster.")

UNHEALTHY_EXIT_CODE = 5


@app.command(help_epilogue=example("certs init"))
def init(
    directory: Path,
    /,
    *,
    days: Annotated[int, Parameter(show_default=True)] = 365,
    job: Annotated[str, shows("NAME")] = "",
) -> int:
    """Make a private certificate authority, a certificate for each role, and the tokens.

    Parameters
    ----------
    directory
        Where to put them: a new or empty directory.
    days
        How long the certificates of the roles are valid.
    job
        A name to write into the certificates, for people.
    """
    from paramserver.config import is_job_name
    from paramserver.errors import ConfigError
    from paramserver.pki import certs

    if job and not is_job_name(job):
        raise ConfigError(f'--job is "{job}", but must be up to 64 letters, digits, ".", "_" and "-"')
    certs.init(directory, days, job)
    tell(
        f"Made certificates and tokens in {directory}. Copy to each machine what its roles need, nothing else:\n"
        "  ca.crt, <role>.crt, <role>.key and join.token   for <role> coordinator, server or worker\n"
        "  admin.token as well                             for the coordinator\n"
        "  ca.crt, admin.crt, admin.key and both tokens    where people type set, drain, scale or stop, also on the\n"
        "                                                  coordinator's machine\n"
        "ca.key stays here: who has it can make certificates. Then name the directory in security.certs (--certs)."
    )
    return 0


@app.command(help_epilogue=example("certs renew"))
def renew(directory: Path, /, *, days: Annotated[int, Parameter(show_default=True)] = 365) -> int:
    """Make new certificates and keys for all roles, where ca.key is. Running processes take them when they are copied.

    Parameters
    ----------
    directory
        The directory that `certs init` made.
    days
        How long the new certificates are valid.
    """
    from paramserver.pki import certs

    certs.renew(directory, days)
    tell(f"Renewed the certificates of all roles in {directory}. Copy <role>.crt and <role>.key to their machines.")
    return 0


@app.command(help_epilogue=example("certs show"))
def show(directory: Path, /, *, json_: Annotated[bool, Parameter(name="--json")] = False) -> int:
    """Show the roles of the certificates in a directory, and how long the certificates are valid.

    The exit code is 5 if one has expired or expires within 7 days.

    Parameters
    ----------
    directory
        A directory with certificates.
    json_
        Print JSON instead.
    """
    from paramserver.pki import certs

    found = certs.show(directory)
    if json_:
        rows = [
            {
                **{name: getattr(one, name) for name in ("file", "role", "subject")},
                "valid_from": one.valid_from.isoformat(),
                "valid_until": one.valid_until.isoformat(),
                "days_left": round(one.days_left, 2),
                "well": one.well,
            }
            for one in found
        ]
        tell(json.dumps(rows, indent=2))
    else:
        for one in found:
            left = f"{one.days_left:.0f} days left" if one.days_left > 0 else "EXPIRED"
            warning = "" if one.well or one.days_left <= 0 else "  RENEW NOW: paramserver certs renew"
            span = f"{one.valid_from:%Y-%m-%d} to {one.valid_until:%Y-%m-%d %H:%M} UTC"
            tell(f"{one.role:<12} {span}  {left}{warning}  ({one.subject})")
    return 0 if all(one.well for one in found) else UNHEALTHY_EXIT_CODE
