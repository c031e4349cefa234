"""Starting is cheap: neither the package nor its help loads torch or gRPC, and importing starts nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

HEAVY = {"torch", "numpy", "grpc", "redis", "structlog", "safetensors"}
# Prints what was loaded, and how many threads run, on the last line of standard output.
REPORT = "import json, sys, threading; print(); print(json.dumps([sorted(sys.modules), threading.active_count()]))"


def run_python(code: str) -> tuple[str, set[str], int, float]:
    """What the code printed, the top-level modules it loaded, its threads, and its seconds, in a fresh interpreter."""
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{REPORT}"], capture_output=True, text=True, timeout=60, check=False
    )
    seconds = time.monotonic() - begin
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    out, _, report = done.stdout.rstrip("\n").rpartition("\n")
    modules, threads = json.loads(report)
    return out, {name.split(".")[0] for name in modules}, threads, seconds


def test_importing_the_package_loads_nothing_heavy_and_starts_nothing() -> None:
    out, modules, threads, seconds = run_python("import paramserver")
    print(f"import paramserver: {seconds:.2f} s")
    assert "paramserver" in modules
    assert not modules & HEAVY
    assert threads == 1
    assert out.strip() == ""


def test_importing_the_settings_loads_nothing_heavy() -> None:
    _, modules, _, seconds = run_python("import paramserver.config")
    print(f"import paramserver.config: {seconds:.2f} s")
    assert not modules & HEAVY


@pytest.mark.parametrize("module", ["paramserver.launcher.launcher", "paramserver.roles.coordinating"])
def test_processes_that_compute_nothing_load_no_torch(module: str) -> None:
    """The launcher and the coordinator only move bytes, and torch takes most of the time in which a process starts."""
    _, modules, _, seconds = run_python(f"import {module}")
    print(f"import {module}: {seconds:.2f} s")
    assert "torch" not in modules


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (["--help"], "Usage: paramserver"),
        (["run", "--help"], "--staleness"),
        (["status", "--help"], "--watch"),
        (["checkpoint", "export", "--help"], "safetensors"),
        (["simulate", "--help"], "--straggler"),
        (["config", "show"], "[consistency]"),
    ],
)
def test_help_and_settings_load_nothing_heavy(tokens: list[str], says: str) -> None:
    out, modules, _, seconds = run_python(f"from paramserver.cli.main import main\nassert main({tokens!r}) == 0")
    print(f"paramserver {' '.join(tokens)}: {seconds:.2f} s")
    assert says in out
    assert not modules & HEAVY


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paramserver", "run", "absent.py"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == 'paramserver: error: script "absent.py" does not exist; give the path of a Python file\n'
