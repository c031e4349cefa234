"""The certificate authority in a directory, its commands, and the settings that name it."""

from __future__ import annotations

import json
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from paramserver import errors
from paramserver.cli.prepare.certs import UNHEALTHY_EXIT_CODE, app
from paramserver.config import load_settings
from paramserver.pki import certs
from paramserver.pki.security import load_security
from paramserver.transport.security import tls
from paramserver.transport.security.policy import ROLES

TOKEN = "a-token-for-tests-0123456789"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """What `certs init` makes."""
    certs.init(tmp_path / "certs", job="digits")
    return tmp_path / "certs"


def command(*argv: str) -> int:
    """`paramserver certs ...`, without main's handling of errors."""
    code: int = app(list(argv), result_action="return_value")
    return code


def loaded(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


# ---- making them


def test_a_directory_holds_one_certificate_per_role_and_two_tokens(home: Path) -> None:
    expected = {f"{name}.{kind}" for name in ("ca", *ROLES) for kind in ("crt", "key")} | {"join.token", "admin.token"}
    assert {path.name for path in home.iterdir()} == expected
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    for path in home.iterdir():
        secret = path.suffix in (".key", ".token")
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if secret else 0o644), path
    assert (home / "join.token").read_text() != (home / "admin.token").read_text()
    assert len((home / "join.token").read_text().strip()) >= 43


@pytest.mark.parametrize("role", sorted(ROLES))
def test_a_certificate_is_for_one_role_both_ways(role: str, home: Path) -> None:
    certificate, authority = loaded(home / f"{role}.crt"), loaded(home / "ca.crt")
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [f"{role}.paramserver.internal"]
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [f"paramserver://role/{role}"]
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usage) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    now = datetime.now(UTC)
    assert timedelta(minutes=5) < now - certificate.not_valid_before_utc < timedelta(minutes=15)
    assert timedelta(days=364) < certificate.not_valid_after_utc - now <= timedelta(days=365)
    assert "O=digits" in certificate.subject.rfc4514_string()


def test_nothing_is_overwritten(home: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in home.iterdir()}
    with pytest.raises(errors.ConfigError, match="is not empty, and is not overwritten"):
        certs.init(home)
    assert {path.name: path.read_bytes() for path in home.iterdir()} == before
    (tmp_path / "empty").mkdir(mode=0o755)
    certs.init(tmp_path / "empty")
    assert stat.S_IMODE((tmp_path / "empty").stat().st_mode) == 0o700
    (tmp_path / "file").write_text("x")
    with pytest.raises(errors.ConfigError, match="cannot be written to"):
        certs.init(tmp_path / "file")


def test_renewing_replaces_certificates_and_keys_and_keeps_the_rest(home: Path) -> None:
    before = {path.name: path.read_bytes() for path in home.iterdir()}
    certs.renew(home, days=30)
    changed = {path.name for path in home.iterdir() if path.read_bytes() != before.get(path.name)}
    assert changed == {f"{role}.{kind}" for role in ROLES for kind in ("crt", "key")}
    renewed = loaded(home / "worker.crt")
    renewed.verify_directly_issued_by(loaded(home / "ca.crt"))
    assert renewed.not_valid_after_utc - datetime.now(UTC) <= timedelta(days=30)
    assert renewed.subject == x509.load_pem_x509_certificate(before["worker.crt"]).subject
    assert stat.S_IMODE((home / "worker.key").stat().st_mode) == 0o600


def test_renewing_takes_the_authority(home: Path, tmp_path: Path) -> None:
    (home / "ca.key").rename(tmp_path / "ca.key")
    with pytest.raises(errors.ConfigError, match=r"has no ca\.key"):
        certs.renew(home)
    (home / "ca.key").write_text("x")
    (home / "ca.key").chmod(0o600)
    with pytest.raises(errors.ConfigError, match="damaged"):
        certs.renew(home)
    (home / "ca.key").write_bytes((home / "worker.key").read_bytes())
    with pytest.raises(errors.ConfigError, match="do not belong together"):
        certs.renew(home)
    certs.init(tmp_path / "old", now=datetime.now(UTC) - timedelta(days=4000))
    with pytest.raises(errors.ConfigError, match=r"expired on .* certs init"):
        certs.renew(tmp_path / "old")


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    began = datetime.now(UTC) - timedelta(days=3600)
    certs.init(tmp_path / "old", now=began)
    certs.renew(tmp_path / "old")
    assert loaded(tmp_path / "old" / "worker.crt").not_valid_after_utc < datetime.now(UTC) + timedelta(days=51)


# ---- the commands


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = str(tmp_path / "certs")
    assert command("init", directory, "--days", "8", "--job", "digits") == 0
    out = capsys.readouterr().out
    assert "ca.crt, <role>.crt, <role>.key and join.token" in out
    assert (tmp_path / "certs" / "join.token").read_text().strip() not in out
    assert command("show", directory) == 0
    assert capsys.readouterr().out.count("8 days left") == len(ROLES)
    assert command("renew", directory, "--days", "7") == 0
    capsys.readouterr()
    assert command("show", directory) == UNHEALTHY_EXIT_CODE
    assert "RENEW NOW" in capsys.readouterr().out
    assert command("show", directory, "--json") == UNHEALTHY_EXIT_CODE
    rows = json.loads(capsys.readouterr().out)
    assert {row["role"]: row["well"] for row in rows} == {"ca": True, **dict.fromkeys(ROLES, False)}
    assert rows[1]["file"] == "coordinator.crt"
    assert 6.9 < rows[1]["days_left"] <= 7


