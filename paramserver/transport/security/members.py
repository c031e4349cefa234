"""Who makes a call: the member to which the secret in its head belongs, and what that member may say.

Each process draws a secret when it starts, and shows it in the head of every call (`access.Security`). With the call
Coordinator.Join its SHA-256 becomes the proof of the new member. From then on a request that names a member counts only
if its caller shows this member's secret. Servers know the proofs from the record of the job. A server draws a key
besides, and gives it to the coordinator when it joins: who shows this key in a call to the server is the coordinator.

The check stands before the methods of a service (`transport.base.handlers`), so that no method has to think of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from paramserver import errors
from paramserver.transport.base import Caller, Method, MethodKind, caller
from paramserver.transport.security.access import deny
from paramserver.transport.security.fields import HEADERS, check_numbers, has, own_numbers, reserved
from paramserver.transport.security.policy import (
    ADMIN,
    ADMIN_METHODS,
    CALLERS,
    COORDINATOR,
    GUEST,
    GUEST_METHODS,
    OBSERVER,
    OBSERVER_METHODS,
    SERVER,
    WORKER,
)
from paramserver.v1 import types_pb2

JOIN = "Coordinator.Join"
# The role of a caller of whom a coordinator that does not lead cannot know more.
UNKNOWN = ""
_JOINS = {types_pb2.ROLE_WORKER: WORKER, types_pb2.ROLE_SERVER: SERVER, types_pb2.ROLE_OBSERVER: OBSERVER}
# An observer reads. With certificates, workers and admins may be observers.
_CERTIFICATES: Mapping[str, frozenset[str]] = {OBSERVER: frozenset({WORKER, ADMIN})}


@dataclass(frozen=True, slots=True)
class Known:
    """A member: its role, and the SHA-256 of its secret."""

    role: str
    proof: bytes


class Roll(Protocol):
    """The members as the called side knows them."""

    def member(self, number: int) -> Known | None:
        """The member of this number; None: there is none."""
        ...

    def roles(self, proof: bytes) -> Collection[str]:
        """The roles of the members that have this proof."""
        ...

    def is_coordinator(self, proof: bytes) -> bool:
        """Whether the caller with this proof is the coordinator."""
        ...


class ServerRoll:
    """The members as a server knows them. ``key``: the proof of the coordinator."""

    def __init__(self, key: bytes, members: Mapping[int, Known] | None = None) -> None:
        self._key = key
        self._members = dict(members or {})
        self._roles: dict[bytes, set[str]] = {}
        for one in self._members.values():
            self._roles.setdefault(one.proof, set()).add(one.role)

    def member(self, number: int) -> Known | None:
        """See `Roll`."""
        return self._members.get(number)

    def roles(self, proof: bytes) -> Collection[str]:
        """See `Roll`."""
        return self._roles.get(proof, ()) if proof else ()

    def is_coordinator(self, proof: bytes) -> bool:
        """See `Roll`."""
        return proof == self._key


def judge(method: Method, message: Any, roll: Roll | None) -> None:
    """Raise an error if the caller of the present call may not say this. ``roll`` None: nobody knows the members.

    Raises DeniedError; NotMemberError or UnavailableError for a stranger; ProtocolError for a number
    beyond its bound. Nothing has changed then.
    """
    if method.kind is MethodKind.UPLOAD:
        kind = HEADERS[method.name]
        if message.WhichOneof("first") != kind:
            raise errors.ProtocolError(f"the first frame of this stream must carry a {kind} header")
        message = getattr(message, kind)
    who = caller()
    role = UNKNOWN
    if who is not None and who.proof is not None:
        role = _role(method, message, who, roll)
        for name in reserved(message.DESCRIPTOR.name, role) if role else ():
            if has(message, name):
                raise deny(method.name, f"a {role} may not send {message.DESCRIPTOR.name}.{name}")
    check_numbers(message, trusted=role == COORDINATOR)


def _role(method: Method, message: Any, who: Caller, roll: Roll | None) -> str:
    """The role of the caller, which is certain as far as the method needs that."""
    name, callers = method.name, CALLERS[method.name]
    if name in ADMIN_METHODS:
        return ADMIN
    if name == JOIN:
        return _JOINS.get(message.role, GUEST)
    if COORDINATOR in callers and (
        who.roles == {COORDINATOR} or (roll is not None and roll.is_coordinator(who.proof or b""))
    ):
        return COORDINATOR
    if roll is None:
        return next(iter(who.roles)) if len(who.roles) == 1 else UNKNOWN
    numbers = own_numbers(message)
    if name in GUEST_METHODS:
        numbers.discard(0)
    if numbers:
        return _member(method, numbers, who, roll)
    roles = roll.roles(who.proof or b"")
    if SERVER in callers & who.roles and SERVER in roles:
        return SERVER
    if name in GUEST_METHODS:
        return GUEST
    if roles and not callers & frozenset(roles):
        raise deny(name, f"a {_or(roles)} may not call this, only {_or(callers)}")
    if SERVER in callers or WORKER in callers:
        raise stranger(name)
    raise deny(name, "the caller is not the coordinator: it does not show the key of this server")


def _member(method: Method, numbers: Collection[int], who: Caller, roll: Roll) -> str:
    """The role of the member that the request names, if the caller is this member."""
    role = GUEST
    for number in sorted(numbers):
        known = roll.member(number)
        if known is None:
            if method.name in GUEST_METHODS:
                continue
            raise stranger(method.name)
        if not who.proof or known.proof != who.proof:
            raise deny(method.name, f"the caller is not member {number}, a {known.role}: it shows another secret")
        role, certificates = known.role, _CERTIFICATES.get(known.role, frozenset({known.role}))
        if not certificates & who.roles:
            raise deny(method.name, f"member {number} is a {role}, and the certificate is of {_or(who.roles)}")
        if not (method.name in OBSERVER_METHODS if role == OBSERVER else role in CALLERS[method.name]):
            raise deny(method.name, f"a {role} may not call this, only {_or(CALLERS[method.name])}")
    return role


def _or(roles: Iterable[str]) -> str:
    return " or ".join(sorted(roles))


def stranger(method: str) -> errors.ParamServerError:
    """The refusal of a process that is no member, or of which this process has not heard yet."""
    if method.startswith("Coordinator."):
        return errors.NotMemberError("this process is not a member (its lease ended): join again")
    # The news of a member may be later than the member, above all at a server that has begun anew. A worker that was
    # removed hears that from the coordinator.
    return errors.UnavailableError("this server has not heard of the caller as a member of the job: try again")
