"""The file that `paramserver init` writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paramserver.cli.main import main
from paramserver.config import load_settings


def test_the_file_is_valid_and_has_the_defaults_with_and_without_its_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    file = tmp_path / "paramserver.toml"
    assert load_settings(file, environ={}) == load_settings(None, environ={})
    shown = re.sub(r"^# (\w+ = )", r"\1", file.read_text(), flags=re.MULTILINE)
    assert "\nservers = 1\n" in shown
    file.write_text(shown)
    settings = load_settings(file, environ={})
    assert settings == load_settings(None, environ={})
    given = [key for key, origin in settings.origins().items() if origin != "default"]
    assert {"cluster.workers", "consistency.mode", "checkpoint.dir", "run.args"} <= set(given)


def test_a_file_that_exists_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.toml"
    file.write_text("[training]\nseed = 3\n")
    assert main(["init", "mine.toml"]) == 2
    assert "exists and stays as it is" in capsys.readouterr().err
    assert file.read_text() == "[training]\nseed = 3\n"
    assert main(["init", "no/such/directory.toml"]) == 2
    assert "cannot be written" in capsys.readouterr().err