def test_a_machine_shows_what_it_has_and_what_has_expired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certs.init(tmp_path / "old", days=1, now=datetime.now(UTC) - timedelta(days=3))
    for path in (tmp_path / "old").iterdir():
        if path.stem not in ("ca", "worker", "join"):
            path.unlink()
    assert command("show", str(tmp_path / "old")) == UNHEALTHY_EXIT_CODE
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ca", "worker"]
    assert "EXPIRED" in lines[1]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["show", "{tmp}/nothing"], "has no certificates; make some with `paramserver certs init`"),
        (["renew", "{tmp}/nothing"], r"has no ca\.key"),
        (["init", "{tmp}/new", "--days", "0"], "--days is 0, but must be an integer from 1 to 3650"),
        (["renew", "{tmp}/certs", "--days", "3651"], "--days is 3651"),
        (["init", "{tmp}/new", "--job", "../x"], '--job is "../x"'),
    ],
)
def test_mistakes_with_the_commands(argv: list[str], text: str, home: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match=text):
        command(*(part.format(tmp=tmp_path) for part in argv))
    assert not (tmp_path / "new").exists()


# ---- the settings


def settings(environ: dict[str, str] | None = None, **security: object) -> Any:
    given = {f"security.{key}": str(value) for key, value in security.items()}
    return load_settings(None, given, {"PARAMSERVER_CONFIG": "", **(environ or {})})


def test_a_directory_is_all_that_has_to_be_named(home: Path) -> None:
    found = {role: load_security(settings(certs=home), role) for role in ROLES}
    join, admin = ((home / name).read_text().strip() for name in ("join.token", "admin.token"))
    for role, mine in found.items():
        assert mine.tls
        assert mine.role == role
        assert mine.join.first() == join
        assert mine.admin.first() == (admin if role in ("coordinator", "admin") else "")


def test_without_settings_there_is_nothing(tmp_path: Path) -> None:
    mine = load_security(settings(), "worker")
    assert (mine.tls, bool(mine.join), bool(mine.admin), mine.insecure) == (False, False, False, False)
    assert load_security(settings(insecure=True), "worker").insecure


def test_a_token_in_the_environment_goes_before_files(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text(TOKEN + "-from-a-file")
    other.chmod(0o600)
    environ = {"PARAMSERVER_SECURITY__TOKEN": TOKEN, "PARAMSERVER_SECURITY__ADMIN_TOKEN": TOKEN + "-admin"}
    assert load_security(settings(certs=home, token_file=other), "worker").join.first() == TOKEN + "-from-a-file"
    mine = load_security(settings(environ, certs=home, token_file=other), "admin")
    assert (mine.join.first(), mine.admin.first()) == (TOKEN, TOKEN + "-admin")
    assert not load_security(settings(environ), "server").admin


def test_an_admin_token_that_was_found_elsewhere_is_used_where_none_is_configured(home: Path) -> None:
    assert load_security(settings(), "admin", TOKEN).admin.first() == TOKEN
    assert load_security(settings(certs=home), "admin", TOKEN).admin.first() != TOKEN
    assert not load_security(settings(), "worker", TOKEN).admin


def test_what_is_wrong_with_the_files_is_said(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "_SETTLE_TRIES", 1)
    certs.init(tmp_path / "foreign")

    def complaint(**more: Path) -> str:
        with pytest.raises(errors.ConfigError) as caught:
            load_security(settings(None, certs=home, **more), "worker")
        return str(caught.value)

    with pytest.raises(errors.ConfigError, match="does not exist; make one with `paramserver certs init`"):
        load_security(settings(certs=tmp_path / "nothing"), "worker")
    assert "no such file" in complaint(token_file=tmp_path / "nothing")
    (home / "worker.key").chmod(0o640)
    assert f'run: chmod 600 "{home}/worker.key"' in complaint()
    (home / "worker.key").chmod(0o600)
    key, certificate = (home / "worker.key").read_bytes(), (home / "worker.crt").read_bytes()
    (home / "worker.key").write_bytes((home / "server.key").read_bytes())
    assert "is not the key of" in complaint()
    (home / "worker.crt").write_bytes((home / "server.crt").read_bytes())
    assert "is no certificate of a worker" in complaint()
    for kind in ("key", "crt"):
        (home / f"worker.{kind}").write_bytes((tmp_path / "foreign" / f"worker.{kind}").read_bytes())
    assert "was not made with" in complaint()
    (home / "worker.key").write_bytes(key)
    (home / "worker.crt").write_text("x")
    assert '/worker.crt" is no certificate' in complaint()
    (home / "worker.crt").unlink()
    assert '/worker.crt" cannot be read: no such file' in complaint()
    (home / "worker.crt").write_bytes(certificate)
    assert load_security(settings(certs=home), "worker").tls
