"""Which requests over HTTP are answered: hosts, origins, methods, tokens, sessions (J15, J16 of the faults)."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramserver.transport.security.access import Security
from paramserver.transport.security.tokens import Tokens
from paramserver.web.access import MAX_SPENT, Access, Request, cookie_name
from paramserver.web.tickets import LINK_S, SESSION_S, page_link, ticket, token_of

JOIN, ADMIN = "join-token-of-the-job", "admin-token-of-the-job"
HERE = "127.0.0.1:8780"
JSON = {"content-type": "application/json"}
SCALE = "/api/v1/scale"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def near() -> Access:
    """As with --insecure: everybody may read who can connect."""
    return Access(Security(admin=Tokens([ADMIN])))


def far(clock: Clock | None = None) -> Access:
    """As between machines: nothing without a token."""
    security = Security(join=Tokens([JOIN]), admin=Tokens([ADMIN]))
    return Access(security, frozenset({"coordinator.example"}), clock or Clock())


def request(method: str = "GET", path: str = "/api/v1/status", scheme: str = "http", **headers: str) -> Request:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return Request(method, path, scheme, {"host": HERE, **given})


def status(access: Access, asked: Request) -> int:
    refused = access.check(asked)
    return 200 if refused is None else refused.status


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (HERE, 200),
        ("localhost:1", 200),
        ("LOCALHOST", 200),
        ("[::1]:8780", 200),
        ("10.0.0.7:8780", 200),  # a browser that was led here by a name sends the name
        ("coordinator.paramserver.internal", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:8780", 403),
        ("localhost@evil.example", 403),
        ("127.0.0.1%.evil", 403),
        ("127.0.0.1%25.evil.example:8780", 403),
        ("[::1%.evil]:8780", 403),
        ("localhost:http", 403),
        ("localhost/x", 403),
        ("", 403),
    ],
)
def test_a_foreign_name_that_points_here_is_refused(host: str, expected: int) -> None:
    assert status(near(), request(host=host)) == expected


def test_the_advertised_name_is_known() -> None:
    assert status(far(), request(host="coordinator.example", authorization=f"Bearer {JOIN}")) == 200


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9999", "https://" + HERE, ""])
def test_another_site_is_refused_whatever_its_method(method: str, origin: str) -> None:
    asked = request(method, SCALE, origin=origin, paramserver_admin=ADMIN, **JSON)
    assert status(near(), asked) == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_another_site_has_the_browser_fetch_is_refused(site: str) -> None:
    assert status(near(), request(sec_fetch_site=site)) == 403
    assert status(near(), request(path="/", sec_fetch_site=site)) == 200


def test_the_own_page_may_give_commands() -> None:
    asked = request(
        "POST", SCALE, origin=f"http://{HERE}", sec_fetch_site="same-origin", paramserver_admin=ADMIN, **JSON
    )
    assert status(near(), asked) == 200


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"])
def test_no_other_method_is_answered(method: str) -> None:
    assert status(near(), request(method, paramserver_admin=ADMIN)) == 405


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_form_is_no_command(kind: str) -> None:
    asked = request("POST", SCALE, content_type=kind, paramserver_admin=ADMIN)
    assert status(near(), asked) == 415


@pytest.mark.parametrize("path", ["/api/v1/status", "/api/v1/stream", "/api/v1/settings", "/metrics", "/api/v1/none"])
def test_nothing_of_the_job_is_shown_without_a_token(path: str) -> None:
    assert status(far(), request(path=path)) == 401
    assert status(far(), request(path=path, authorization="Bearer wrong")) == 401
    assert status(far(), request(path=path, authorization=JOIN)) == 401
    assert status(far(), request(path=path, authorization=f"Bearer {JOIN}")) == 200
    assert status(far(), request(path=path, paramserver_admin=ADMIN)) == 200


@pytest.mark.parametrize("path", ["/", "/static/page.js", "/api/v1/login", "/api/v1/session"])
def test_the_page_itself_and_the_way_to_log_in_are_open(path: str) -> None:
    assert status(far(), request(path=path)) == 200


def test_commands_take_the_admin_token() -> None:
    for access in (near(), far()):
        assert status(access, request("POST", SCALE, **JSON)) == 401
        assert status(access, request("POST", SCALE, authorization=f"Bearer {JOIN}", **JSON)) == 401
        assert status(access, request("POST", SCALE, paramserver_admin=JOIN, **JSON)) == 401
        assert status(access, request("POST", SCALE, paramserver_admin=ADMIN, **JSON)) == 200


def test_without_an_admin_token_nobody_gives_commands() -> None:
    refused = Access(Security()).check(request("POST", SCALE, paramserver_admin="", **JSON))
    assert refused is not None
    assert refused.status == 403
    assert "no admin token is configured" in refused.text


def with_session(access: Access, token: str) -> dict[str, str]:
    session = access.log_in(token)
    assert session is not None
    return {"cookie": f"{cookie_name(request())}={session}"}


def test_a_session_may_what_its_token_may() -> None:
    access = far()
    reader, admin = with_session(access, JOIN), with_session(access, ADMIN)
    assert status(access, request(**reader)) == 200
    assert status(access, request("POST", SCALE, **reader, **JSON)) == 401
    assert status(access, request("POST", SCALE, **admin, **JSON)) == 200
    assert status(access, request(cookie=f"{cookie_name(request())}={JOIN}")) == 401
    access.log_out(request(**admin))
    assert status(access, request(**admin)) == 401


def test_a_session_ends() -> None:
    clock = Clock()
    access = far(clock)
    reader = with_session(access, JOIN)
    clock.now = SESSION_S - 1.0
    assert status(access, request(**reader)) == 200
    clock.now = SESSION_S
    assert status(access, request(**reader)) == 401


def test_a_session_goes_on_with_another_coordinator_of_the_job() -> None:
    """The page of a run does not ask for a token when its coordinator was killed and started again."""
    reader = with_session(far(), JOIN)
    assert status(far(), request(**reader)) == 200


def test_a_link_opens_the_page_once_and_for_a_while() -> None:
    clock = Clock()
    access = far(clock)
    first, second = (ticket("link", JOIN, LINK_S) for _ in range(2))
    assert status(access, request(**with_session(access, first))) == 200
    assert access.log_in(first) is None
    assert access.log_in(first[:-1] + "A") is None
    clock.now = LINK_S
    assert access.log_in(second) is None


def test_a_link_is_made_with_a_token_of_this_job_and_is_no_session() -> None:
    access = far()
    assert access.log_in(ticket("link", "join-token-of-another-job", LINK_S)) is None
    link, session = ticket("link", JOIN, LINK_S), ticket("session", JOIN, SESSION_S)
    assert status(access, request(cookie=f"{cookie_name(request())}={link}")) == 401
    assert access.log_in(session) is None
    assert status(access, request("POST", SCALE, **with_session(access, link), **JSON)) == 401


def test_the_link_of_the_page_has_its_key_where_a_browser_keeps_it_to_itself() -> None:
    url = page_link("http://127.0.0.1:1", Tokens([JOIN]))
    address, _, key = url.partition("/#key=")
    assert address == "http://127.0.0.1:1"
    assert token_of(key, "link", [ADMIN, JOIN], 0.0) == JOIN
    assert len(f"dashboard at {page_link('http://127.0.0.1:65535', Tokens([JOIN]))}") < 80
    assert page_link("http://127.0.0.1:1", Tokens()) == "http://127.0.0.1:1"


@pytest.mark.parametrize("shown", ["", "x", "é" * 36, "A" * 36, "=" * 36, "A" * 4000])
def test_no_other_text_is_a_ticket(shown: str) -> None:
    assert token_of(shown, "link", [JOIN], 0.0) == ""


def test_spent_tickets_are_bounded() -> None:
    access = far()
    for _ in range(MAX_SPENT + 10):
        assert access.log_in(ticket("link", JOIN, LINK_S)) is not None
    assert len(access._spent) == MAX_SPENT


def test_dashboards_of_one_host_have_their_own_cookies() -> None:
    """A browser sends the cookies of one port to all others: a login here would end the session there."""
    assert cookie_name(request(host="localhost:1")) != cookie_name(request(host="localhost:2"))


def test_wrong_tokens_of_others_lock_nobody_out() -> None:
    access = far()
    assert {access.log_in("wrong") for _ in range(1000)} == {None}
    assert access.log_in(JOIN) is not None


def test_a_token_that_was_removed_ends_its_sessions(tmp_path: Path) -> None:
    path = tmp_path / "join.token"
    path.write_text(JOIN + "\n")
    path.chmod(0o600)
    tokens = Tokens(path=path)
    access = Access(Security(join=tokens))
    session = with_session(access, JOIN)
    assert status(access, request(**session)) == 200
    path.write_text(JOIN + "-replaced\n")
    tokens.look()
    assert status(access, request(**session)) == 401
