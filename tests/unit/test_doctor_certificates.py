"""Doctor on certificates, keys and tokens: what is missing, open, foreign, or about to expire."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from paramserver.config import Settings, load_settings
from paramserver.doctor.certificates import check_certificates, check_dates, check_tokens
from paramserver.doctor.finding import Finding, Level
from paramserver.pki import certs


def now() -> datetime:
    """Not earlier than the certificates that a test has made."""
    return datetime.now(UTC)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `paramserver certs init` makes; tests that change it take a copy."""
    directory = tmp_path_factory.mktemp("made") / "certs"
    certs.init(directory, days=30)
    return directory


@pytest.fixture
def directory(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "certs")


def by_check(findings: Sequence[Finding]) -> dict[str, Finding]:
    assert len({finding.check for finding in findings}) == len(findings)
    return {finding.check: finding for finding in findings}


def test_none_configured() -> None:
    (found,) = check_certificates(None, now())
    assert found.level is Level.NOTE


def test_no_such_directory(tmp_path: Path) -> None:
    (found,) = check_certificates(tmp_path / "absent", now())
    assert (found.level, "paramserver certs init" in found.remedy) == (Level.FAIL, True)


def test_all_is_well(made: Path) -> None:
    found = by_check(check_certificates(made, now()))
    assert set(found) == {"certificate ca", "ca.key", *(f"certificate {role}" for role in certs.ISSUED)}
    assert {finding.level for finding in found.values()} == {Level.OK, Level.NOTE}
    assert found["certificate worker"].value.startswith("valid until ")
    assert "only where certificates are made" in found["ca.key"].remedy


def test_a_machine_with_one_role_is_well(directory: Path) -> None:
    for path in directory.iterdir():
        if path.stem not in ("worker", "join") and path.name != "ca.crt":
            path.unlink()
    found = by_check(check_certificates(directory, now()))
    assert {check: finding.level for check, finding in found.items()} == {
        "certificate ca": Level.OK,
        "certificate worker": Level.OK,
    }


@pytest.mark.parametrize(
    ("after", "level", "says", "remedy"),
    [
        (timedelta(days=20), Level.WARN, "valid until", "paramserver certs renew where ca.key is"),
        (timedelta(days=31), Level.FAIL, "expired on", "paramserver certs renew where ca.key is"),
        (timedelta(days=-1), Level.FAIL, "not valid before", "correct this machine's clock"),
    ],
    ids=["soon", "expired", "not yet"],
)
def test_dates(made: Path, after: timedelta, level: Level, says: str, remedy: str) -> None:
    found = by_check(check_certificates(made, now() + after))["certificate server"]
    assert found.level is level
    assert says in found.value
    assert remedy in found.remedy


def test_the_last_day_counts_to_the_second() -> None:
    end = datetime(2030, 1, 1, tzinfo=UTC)
    begin = end - timedelta(days=400)
    second = timedelta(seconds=1)
    levels = [
        check_dates("c", begin, end, now).level
        for now in (begin - second, begin, end - timedelta(days=14), end - timedelta(days=14) + second, end)
    ]
    assert levels == [Level.FAIL, Level.OK, Level.OK, Level.WARN, Level.FAIL]


def test_a_key_that_others_can_read(directory: Path) -> None:
    (directory / "worker.key").chmod(0o644)
    (directory / "ca.key").chmod(0o640)
    found = by_check(check_certificates(directory, now()))
    assert found["certificate worker"].level is Level.FAIL
    assert f'chmod 600 "{directory}/worker.key"' in found["certificate worker"].remedy
    assert (found["ca.key"].level, "chmod 600" in found["ca.key"].remedy) == (Level.FAIL, True)
    assert found["certificate server"].level is Level.OK


def test_a_key_of_another_certificate(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)  # the files may just be being replaced
    shutil.copy(directory / "server.key", directory / "worker.key")
    found = by_check(check_certificates(directory, now()))["certificate worker"]
    assert (found.level, "is not the key of" in found.value) == (Level.FAIL, True)
    assert found.remedy == "copy both from the same directory"
    assert waits


def test_a_certificate_of_another_authority_or_role(directory: Path, tmp_path: Path) -> None:
    certs.init(tmp_path / "other")
    for name in ("server.crt", "server.key"):
        shutil.copy(tmp_path / "other" / name, directory / name)
    for suffix in ("crt", "key"):
        shutil.copy(directory / f"admin.{suffix}", directory / f"worker.{suffix}")
    found = by_check(check_certificates(directory, now()))
    assert "was not made with" in found["certificate server"].value
    assert "is no certificate of a worker" in found["certificate worker"].value
    assert found["certificate server"].level is found["certificate worker"].level is Level.FAIL


def test_files_that_are_missing_or_damaged(directory: Path) -> None:
    (directory / "server.crt").unlink()
    (directory / "worker.crt").write_text("-----BEGIN nonsense")
    (directory / "ca.crt").rename(directory / "away")
    found = by_check(check_certificates(directory, now()))
    for check in ("certificate server", "certificate worker", "certificate ca"):
        assert found[check].level is Level.FAIL
        assert found[check].remedy
    (directory / "ca.crt").write_text("nonsense")
    assert "is no certificate" in by_check(check_certificates(directory, now()))["certificate ca"].value


def test_no_role_has_a_key(directory: Path) -> None:
    for path in directory.glob("*.key"):
        path.unlink()
    found = by_check(check_certificates(directory, now()))
    assert found["certificates"].level is Level.FAIL
    assert "no role has a key" in found["certificates"].value


def secured(**security: str) -> Settings:
    return load_settings(
        overrides={f"security.{key}": value for key, value in security.items() if "token" not in key or "file" in key},
        environ={f"PARAMSERVER_SECURITY__{key.upper()}": value for key, value in security.items() if key == "token"},
    )


def test_tokens_from_everywhere(directory: Path) -> None:
    join, admin = check_tokens(secured(certs=str(directory)))
    assert (join.level, join.value) == (Level.OK, f"{directory}/join.token, private")
    assert (admin.level, admin.value) == (Level.OK, f"{directory}/admin.token, private")
    join, admin = check_tokens(secured(token="hunter2-hunter2-hunter2"))
    assert (join.level, join.value) == (Level.OK, "from the environment")
    assert "hunter2" not in str(join)
    assert (admin.level, admin.remedy) == (Level.NOTE, "")
    join, _ = check_tokens(secured(token_file=str(directory / "admin.token")))
    assert join.level is Level.OK


def test_no_token_beside_the_certificates(directory: Path) -> None:
    (directory / "join.token").unlink()
    (directory / "admin.token").unlink()
    join, admin = check_tokens(secured(certs=str(directory)))
    assert (join.level, admin.level) == (Level.FAIL, Level.NOTE)
    assert join.remedy.startswith("copy join.token")
    join, _ = check_tokens(secured())
    assert join.level is Level.NOTE


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("hunter2-hunter2-hunter2", 0o644, "can be read by others"),
        ("", 0o600, "is empty"),
        ("hunter2", 0o600, "is no token"),
    ],
    ids=["open", "empty", "short"],
)
def test_tokens_that_cannot_be_used(tmp_path: Path, text: str, mode: int, says: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    path.chmod(mode)
    join, _ = check_tokens(secured(token_file=str(path)))
    assert join.level is Level.FAIL
    assert says in join.value
    assert join.remedy
    assert "hunter2" not in str(join)
