"""The credentials that this process shows to its peers, and the checks that its own callers have to pass.

With certificates, a caller's role is the role in its certificate. Without, a caller is taken for any role but admin.
Tokens come on top, as metadata of every call. `policy` says which role may call which method. A caller that is refused
hears "permission denied"; the log says why.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from paramserver.errors import ConfigError, DeniedError, UnavailableError
from paramserver.transport.addresses import host_of, loopback, resolves_to_loopback
from paramserver.transport.base import Caller, shown
from paramserver.transport.security.policy import ADMIN, ADMIN_METHODS, ANYBODY, CALLERS
from paramserver.transport.security.tls import Certificates, role_of
from paramserver.transport.security.tokens import Tokens

TOKEN_KEY = "authorization"
ADMIN_KEY = "paramserver-admin"
MEMBER_KEY = "paramserver-member"
SECRET_BYTES = 32
_BEARER = "Bearer "
DENIED = "permission denied"
# Refused calls in the log: so many at once, then one line per so many seconds that counts the others.
LOG_BURST = 20
LOG_EVERY_S = 10.0

log = structlog.get_logger("paramserver.security")

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a call is refused, for the log. ``unknown``: the caller has not shown its identity."""

    reason: str
    unknown: bool = False


class Security:
    """Credentials of one process, and its demands. Made by `paramserver.pki.security.load_security`, or `open`."""

    def __init__(
        self,
        role: str = "",
        certificates: Certificates | None = None,
        join: Tokens | None = None,
        admin: Tokens | None = None,
        insecure: bool = False,
    ) -> None:
        """``role`` of this process, one of `policy.ROLES`. ``insecure``: talk to other machines without all this."""
        self.role = role
        self.certificates = certificates
        self.join = Tokens() if join is None else join  # a file may be awaited
        self.admin = admin or Tokens()
        self.insecure = insecure
        # What tells this process from others (`members`). Its SHA-256 is known to coordinator and servers.
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._warned = False

    @classmethod
    def open(cls, insecure: bool = False) -> Security:
        """Nothing to show, nothing demanded: for one machine."""
        return cls(insecure=insecure)

    def __repr__(self) -> str:
        return f"Security({self.role!r}, {self.certificates}, {self.join}, {self.admin}, insecure={self.insecure})"

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted, and certificates shown."""
        return self.certificates is not None

    # ---- as a caller

    def metadata(self, method: str) -> Metadata:
        """The secrets that go with a call of this method. Not to be logged."""
        token = self.join.first()
        head: Metadata = ((TOKEN_KEY, _BEARER + token),) if token else ()
        if method in ADMIN_METHODS and (token := self.admin.first()):
            head += ((ADMIN_KEY, token),)
        return (*head, (MEMBER_KEY, (shown() or self.secret).hex()))

    def lacking(self, method: str) -> str:
        """What this process would have to show for a call of this method, in words; empty if it has all of that."""
        wanted = sorted(CALLERS[method])
        if self.tls and self.role not in wanted:
            files = " or ".join(f"{role}.crt and {role}.key" for role in wanted)
            return (
                f"the call takes the certificate of the role {' or '.join(wanted)}, and that of the role {self.role} "
                f"was shown: copy {files} into the directory that --certs (security.certs) names"
            )
        if method in ADMIN_METHODS and not self.admin:
            return (
                "the call takes the operators' token, and none is known here: copy admin.token into the directory that "
                "--certs names, name its file in security.admin_token_file, or type the command on the coordinator's "
                "machine, as the user who started it and without --coordinator"
            )
        if not self.join:
            return (
                "the other side may demand the token of the job, and none is known here: name its file in "
                "security.token_file, or in --certs the directory with join.token; a job without certificates is for "
                "the user who started its coordinator, on the same machine"
            )
        return ""

    # ---- as the called side

    def admit(self, method: str, metadata: Sequence[tuple[Any, Any]]) -> Refusal | None:
        """The first check, when only the head of a call has arrived: its tokens."""
        shown = _shown(metadata)
        if self.join:
            token = shown.get(TOKEN_KEY, "")
            if not token:
                return Refusal("no token", unknown=True)
            if not token.startswith(_BEARER) or not self.join.accept(token.removeprefix(_BEARER)):
                return Refusal("wrong token", unknown=True)
        if method in ADMIN_METHODS:
            if not self.admin:
                return Refusal("no admin token is configured here, so nobody may give this command")
            token = shown.get(ADMIN_KEY, "")
            if not token:
                return Refusal("no admin token", unknown=True)
            if not self.admin.accept(token):
                return Refusal("wrong admin token", unknown=True)
        return None

    def identify(
        self,
        method: str,
        auth_context: Callable[[], Mapping[str, Iterable[bytes]]],
        metadata: Sequence[tuple[Any, Any]] = (),
    ) -> Caller | Refusal:
        """The second check: the role of a caller whose tokens are right. What it may say: see `members`."""
        admin = method in ADMIN_METHODS
        if self.tls:
            role = role_of(auth_context())
            if not role:
                return Refusal("its certificate names no role", unknown=True)
            roles = frozenset({role})
        else:
            roles = ANYBODY | {ADMIN} if admin else ANYBODY
        if not roles & CALLERS[method]:
            return Refusal(f"a {'/'.join(sorted(roles))} may not call this, only {', '.join(sorted(CALLERS[method]))}")
        return Caller(roles, admin, proof_in(_shown(metadata).get(MEMBER_KEY, "")))

    # ---- other machines

    async def check_listen(self, host: str) -> None:
        """Raises ConfigError if it is not safe to listen on this host, DeniedError for a certificate out of date."""
        if self.certificates is not None:
            self.certificates.check_dates()
        if self._complete():
            return
        try:
            near = await resolves_to_loopback(host)
        except OSError:
            near = False
        self._check(near, f"listening on {host}")

    def check_numeric(self, address: str) -> None:
        """Raises ConfigError if ``address`` is a number of another machine, and it is not safe to connect to it."""
        if not self._complete() and loopback(host_of(address)) is False:
            self._check(False, f"connecting to {address}")

    async def check_connect(self, address: str, where: str) -> None:
        """Raises ConfigError if it is not safe to connect there, UnavailableError if nobody knows the host name,
        DeniedError for a certificate out of date. ``where`` begins the text."""
        if self.certificates is not None:
            self.certificates.check_dates()
        if self._complete() or (self.insecure and self._warned):
            return
        try:
            near = await resolves_to_loopback(host_of(address))
        except OSError as error:
            why = (error.strerror or "no address").lower()
            raise UnavailableError(
                f"{where}: nobody knows this host name ({why}); correct it, or the name service of this machine"
            ) from error
        self._check(near, f"connecting to {address}")

    def _complete(self) -> bool:
        return self.tls and bool(self.join)

    def _check(self, near: bool, what: str) -> None:
        if near:
            return
        missing = " and ".join(thing for thing, there in (("TLS", self.tls), ("a token", bool(self.join))) if not there)
        if not self.insecure:
            are = "is" if self.tls or self.join else "are"
            raise ConfigError(
                f"{what} takes TLS and a token, and {missing} {are} not configured: make certificates with "
                "`paramserver certs init DIR` and name the directory in security.certs (--certs), "
                "or accept that everybody on the network can read and change everything (--insecure)"
            )
        if not self._warned:
            self._warned = True
            log.warning(
                f"INSECURE: {what} without {missing}. Everybody who can reach this port can read and change "
                "the model and stop the job. Use it only in a network that you trust",
            )


OPEN = Security.open()


def proof_of(secret: bytes) -> bytes:
    """By which others know who shows this secret."""
    return hashlib.sha256(secret).digest()


def proof_in(shown: str) -> bytes:
    """The proof of the secret in the head of a call; empty: there is no secret of the right form."""
    try:
        secret = bytes.fromhex(shown)
    except ValueError:
        return b""
    return proof_of(secret) if len(secret) == SECRET_BYTES else b""


def _shown(metadata: Sequence[tuple[Any, Any]]) -> dict[str, str]:
    """The metadata as text. A key that comes twice has no value."""
    shown: dict[str, str] = {}
    for key, value in metadata:
        shown[key] = "" if key in shown else value if isinstance(value, str) else value.decode("ascii", "replace")
    return shown


class RefusalLog:
    """Logs refused calls: a few lines at once, then now and then a line that counts the others."""

    def __init__(
        self, burst: int = LOG_BURST, every_s: float = LOG_EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst = burst
        self._every_s = every_s
        self._left = float(burst)
        self._clock = clock
        self._at = clock()
        self._silent = 0

    def say(self, call: str, peer: str, reason: str) -> None:
        """One refused call."""
        now = self._clock()
        self._left = min(float(self._burst), self._left + (now - self._at) / self._every_s)
        self._at = now
        if self._left < 1.0:
            self._silent += 1
            return
        self._left -= 1.0
        others = {"others": self._silent} if self._silent else {}
        self._silent = 0
        log.warning("refused a call", call=call, peer=peer, reason=reason, **others)


_OF_SERVICES = RefusalLog()


def deny(call: str, reason: str) -> DeniedError:
    """The error that a service raises to refuse a caller by itself. ``reason`` goes to the log only."""
    _OF_SERVICES.say(call, "", reason)
    return DeniedError(DENIED)
