"""The rights of callers over HTTP, to read and to give commands: tokens, sessions, and the names of this host.

The rules are those of gRPC: the join token opens everything that can be read if this process has one, and commands take
the admin token. A browser shows no certificate. It exchanges a token for a session cookie.
"""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from paramserver.transport.security.access import ADMIN_KEY, Security
from paramserver.transport.security.tls import server_name
from paramserver.web.tickets import SESSION_S, Kind, ticket, token_of

COOKIE = "paramserver-session"
# Links that were used and sessions that were ended, until their time is over. Only who knows a token can make them.
MAX_SPENT = 1024


@dataclass(frozen=True, slots=True)
class Request:
    """The head of a request. Names of headers are in lower case; a header that comes twice has no value."""

    method: str
    path: str
    scheme: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that is not answered. ``text`` goes to the caller, ``reason`` to the log."""

    status: int
    text: str
    reason: str


METHODS = ("GET", "HEAD", "POST")
# Can be read without a token: the page itself, which has nothing of the job in it, and the way to log in.
OPEN_PREFIXES = ("/static/",)
OPEN_PATHS = ("/", "/api/v1/login", "/api/v1/logout", "/api/v1/session")
_FORBIDDEN = "forbidden"


class Access:
    """Decides about requests by their heads. ``names``: further names under which this host is reached."""

    def __init__(
        self,
        security: Security,
        names: frozenset[str] = frozenset(),
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._security = security
        self._names = names | {"localhost", server_name(security.role or "coordinator")}
        self._wall = wall
        # Tickets that count no more. The newest one is last.
        self._spent: OrderedDict[str, None] = OrderedDict()

    def check(self, request: Request) -> Refused | None:
        """None if the request may go on."""
        host = request.headers.get("host", "")
        if not self._known(host):
            return Refused(403, _FORBIDDEN, f"it names the host {host[:100]!r}")
        origin = request.headers.get("origin")
        if origin is not None and origin.lower() != f"{request.scheme}://{host}".lower():
            return Refused(403, _FORBIDDEN, f"it comes from another site, {origin[:100]!r}")
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not _navigates(request):
            return Refused(403, _FORBIDDEN, "it comes from another site")
        if request.method not in METHODS:
            return Refused(405, "this method is not allowed", "its method is not allowed")
        if open_to_all(request):
            return self._posts_json(request)
        if not self.reads(request):
            return Refused(401, "a token is needed: log in, or show it as a bearer token", "no token, or a wrong one")
        if request.method == "POST" and not self.commands(request):
            if not self._security.admin:
                return Refused(403, "no admin token is configured here, so nobody may give commands", "no admin token")
            return Refused(401, "the admin token is needed for commands", "no admin token, or a wrong one")
        return self._posts_json(request)

    def _posts_json(self, request: Request) -> Refused | None:
        """A form of another site cannot send JSON."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            return Refused(415, "send JSON, with content-type application/json", "it is not JSON")
        return None

    def _known(self, host: str) -> bool:
        """Whether a browser can only have got here on purpose: a foreign name that points here is refused."""
        try:
            parts = urlsplit(f"//{host}")
            name = (parts.hostname or "").rstrip(".")
            parts.port  # noqa: B018  raises ValueError for what is no port
        except ValueError:
            return False
        if parts.username is not None or parts.path or parts.query or parts.fragment:
            return False
        try:
            ipaddress.ip_address(name)
            return "%" not in name
        except ValueError:
            return name in self._names

    # ---- tokens and sessions

    def reads(self, request: Request) -> bool:
        """Whether the caller may read the state of the job."""
        if not self._security.join:
            return True
        bearer = request.headers.get("authorization", "")
        shown = bearer.removeprefix("Bearer ") if bearer.startswith("Bearer ") else ""
        tokens = [token for token in (shown, self._session(request)) if token]
        return any(self._security.join.accept(token) for token in tokens) or self.commands(request)

    def commands(self, request: Request) -> bool:
        """Whether the caller may give commands."""
        tokens = [token for token in (request.headers.get(ADMIN_KEY, ""), self._session(request)) if token]
        return bool(self._security.admin) and any(self._security.admin.accept(token) for token in tokens)

    def log_in(self, token: str) -> str | None:
        """A new session for a token that is right, or for a link that nobody has used; None if it is wrong.

        Wrong tokens lock nobody out: a token has at least `MIN_TOKEN_CHARS` signs, and can be tried in other requests.
        """
        if linked := self._holder(token, "link"):
            self._spend(token)
            token = linked
        if not (self._security.join.accept(token) or self._security.admin.accept(token)):
            return None
        return ticket("session", token, self._wall() + SESSION_S)

    def log_out(self, request: Request) -> None:
        """End the caller's session."""
        if self._session(request):
            self._spend(_cookie(request))

    def _session(self, request: Request) -> str:
        """The token with which the caller logged in; empty: none. It still has to be accepted."""
        return self._holder(_cookie(request), "session")

    def _holder(self, shown: str, kind: Kind) -> str:
        """The token that the owner of a ticket has had; empty if the ticket does not count."""
        if not shown or shown in self._spent:
            return ""
        return token_of(shown, kind, (*self._security.join.current(), *self._security.admin.current()), self._wall())

    def _spend(self, shown: str) -> None:
        self._spent[shown] = None
        while len(self._spent) > MAX_SPENT:
            self._spent.popitem(last=False)


def open_to_all(request: Request) -> bool:
    """Whether the request is answered without a token."""
    return request.path in OPEN_PATHS or request.path.startswith(OPEN_PREFIXES)


def _navigates(request: Request) -> bool:
    """Somebody follows a link to the page, which alone shows nothing of the job."""
    return request.method == "GET" and request.path == "/"


def cookie_name(request: Request) -> str:
    """The name of the session's cookie: a browser sends the cookies of all ports of a host to each of them."""
    return f"{COOKIE}-{request.headers.get('host', '').rpartition(':')[2]}"


def _cookie(request: Request) -> str:
    try:
        found = SimpleCookie(request.headers.get("cookie", "")).get(cookie_name(request))
    except CookieError:
        return ""
    return found.value if found is not None else ""
