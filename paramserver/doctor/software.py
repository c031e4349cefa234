"""Python, the packages, whether they fit together, and whether torch can be imported."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import zip_longest
from pathlib import Path

from paramserver.doctor.finding import Finding, Level, clean, listing

MIN_PYTHON = (3, 11)
# They start no threads at the exit of a script, when a worker leaves its job (CPython gh-113964).
UNFIT_PYTHON = ((3, 12, 0), (3, 12, 1))
IMPORT_TIMEOUT_S = 120.0
SLOW_IMPORT_S = 15.0
NVIDIA_SMI_TIMEOUT_S = 10.0
# Packages made together with gRPC: each release of them wants certain releases of protobuf.
COMPANIONS = ("grpcio-status", "grpcio-health-checking", "grpcio-reflection", "grpcio-channelz")
FORK_VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"
_REINSTALL = "install paramserver anew with its constraints: pip install -c constraints.txt ."

_IMPORTED = ("paramserver", "torch", "kernels")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?")
_SPECIFIER = re.compile(r"\s*(===|~=|==|!=|<=|>=|<|>)\s*([^,\s]+)\s*")

# Run in a process of its own: a broken torch may end the process without a message.
_IMPORTS = """
import json, sys, time
sys.path.append(sys.argv[1])
report = {}
def timed(name, load):
    begin = time.perf_counter()
    try:
        report[name] = {**load(), "seconds": time.perf_counter() - begin}
    except BaseException as error:
        report[name] = {"error": f"{type(error).__name__}: {error}"}
def paramserver():
    import paramserver
    import paramserver.transport.grpc
    return {}
def torch():
    import torch
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"version": torch.__version__, "cuda_build": torch.version.cuda or torch.version.hip or "", "cuda": cuda,
            "names": [torch.cuda.get_device_name(index) for index in range(cuda)],
            "mps": torch.backends.mps.is_available()}
def kernels():
    from paramserver.server.arithmetic import compiled
    return {"version": compiled.report()}
timed("paramserver", paramserver)
timed("torch", torch)
timed("kernels", kernels)
print("\\n" + json.dumps(report))
"""


def installed_version(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def requirements_of(package: str) -> list[str] | None:
    """The requirements of a package; None if it is not installed."""
    try:
        return requires(package) or []
    except PackageNotFoundError:
        return None


def satisfies(found: str, specifiers: str) -> bool:
    """Whether a version is within ">=1.76,<2". Of a version only its numbers count: "2.13.0+cpu" is 2.13.0."""
    have = _numbers(found)
    for operator, text in _SPECIFIER.findall(specifiers):
        want = _numbers(text)
        pairs = list(zip_longest(have, want, fillvalue=0))
        left, right = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        prefix = have[: len(want)] == want if text.endswith(".*") else left == right
        holds = {
            "==": prefix,
            "===": prefix,
            "!=": not prefix,
            ">=": left >= right,
            "<=": left <= right,
            ">": left > right,
            "<": left < right,
            "~=": left >= right and have[: len(want) - 1] == want[:-1],
        }[operator]
        if not holds:
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def check_python(running: tuple[int, int, int], implementation: str = "CPython") -> Finding:
    """The interpreter's version."""
    text = f"{implementation} {'.'.join(map(str, running))}"
    if running[:2] < MIN_PYTHON:
        least = ".".join(map(str, MIN_PYTHON))
        return Finding("python", Level.FAIL, text, f"make an environment with Python {least} or later")
    if running in UNFIT_PYTHON:
        return Finding("python", Level.FAIL, text, "make an environment with another Python: 3.11, or 3.12.2 or later")
    if implementation != "CPython":
        return Finding("python", Level.WARN, text, "use CPython: the tests run with CPython only")
    return Finding("python", Level.OK, text)


def check_packages(requirements: Sequence[str] | None, installed: Callable[[str], str | None]) -> Finding:
    """Whether every package that paramserver needs is there, in a release that it supports."""
    if requirements is None:
        return Finding("packages", Level.NOTE, "paramserver is a checkout that is not installed", _REINSTALL)
    good, bad, wanted = [], [], []
    for text in requirements:
        name, specifiers, marker = _parse(text)
        if "extra" in marker:
            continue
        found = installed(name)
        if found is None or not satisfies(found, specifiers):
            bad.append(f"{name} {found or 'is missing'} (needs {specifiers or 'any'})")
            wanted.append(f"'{name}{specifiers}'")
        else:
            good.append(f"{name} {found}")
    if bad:
        return Finding("packages", Level.FAIL, listing(bad), f"pip install {' '.join(wanted)}")
    return Finding("packages", Level.OK, listing(good, most=20))


def check_protobuf(
    installed: Callable[[str], str | None], requirements: Callable[[str], Sequence[str] | None]
) -> Finding:
    """Whether gRPC, its companions and protobuf are of one generation."""
    protobuf, grpcio = installed("protobuf"), installed("grpcio")
    if protobuf is None or grpcio is None:
        return Finding("protobuf", Level.FAIL, "grpcio or protobuf is missing", _REINSTALL)
    bad, wanted = [], []
    for companion in COMPANIONS:
        for text in requirements(companion) or ():
            name, specifiers, _ = _parse(text)
            found = {"protobuf": protobuf, "grpcio": grpcio}.get(name)
            if found is not None and not satisfies(found, specifiers):
                bad.append(f"{companion} {installed(companion)} needs {name}{specifiers}, here is {found}")
                wanted.append(companion)
    value = f"grpcio {grpcio} with protobuf {protobuf}"
    if bad:
        remedy = f"pip install --upgrade {' '.join(dict.fromkeys(wanted))}  (the resolver picks releases that fit)"
        return Finding("protobuf", Level.WARN, f"{value}; {listing(bad)}", remedy)
    return Finding("protobuf", Level.OK, value)


