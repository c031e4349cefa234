"""The certificates, keys and tokens of this machine: there, private, fitting, and not about to expire."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

from paramserver.config import Settings
from paramserver.doctor.finding import Finding, Level, sentence
from paramserver.errors import ConfigError

SOON_DAYS = 14
MAKE = "paramserver certs init, and copy the files for the roles of this machine"
RENEW = "paramserver certs renew where ca.key is, and copy the files here"
_ROLES = ("coordinator", "server", "worker", "admin")
_DATES = "correct this machine's clock, or make new certificates: paramserver certs renew"


def check_certificates(directory: Path | None, now: datetime) -> list[Finding]:
    """A line for the authority and for each role that has files here. ``now`` is the time in UTC."""
    if directory is None:
        return [Finding("certificates", Level.NOTE, "none configured: no TLS")]
    if not directory.is_dir():
        return [Finding("certificates", Level.FAIL, f"directory {directory} does not exist", MAKE)]
    findings = [_authority(directory, now)]
    complete = [role for role in _ROLES if (directory / f"{role}.key").exists()]
    findings += [_role(directory, role, now) for role in complete]
    if not complete:
        findings.append(Finding("certificates", Level.FAIL, f"no role has a key in {directory}", MAKE))
    if (directory / "ca.key").exists():
        findings.append(_authority_key(directory / "ca.key"))
    return findings


def _authority(directory: Path, now: datetime) -> Finding:
    from cryptography import x509

    path = directory / "ca.crt"
    try:
        authorities = x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        value = f"{path} cannot be read ({(error.strerror or 'error').lower()})"
        return Finding("certificate ca", Level.FAIL, value, MAKE)
    except ValueError:
        return Finding("certificate ca", Level.FAIL, f"{path} is no certificate", MAKE)
    last = max(authorities, key=lambda one: one.not_valid_after_utc)
    return check_dates("certificate ca", last.not_valid_before_utc, last.not_valid_after_utc, now)


def _role(directory: Path, role: str, now: datetime) -> Finding:
    from paramserver.transport.security.tls import Certificates

    try:
        identity = Certificates(directory, role).current()
    except ConfigError as error:
        return sentence(f"certificate {role}", Level.FAIL, str(error), MAKE)
    return check_dates(f"certificate {role}", identity.not_before, identity.not_after, now)


def check_dates(check: str, not_before: datetime, not_after: datetime, now: datetime) -> Finding:
    """Whether a certificate is valid now, and for some time to come."""
    if now >= not_after:
        return Finding(check, Level.FAIL, f"expired on {not_after:%Y-%m-%d %H:%M} UTC", RENEW)
    if now < not_before:
        return Finding(check, Level.FAIL, f"not valid before {not_before:%Y-%m-%d %H:%M} UTC", _DATES)
    left = not_after - now
    value = f"valid until {not_after:%Y-%m-%d}, {left.days} days"
    if left < timedelta(days=SOON_DAYS):
        return Finding(check, Level.WARN, value, RENEW)
    return Finding(check, Level.OK, value)


def _authority_key(path: Path) -> Finding:
    from paramserver.transport.security.files import read_secret

    try:
        read_secret(path, "key")
    except ConfigError as error:
        return sentence("ca.key", Level.FAIL, str(error), "keep it on one machine only")
    remedy = "keep it only where certificates are made: its owner can join any job of this authority"
    return Finding("ca.key", Level.NOTE, "the authority's key is on this machine", remedy)


def check_tokens(settings: Settings) -> list[Finding]:
    """The token of the members, and that of the operators: present and private. Their text is never shown."""
    security = settings.security
    directory = Path(security.certs) if security.certs else None
    missing = "" if directory is None else "every member needs a join token beside its certificate"
    return [
        _token("join token", bool(security.token), security.token_file, directory, "join.token", missing),
        _token("admin token", bool(security.admin_token), security.admin_token_file, directory, "admin.token", ""),
    ]


def _token(check: str, in_environment: bool, named: str, directory: Path | None, usual: str, needed: str) -> Finding:
    from paramserver.transport.security.tokens import Tokens

    if in_environment:
        return Finding(check, Level.OK, "from the environment")
    path = Path(named) if named else directory / usual if directory and (directory / usual).exists() else None
    if path is None:
        if needed:
            remedy = f"copy {usual} from where the certificates were made, or set security.token_file"
            return Finding(check, Level.FAIL, f"none: {needed}", remedy)
        where = "needed for set, drain and stop" if check.startswith("admin") else "needed beyond this machine"
        return Finding(check, Level.NOTE, f"none here: {where}")
    try:
        Tokens(path=path)
    except ConfigError as error:
        return sentence(check, Level.FAIL, str(error), "write a new token into it")
    return Finding(check, Level.OK, f"{path}, private")
