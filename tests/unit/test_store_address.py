"""Addresses of stores, and files with their passwords."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paramserver.errors import ConfigError
from paramserver.store import address as module
from paramserver.store import open_store
from paramserver.store.address import Address, parse, read_password
from paramserver.store.base import redacted


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host", Address("redis://host", host="host")),
        ("redis://host:7000/3", Address("redis://host:7000/3", host="host", port=7000, database=3)),
        ("redis://host/?db=4", Address("redis://host/", host="host", database=4)),
        ("redis://[::1]:7000", Address("redis://[::1]:7000", host="::1", port=7000)),
        ("redis://me@host", Address("redis://…@host", host="host", user="me")),
        ("redis://:p%40%23%2F@host", Address("redis://…@host", host="host", password="p@#/")),
        ("redis://me:p@host/1", Address("redis://…@host/1", host="host", user="me", password="p", database=1)),
        ("redis://host?username=me&password=p", Address("redis://host", host="host", user="me", password="p")),
        ("unix:///run/x.sock", Address("unix:///run/x.sock", path="/run/x.sock")),
        ("unix:///a%20b?db=2", Address("unix:///a%20b", path="/a b", database=2)),
        ("unix://me:p@/s?db=2", Address("unix://…@/s", path="/s", user="me", password="p", database=2)),
    ],
)
def test_a_url_is_understood(url: str, expected: Address) -> None:
    assert parse(url) == expected


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("redis://", "it names no host"),
        ("redis:///0", "it names no host"),
        ("redis://host:port/0", "write redis://user:password@host:6379/0"),
        ("redis://host:99999", "write redis://user:password@host:6379/0"),
        ("redis://[::1", "write redis://user:password@host:6379/0"),
        ("redis://host/zero", "the database is a number"),
        ("redis://host/-1", "the database is a number"),
        ("redis://host/²", "the database is a number"),
        ("redis://host?db=x", "the database is a number"),
        ("redis://host?dbb=1", "its query has a name other than db, username"),
        ("rediss://host?ssl_cert_reqs=none", "its query has a name other than db, username"),
        ("rediss://host?ssl_check_hostname=false", "its query has a name other than db, username"),
        ("redis://host?nonsense", "write redis://user:password@host:6379/0"),
        ("redis://:can#ary@host", "a # in a password is written %23|write redis://user:password@host"),
        ("redis://host?ssl_ca_certs=/x", "certificates are for rediss://"),
        ("rediss://host?ssl_certfile=/x", "ssl_certfile and ssl_keyfile come together"),
        ("unix://run/redis.sock", "write unix:///path/to/socket"),
        ("unix://", "write unix:///path/to/socket"),
        ("unix:///", "write unix:///path/to/socket"),
    ],
)
def test_a_malformed_url_is_the_users_mistake(url: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as caught:
        parse(url)
    assert "canary" not in str(caught.value)


def test_nothing_secret_is_in_its_repr() -> None:
    address = parse("redis://canary-user:canary@host/0")
    assert address.password == "canary"
    assert "canary" not in repr(address)
    assert "canary" not in repr(parse("unix:///s?password=canary"))


def test_certificates_are_looked_at_before_anything_is_connected(tmp_path: Path) -> None:
    (tmp_path / "broken").write_text("no certificate")
    for path in (tmp_path / "missing", tmp_path / "broken", tmp_path):
        with pytest.raises(ConfigError, match=r"a certificate or key that cluster\.store 'rediss://host/0' names"):
            parse(f"rediss://host/0?ssl_ca_certs={path}")
        with pytest.raises(ConfigError, match="a certificate or key"):
            parse(f"rediss://host/0?ssl_certfile={path}&ssl_keyfile={path}")
    context = parse("rediss://host").tls
    assert context is not None
    assert context.check_hostname


# ---- passwords


def password_file(tmp_path: Path, content: bytes, mode: int = 0o600) -> str:
    path = tmp_path / "password"
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize("content", [b"s3cret", b"s3cret\n", b"s3cret\r\n"])
def test_a_password_file_holds_one_line(tmp_path: Path, content: bytes) -> None:
    path = password_file(tmp_path, content)
    assert read_password(path) == "s3cret"
    assert parse("redis://me@host", path) == Address("redis://…@host", host="host", user="me", password="s3cret")


@pytest.mark.parametrize("content", [b"", b"\n", b"canary\nanother", b"\xff\xfecanary", b"canary" * 20000])
def test_a_file_with_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"must hold one line|it is not a password") as caught:
        read_password(password_file(tmp_path, content))
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601])
def test_a_password_file_that_others_can_read_is_refused(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = password_file(tmp_path, b"canary", mode)
    with pytest.raises(ConfigError, match=f"can be read by others: chmod 600 {re.escape(path)}"):
        open_store("redis://host", "p", path)
    monkeypatch.setattr(module, "SECRETS", str(tmp_path))  # as where Docker puts them
    assert read_password(path) == "canary"
    monkeypatch.setattr(module, "SECRETS", str(tmp_path)[:-1])
    with pytest.raises(ConfigError):
        read_password(path)


def test_a_password_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_password(str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match=r"cannot be read|is no file"):
        read_password(str(tmp_path))


def test_a_password_comes_from_one_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave one of them out"):
        parse("redis://:a@host", password_file(tmp_path, b"b"))


# ---- what is shown


@pytest.mark.parametrize(
    "url",
    [
        "redis://:canary@host/0",
        "redis://:ca?canary@host",
        "redis://:ca#canary@host",
        "redis://:ca/canary@host",
        "redis://:ca@canary@host",
        "redis://host/0?password=a@canary",
        "user:canary@host",
    ],
)
def test_a_password_is_never_shown(url: str) -> None:
    assert "canary" not in redacted(url)
    assert ":ca" not in redacted(url)
