"""A private certificate authority for one cluster: a certificate per role, and the tokens. All in one directory."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramserver.errors import ConfigError
from paramserver.transport.security.files import read, read_secret
from paramserver.transport.security.policy import ADMIN, COORDINATOR, SERVER, WORKER
from paramserver.transport.security.tls import WARN_DAYS, role_uri, server_name

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, Name

CA = "ca"
ISSUED = (COORDINATOR, SERVER, WORKER, ADMIN)
JOIN_TOKEN = "join.token"
ADMIN_TOKEN = "admin.token"
DAYS = 365
MAX_DAYS = 3650
# The authority outlives the certificates that it issues: a new authority means new files on every machine.
_CA_DAYS = 3650
# Clocks differ a little.
_BACKDATED = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Shown:
    """One certificate, for people."""

    file: str
    role: str
    subject: str
    valid_from: datetime
    valid_until: datetime
    days_left: float

    @property
    def well(self) -> bool:
        """Whether the certificate is valid now, and for more than a week."""
        return self.valid_from <= datetime.now(UTC) and self.days_left > WARN_DAYS


def init(directory: Path, days: int = DAYS, job: str = "", now: datetime | None = None) -> None:
    """Make an authority, certificates that are valid for ``days``, and tokens. ``job`` goes into the names.

    Raises ConfigError if the directory is not empty, or cannot be written to.
    """
    _check_days(days)
    now = now or datetime.now(UTC)
    with _writing(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise ConfigError(
                f'directory "{directory}" is not empty, and is not overwritten: name another directory, or renew '
                "its certificates with `paramserver certs renew`"
            )
        directory.chmod(0o700)
        key, name = _new_key(), _name("certificate authority", job)
        authority = _certify(name, name, key, key, now, now + timedelta(days=_CA_DAYS), role="")
        replace_file(directory / "ca.key", _key_pem(key), 0o600)
        replace_file(directory / "ca.crt", _pem(authority), 0o644)
        for role in ISSUED:
            _issue(directory, role, _name(role, job), authority, key, now, days)
        for file in (JOIN_TOKEN, ADMIN_TOKEN):
            replace_file(directory / file, f"{secrets.token_urlsafe(32)}\n".encode(), 0o600)


def renew(directory: Path, days: int = DAYS, now: datetime | None = None) -> None:
    """New keys and certificates for all roles, from the authority that is there. Tokens stay.

    Raises ConfigError if ``ca.key`` is not there or does not fit, or if nothing can be written.
    """
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509 import load_pem_x509_certificate
    from cryptography.x509.oid import NameOID

    _check_days(days)
    now = now or datetime.now(UTC)
    if not (directory / "ca.key").is_file():
        raise ConfigError(
            f'"{directory}" has no ca.key, which certificates are made with: run this command on the machine of '
            "`paramserver certs init`, and copy the new files here"
        )
    try:
        key: Any = load_pem_private_key(read_secret(directory / "ca.key", "key"), None)
        authority = load_pem_x509_certificate(read(directory / "ca.crt", "certificate"))
    except (ValueError, TypeError):
        raise ConfigError(f'"{directory}" has a ca.key or ca.crt that is damaged; take them from a copy') from None
    if authority.public_key() != key.public_key():
        raise ConfigError(f'"{directory}" has a ca.key and a ca.crt that do not belong together; take both from a copy')
    if authority.not_valid_after_utc <= now:
        raise ConfigError(
            f'the authority in "{directory}" expired on {authority.not_valid_after_utc:%Y-%m-%d}: make another '
            "directory with `paramserver certs init`"
        )
    job = next((str(part.value) for part in authority.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)), "")
    with _writing(directory):
        for role in ISSUED:
            _issue(directory, role, _name(role, job), authority, key, now, days)


def show(directory: Path) -> list[Shown]:
    """The certificates in a directory, of which a machine may have a part. Raises ConfigError if there are none."""
    from cryptography.x509 import load_pem_x509_certificate

    found = []
    for role in (CA, *ISSUED):
        path = directory / f"{role}.crt"
        if not path.is_file():
            continue
        try:
            certificate = load_pem_x509_certificate(read(path, "certificate"))
        except ValueError as error:
            raise ConfigError(f'"{path}" is no certificate; copy it again from the machine that made it') from error
        until = certificate.not_valid_after_utc
        found.append(
            Shown(
                path.name,
                role,
                certificate.subject.rfc4514_string(),
                certificate.not_valid_before_utc,
                until,
                (until - datetime.now(UTC)) / timedelta(days=1),
            )
        )
    if not found:
        raise ConfigError(f'"{directory}" has no certificates; make some with `paramserver certs init`')
    return found


def _issue(
    directory: Path,
    role: str,
    name: Name,
    authority: Certificate,
    ca_key: EllipticCurvePrivateKey,
    now: datetime,
    days: int,
) -> None:
    """Make a new key and certificate for a role, in place of the old ones."""
    key = _new_key()
    until = min(now + timedelta(days=days), authority.not_valid_after_utc)
    certificate = _certify(name, authority.subject, key, ca_key, now, until, role)
    # A reader that comes between the two writes sees that key and certificate do not fit, and reads again.
    replace_file(directory / f"{role}.key", _key_pem(key), 0o600)
    replace_file(directory / f"{role}.crt", _pem(certificate), 0o644)


def _certify(
    name: Name,
    issuer: Name,
    key: EllipticCurvePrivateKey,
    ca_key: EllipticCurvePrivateKey,
    now: datetime,
    until: datetime,
    role: str,
) -> Certificate:
    """A certificate of a role; with an empty role, of the authority itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.x509.oid import ExtendedKeyUsageOID

    usages = {
        "digital_signature": bool(role),
        "key_cert_sign": not role,
        "crl_sign": not role,
        "content_commitment": False,
        "key_encipherment": False,
        "data_encipherment": False,
        "key_agreement": False,
        "encipher_only": False,
        "decipher_only": False,
    }
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=not role, path_length=None if role else 0), critical=True)
        .add_extension(x509.KeyUsage(**usages), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    if role:
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        names = [x509.DNSName(server_name(role)), x509.UniformResourceIdentifier(role_uri(role))]
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False).add_extension(
            x509.SubjectAlternativeName(names), critical=False
        )
    return builder.sign(ca_key, SHA256())


def _name(what: str, job: str) -> Name:
    from cryptography.x509 import Name, NameAttribute
    from cryptography.x509.oid import NameOID

    parts = [NameAttribute(NameOID.ORGANIZATION_NAME, job)] if job else []
    return Name([*parts, NameAttribute(NameOID.COMMON_NAME, f"paramserver {what}")])


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _key_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _pem(certificate: Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _check_days(days: int) -> None:
    if not 1 <= days <= MAX_DAYS:
        raise ConfigError(f"--days is {days}, but must be an integer from 1 to {MAX_DAYS}")


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f'"{directory}" cannot be written to ({(error.strerror or "error").lower()}); name another directory'
        ) from error


def replace_file(path: Path, content: bytes, mode: int) -> None:
    """Replace a file as a whole; only the owner can read it before it has its mode."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
