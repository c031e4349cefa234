"""The package works as a wheel, away from its checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.integration.harness import ROOT

NO_COMPILER = {"CC": "no-such-compiler"}


def run(*argv: str | Path, cwd: Path, environ: Mapping[str, str] | None = None) -> str:
    """What a command prints; nothing of the checkout is on its path."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith(("PARAMSERVER_", "PIP_"))}
    done = subprocess.run(
        [str(word) for word in argv],
        cwd=cwd,
        env={**kept, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*tokens: str | Path, cwd: Path, environ: Mapping[str, str] | None = None) -> None:
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *tokens, cwd=cwd, environ=environ)


def build(folder: Path, environ: Mapping[str, str] | None = None) -> Path:
    """A wheel, built with what is installed here and nothing else."""
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder)
    pip("wheel", *options, ROOT, cwd=folder, environ=environ)
    (path,) = folder.glob("*.whl")
    return path


def content(wheel: Path) -> set[str]:
    """What of the package is in it."""
    names = zipfile.ZipFile(wheel).namelist()
    assert "paramserver-0.1.0.dist-info/licenses/LICENSE" in names
    return {name for name in names if not name.startswith("paramserver-0.1.0.dist-info/")}


def files() -> set[str]:
    """What of the package is here, but for what is compiled."""
    paths = (ROOT / "paramserver").rglob("*")
    kept = [path for path in paths if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"]
    return {str(path.relative_to(ROOT)) for path in kept}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with compiled kernels."""
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel is installed, which takes no compiler."""
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--no-deps", "--no-index", "--target", folder, wheel, cwd=folder, environ=NO_COMPILER)
    return folder


KERNELS = "paramserver/kernels/_kernels.so"
KERNELS_REPORT = "from paramserver.server.arithmetic import compiled; print(compiled.report())"


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")
def test_wheel_holds_the_package_and_its_kernels_and_nothing_else(wheel: Path) -> None:
    assert wheel.name.startswith("paramserver-0.1.0-py3-none-linux_")
    package = content(wheel)
    assert package == files() | {KERNELS}
    assert {"paramserver/py.typed", "paramserver/v1/types_pb2.pyi", "paramserver/kernels/kernels.c"} <= package


@pytest.mark.long
def test_without_a_compiler_the_wheel_is_for_any_machine(tmp_path: Path) -> None:
    pure = build(tmp_path, NO_COMPILER)
    assert pure.name == "paramserver-0.1.0-py3-none-any.whl"
    assert content(pure) == files()
    folder = tmp_path / "site"
    pip("install", "--no-deps", "--no-index", "--target", folder, pure, cwd=tmp_path, environ=NO_COMPILER)
    report = run(sys.executable, "-c", KERNELS_REPORT, cwd=tmp_path, environ={"PYTHONPATH": str(folder)})
    assert report == "not built: there was no C compiler when paramserver was installed\n"


def test_commands_of_the_installed_wheel(site: Path, tmp_path: Path) -> None:
    environ = {"PYTHONPATH": str(site)}
    code = "import paramserver, paramserver.launcher.launcher, paramserver.roles.child, paramserver.worker.context\n"
    code += "from paramserver.cli.main import main; print(paramserver.__file__); main(['--help'])"
    text = run(sys.executable, "-c", code, cwd=tmp_path, environ=environ)
    assert text.startswith(f"{site}/paramserver/__init__.py\n")
    assert "Usage: paramserver COMMAND" in text
    assert run(sys.executable, "-c", KERNELS_REPORT, cwd=tmp_path, environ=environ).startswith(
        "compiled: " if shutil.which("cc") else "not built"
    )
    assert run(site / "bin" / "paramserver", "--version", cwd=tmp_path, environ=environ) == "paramserver 0.1.0\n"
