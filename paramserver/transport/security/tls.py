"""The certificate of this process's role, and gRPC's credentials made of it; replaced files count for new connections.

A directory holds ``ca.crt`` (the authority whose certificates are trusted), ``<role>.crt`` and ``<role>.key``. A
certificate says its role in two ways: clients know a server by the DNS name `server_name`, servers know a client by the
URI `role_uri`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from paramserver.errors import ConfigError, DeniedError
from paramserver.transport.security.files import Watched, log, read, read_secret
from paramserver.transport.security.policy import ROLES

_URI = "paramserver://role/"
# A renewed certificate and its key appear one after the other.
_SETTLE_S = 0.2
_SETTLE_TRIES = 5
WARN_DAYS = 7


def role_uri(role: str) -> str:
    """The URI among a certificate's alternative names that says which role its owner has."""
    return _URI + role


def server_name(role: str) -> str:
    """The DNS name in the certificates of a role, whatever machine they are on."""
    return f"{role}.paramserver.internal"


def role_of(auth_context: Mapping[str, Iterable[bytes]]) -> str:
    """The role in the certificate that a caller has shown; empty if there is none, or more than one."""
    found = {
        uri.decode("ascii", "replace").removeprefix(_URI)
        for uri in auth_context.get("peer_uri", ())
        if uri.startswith(_URI.encode())
    }
    role = found.pop() if len(found) == 1 else ""
    return role if role in ROLES else ""


@dataclass(frozen=True, slots=True)
class Identity:
    """The contents of the three files at one time."""

    ca: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    not_before: datetime
    not_after: datetime


class Certificates(Watched[Identity]):
    """The files of one role in one directory. Raises ConfigError if they cannot be used.

    A later mistake in the files is logged, and the certificates that were read before stay.
    """

    def __init__(self, directory: Path, role: str) -> None:
        self.directory = directory
        self.role = role
        self.path = directory / f"{role}.crt"
        self._paths = (directory / "ca.crt", self.path, directory / f"{role}.key")
        if not directory.is_dir():
            raise ConfigError(
                f'directory "{directory}" with certificates does not exist; '
                "make one with `paramserver certs init`, and correct security.certs"
            )
        for left in reversed(range(_SETTLE_TRIES)):
            try:
                super().__init__("certificates", self._paths)
                return
            except _Mismatch:
                if not left:
                    raise
                time.sleep(_SETTLE_S)

    def __repr__(self) -> str:
        return f"Certificates({self.path})"

    def pair(self) -> tuple[Path, Path]:
        """The files of the certificate and its key."""
        _, certificate, key = self._paths
        return certificate, key

    def check_dates(self) -> None:
        """Raises DeniedError if the certificate is not valid now, since everybody would refuse it."""
        complaint = self.dates_complaint()
        if complaint:
            raise DeniedError(complaint)

    def dates_complaint(self) -> str:
        """One sentence if the certificate is not valid now, with the remedy; otherwise empty."""
        identity, now = self.current(), datetime.now(UTC)
        if now >= identity.not_after:
            return (
                f'certificate "{self.path}" expired on {_day(identity.not_after)}; make new ones with '
                "`paramserver certs renew` where ca.key is, and copy them here"
            )
        if now < identity.not_before:
            return (
                f'certificate "{self.path}" is valid only from {_day(identity.not_before)} on; correct the clock of '
                "this machine, or make new ones with `paramserver certs renew`"
            )
        return ""

    def server_credentials(self) -> Any:
        """Credentials of a server that demands certificates of clients. New files count from the next handshake on."""
        from paramserver.transport.grpcio import grpc

        used = self.current()

        def fetch() -> Any:
            nonlocal used
            found = self.current()
            if found is used:
                return None
            used = found
            return configuration(found)

        def configuration(identity: Identity) -> Any:
            pair = (identity.key, identity.certificate)
            return grpc.ssl_server_certificate_configuration([pair], root_certificates=identity.ca)

        return grpc.dynamic_ssl_server_credentials(configuration(used), fetch, require_client_authentication=True)

    def _load(self) -> Identity:
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        ca_path, path, key_path = self._paths
        ca = read(ca_path, "certificate")
        certificate = read(path, "certificate")
        key = read_secret(key_path, "key")
        try:
            chain = x509.load_pem_x509_certificates(certificate)
            authorities = x509.load_pem_x509_certificates(ca)
        except ValueError as error:
            wrong = path if b"BEGIN CERTIFICATE" in ca else ca_path
            raise ConfigError(f'"{wrong}" is no certificate; copy it again from where it was made') from error
        try:
            private = load_pem_private_key(key, None)
        except (ValueError, TypeError):
            # Without the cause, whose text is about the contents.
            raise ConfigError(f'"{key_path}" is no private key without a password; copy it again') from None
        own = chain[0]
        if own.public_key() != private.public_key():
            raise _Mismatch(f'"{key_path}" is not the key of "{path}"; copy both from the same directory')
        if _roles(own) != {self.role}:
            raise ConfigError(
                f'"{path}" is no certificate of a {self.role}: it has to name {role_uri(self.role)} and no other role'
            )
        if len(chain) == 1 and not any(_issued(own, authority) for authority in authorities):
            raise ConfigError(f'"{path}" was not made with "{ca_path}"; copy both from the same directory')
        left = own.not_valid_after_utc - datetime.now(UTC)
        if timedelta() < left < timedelta(days=WARN_DAYS):
            log.warning(
                "the certificate expires soon; run `paramserver certs renew` where ca.key is, and copy it here",
                file=str(path),
                expires=_day(own.not_valid_after_utc),
            )
        return Identity(ca, certificate, key, own.not_valid_before_utc, own.not_valid_after_utc)

    def _facts(self, value: Identity) -> dict[str, object]:
        return {"file": str(self.path), "valid_until": _day(value.not_after)}


class _Mismatch(ConfigError):
    """A key that is not the certificate's; in a moment it may be."""


def channel_credentials(identity: Identity) -> Any:
    """Credentials of a client that shows its certificate."""
    from paramserver.transport.grpcio import grpc

    return grpc.ssl_channel_credentials(identity.ca, identity.key, identity.certificate)


def _roles(certificate: Any) -> set[str]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return set()
    uris: list[str] = names.get_values_for_type(x509.UniformResourceIdentifier)
    return {uri.removeprefix(_URI) for uri in uris if uri.startswith(_URI)}


def _issued(certificate: Any, authority: Any) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _day(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"