def _parse(requirement: str) -> tuple[str, str, str]:
    match = _REQUIREMENT.match(requirement)
    assert match is not None, requirement
    return match.group(1).lower(), match.group(2).strip(), match.group(3) or ""


def check_fork(environ: Mapping[str, str]) -> Finding:
    """gRPC's own fork handlers have to be off, or DataLoader workers may crash."""
    setting = environ.get(FORK_VARIABLE)
    if setting is None or setting.lower() in ("0", "false", "no"):
        return Finding("fork support", Level.OK, "gRPC's fork handlers are off" if setting else "left to paramserver")
    value = f"{FORK_VARIABLE}={clean(setting)}: processes forked by a DataLoader may crash"
    return Finding("fork support", Level.WARN, value, f"unset {FORK_VARIABLE}, or set it to 0")


# ---- imports, in a process of their own


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of importing one module. `error` is empty if it worked."""

    error: str = ""
    seconds: float = 0.0
    version: str = ""
    cuda_build: str = ""
    cuda: int = 0
    names: tuple[str, ...] = ()
    mps: bool = False


def try_imports(timeout_s: float = IMPORT_TIMEOUT_S) -> dict[str, Imported]:
    """Import paramserver and torch in another process, and load the kernels. The answer has all three. Blocking."""
    root = Path(__file__).resolve().parents[2]
    argv = [sys.executable, "-P", "-c", _IMPORTS, str(root)]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return dict.fromkeys(_IMPORTED, Imported(error=f"not done after {timeout_s:g} s"))
    return read_imports(done.returncode, done.stdout.decode(errors="replace"))


def read_imports(code: int, output: str) -> dict[str, Imported]:
    """The report in the last line of the process, or the way in which the process ended without one."""
    try:
        report = json.loads(output.strip().splitlines()[-1])
        return {name: Imported(**{**facts, "names": tuple(facts.get("names", ()))}) for name, facts in report.items()}
    except (IndexError, ValueError, TypeError, AttributeError):
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return dict.fromkeys(_IMPORTED, Imported(error=f"the process that tried it ended without a message ({how})"))


def check_import(name: str, found: Imported) -> Finding:
    """Whether a module can be imported, and how long it takes."""
    check = f"import {name}"
    if found.error:
        return Finding(check, Level.FAIL, clean(found.error), _REINSTALL if name == "paramserver" else _TORCH)
    version_text = f"{found.version} in " if found.version else ""
    value = f"{version_text}{found.seconds:.1f} s"
    if found.seconds > SLOW_IMPORT_S:
        return Finding(check, Level.NOTE, value, "put the Python environment on a local disk, so that starting is fast")
    return Finding(check, Level.OK, value)


def check_kernels(found: Imported) -> Finding:
    """Whether servers update with compiled kernels. Without kernels servers are slower, with the same results."""
    if found.error:
        return Finding("kernels", Level.NOTE, clean(f"not looked at: {found.error}"))
    if found.version.startswith("compiled:"):
        return Finding("kernels", Level.OK, found.version)
    value = f"{found.version}; an update takes a server up to twice as long"
    return Finding("kernels", Level.NOTE, clean(value), "install a C compiler, then paramserver anew")


_TORCH = "install torch anew, with PyTorch's own instructions for this machine"


def count_gpus(timeout_s: float = NVIDIA_SMI_TIMEOUT_S) -> int:
    """How many GPUs the driver knows, also if torch sees none; 0 if there is no driver."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    lines = re.findall(r"^GPU \d+:", done.stdout.decode(errors="replace"), re.MULTILINE)
    return len(lines) if done.returncode == 0 else 0


def check_gpu(device: str, torch: Imported, driver_gpus: int) -> Finding:
    """The device of workers, by ``training.device``, and the devices of this machine."""
    if torch.error:
        return Finding("gpu", Level.NOTE, "not looked at, since torch cannot be imported")
    seen = f"{torch.cuda} × {torch.names[0]}" if torch.names else ("Apple GPU" if torch.mps else "no GPU")
    value = f"training.device is {device}; torch sees {clean(seen)}"
    kind, _, index = device.partition(":")
    if kind == "cuda":
        if torch.cuda == 0:
            return Finding("gpu", Level.FAIL, value, _why_no_cuda(torch, driver_gpus))
        if index and int(index) >= torch.cuda:
            return Finding("gpu", Level.FAIL, value, f"set training.device to cuda:0 … cuda:{torch.cuda - 1}")
    if kind == "mps" and not torch.mps:
        return Finding("gpu", Level.FAIL, value, "set training.device to auto or cpu")
    if kind == "auto" and torch.cuda == 0 and driver_gpus:
        return Finding(
            "gpu", Level.WARN, f"{value}, the driver {driver_gpus}: unused", _why_no_cuda(torch, driver_gpus)
        )
    if kind == "cpu" and (torch.cuda or torch.mps):
        return Finding("gpu", Level.NOTE, f"{value}: unused", "set training.device to auto to compute on it")
    return Finding("gpu", Level.OK, value)


def _why_no_cuda(torch: Imported, driver_gpus: int) -> str:
    if not driver_gpus:
        return "set training.device to auto; or install the GPU's driver, or start the container with access to it"
    if not torch.cuda_build:
        return "install a build of torch for CUDA: this one is for the CPU only"
    return f"update the GPU's driver for CUDA {torch.cuda_build}, or install a torch built for an older CUDA"
