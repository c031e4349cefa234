"""A script is begun as Python begins it, and files beside it stand in for no modules but its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paramserver.cli.train.run import script_path
from paramserver.config import load_settings
from paramserver.errors import ConfigError
from paramserver.processes.starting import python
from paramserver.roles.scripts import Script, _imported, _others


def test_which_files_have_the_names_of_other_modules(tmp_path: Path) -> None:
    for name in ("queue", "redis", "helpers", "asyncio", "threading", "torch", "sys"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "grpc").mkdir()
    (tmp_path / "grpc" / "__init__.py").write_text("")
    (tmp_path / "statistics").mkdir()  # no package
    assert _others(str(tmp_path)) == {"queue", "redis", "grpc"}


def test_the_names_that_code_of_a_directory_imports(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import queue, os.path\ndef f():\n    from redis.client import Redis\n")
    (tmp_path / "broken.py").write_text("import copy oops\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "part.py").write_text("from . import other\nfrom random import random\n")
    assert _imported(str(tmp_path)) == {"queue", "os", "redis", "random"}


def test_python_does_not_look_into_the_current_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    home = str(Path(__file__).parents[2])
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", ["/somewhere", "/elsewhere", home])
    assert python("paramserver") == [sys.executable, "-P", "-m", "paramserver"]
    monkeypatch.setattr(sys, "path", [home, "/elsewhere"])  # a checkout that is not installed
    assert python("paramserver") == [sys.executable, "-m", "paramserver"]


def test_words_of_a_file_and_of_a_module() -> None:
    assert Script(["train.py", "-m", "1"]).file == "train.py"
    assert Script(["-m", "pkg.train", "1"]).file == "pkg.train"


@pytest.mark.parametrize(
    ("script", "module", "sentence"),
    [
        ("train.ipynb", "false", r"is a notebook; call paramserver\.launch\(function, workers=4\)"),
        ("pkg/train.py", "true", "is a file; -m takes the name of a module"),
        ("train.py", "true", "is a file; -m takes the name of a module"),
    ],
)
def test_scripts_that_are_refused(script: str, module: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        script_path(load_settings(None, {"run.script": script, "run.module": module}))


def test_a_module_need_not_be_a_file() -> None:
    assert script_path(load_settings(None, {"run.script": "pkg.train", "run.module": "true"})) == Path("pkg.train")
